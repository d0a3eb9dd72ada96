"""Finds the file from which fastokens opens a tokenizer, and opens it in a thread before it is
needed.

fastokens takes 0.2 s for 32,000 ids, and 1 s for the 128,000 of Llama 3.1. Python runs other
threads meanwhile. So a conversion that certainly has work begins to open the tokenizer first
(`begin_opening`), and imports, plans and publishes the tokenizer on another processor. `open_model`
waits for the thread. This module imports neither numpy nor a library of tokenizers, since these
imports are a third of what is done meanwhile.
"""

from __future__ import annotations

import re
import threading
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mdsmix.cache import cache_folder
from mdsmix.tokenizer.bpe_json import find_joined
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

WORD_FORM_VERSION = 1
"""The version of the rules in word_form.py. Another one is made again, although the cache has an
earlier one.
"""
BYTE_FALLBACK = re.compile(rb'"byte_fallback"\s*:\s*true')


def name_fastokens() -> str:
    """Return the name and the installed version, such as `fastokens 0.3.5`."""
    return f"fastokens {package_version('fastokens')}"


def locate_word_form(tokenizer: Tokenizer) -> Path:
    """Return the file in the cache for the word form of a tokenizer; it need not exist."""
    return cache_folder() / "backends" / f"{tokenizer.hash}.words-{WORD_FORM_VERSION}.json"


def locate_difference(tokenizer: Tokenizer, label: str) -> Path:
    """Return the file in the cache for a difference between a fast backend and the reference; it
    need not exist. Its name contains the versions of both libraries.

    Args:
        tokenizer: the tokenizer.
        label: name and version of the fast backend.
    """
    compared = f"{label}-tokenizers-{package_version('tokenizers')}".replace(" ", "-")
    return cache_folder() / "backends" / f"{tokenizer.hash}-{compared}.unequal"


@cache
def may_have_word_form(path: str) -> bool:
    """Return whether a tokenizer may have a word form (word_form.py): False if its model encodes no
    unknown character as bytes. This takes 10 ms for Llama 3.1, and parsing its file 100 ms.

    Args:
        path: the tokenizer.json of a snapshot, which never changes.
    """
    return _encodes_bytes(path)


def _encodes_bytes(path: str) -> bool:
    """Return whether the model of a tokenizer.json encodes unknown characters as bytes."""
    return BYTE_FALLBACK.search(Path(path).read_bytes()) is not None


class _Opening(threading.Thread):
    """A thread that opens a model."""

    def __init__(self, path: str, is_spare: bool = False) -> None:
        """Store the path, and whether another file can be opened if this one cannot."""
        super().__init__(name=f"mdsmix opens {path}")
        self._path = path
        self._is_spare = is_spare
        self._model: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Open the model, or keep the error. A panic in a Rust library is not an Exception."""
        try:
            self._model = _open_now(self._path)
        except BaseException as error:
            self._error = error

    def wait(self) -> Any:
        """Wait for the end of the thread, and return the model. If the model could not be opened,
        raise the error, or return None if another file can be opened.
        """
        self.join()
        if self._error and not self._is_spare:
            raise self._error
        return self._model


class OpeningWhileDescribed:
    """Opens a tokenizer from its folder's file while transformers describes it; see
    `snapshot.Ahead`.
    """

    def __init__(self, backend: str) -> None:
        """Store the recipe's tokenizer.backend: `auto`, `fastokens` or `reference`."""
        self._backend = backend
        self._opening: _Opening | None = None

    def begin(self, file: str) -> None:
        """Begin to open the file in a thread, unless the backend will be the reference. Of a
        SentencePiece tokenizer the word form is made first.
        """
        if self._backend == "reference" or _encodes_bytes(file):
            return
        self._opening = _Opening(file, is_spare=True)
        self._opening.start()

    def adopt(self, path: str) -> None:
        """Let `open_model` take the model for a snapshot's tokenizer.json."""
        if self._opening:
            _openings[find_joined(path)] = self._opening


_openings: dict[str, _Opening] = {}
"Path of a file -> the thread that opens it, as long as nobody has taken the model."
_backends = WeakValueDictionary[str, Any]()
"Path of a file -> the last backend with its model, as long as the backend exists."


def begin_opening(tokenizer: Tokenizer, backend: str) -> None:
    """Begin to open, in a thread, the model that `backends.open_backend` will ask for. Nothing is
    begun if that will not be the reference alone, or must make the tokenizer's word form first.

    Args:
        tokenizer: the tokenizer.
        backend: the recipe's tokenizer.backend: `auto`, `fastokens` or `reference`.
    """
    if backend == "reference":
        return
    if backend == "auto" and locate_difference(tokenizer, name_fastokens()).exists():
        return
    word_form = locate_word_form(tokenizer)
    if word_form.exists():
        path = str(word_form)
    elif may_have_word_form(tokenizer.path):
        return
    else:
        path = find_joined(tokenizer.path)
    if path not in _openings and path not in _backends:
        opening = _Opening(path)
        opening.start()
        _openings[path] = opening


def open_model(path: str, backend: Any) -> Any:
    """Return fastokens' model of a tokenizer.json. If a thread opens it already, wait for it.

    Raises an error of any class if fastokens does not support the file, and ValueError if the file
    is missing.

    Args:
        path: the file.
        backend: the backend that will use the model. No thread opens the file as long as it exists.
    """
    opening = _openings.pop(path, None)
    model = opening.wait() if opening else None
    if model is None:
        model = _open_now(path)
    _backends[path] = backend
    return model


def _open_now(path: str) -> Any:
    from fastokens import Tokenizer as Model

    return Model.from_file(path)


def wait_for_openings() -> None:
    """Wait until no thread opens a model. This is called before a process is forked, since a forked
    process would find locks that no thread of its own opens.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _Opening):
            thread.join()


def forget_openings() -> None:
    """Forget the models that nobody has taken. Threads that still open one end by themselves."""
    _openings.clear()
