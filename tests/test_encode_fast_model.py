"""A thread may open fastokens' model of a tokenizer before it is needed. Ids and errors are those
of a tokenizer that is opened when it is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest

from mdsmix.encode import backend_files, fast_model
from mdsmix.encode.backends import Fastokens, Reference, Unequal, open_backend, store_difference
from mdsmix.encode.fast_model import (
    OpeningWhileDescribed,
    begin_opening,
    forget_openings,
    wait_for_openings,
)
from mdsmix.errors import RecipeError
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.bpe_json import find_joined
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from tests.styles import to_lists

TEXTS = ["", "Hello, world!", "<|im_start|>user", "déjà vu 東京 " * 40]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(fast_model, "_backends", WeakValueDictionary())  # not of earlier tests
    yield
    forget_openings()


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec(name=str(tokenizer_folder)))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return a list that gets the path of each file that fastokens opens, and whether this is done
    in a thread of fast_model.
    """
    opened = list[tuple[str, bool]]()
    open_now = fast_model._open_now

    def record(path: str) -> Any:
        opened.append((path, isinstance(threading.current_thread(), fast_model._Opening)))
        return open_now(path)

    monkeypatch.setattr(fast_model, "_open_now", record)
    return opened


def test_a_backend_takes_the_model_that_a_thread_has_opened(
    tokenizer: Tokenizer, opened: list[tuple[str, bool]]
) -> None:
    for _ in range(2):  # asking twice begins once
        begin_opening(tokenizer, "auto")
    backend = open_backend(tokenizer)
    assert [in_thread for _, in_thread in opened] == [True]
    for match in (False, True):
        expected = to_lists(Reference(tokenizer).encode(TEXTS, match))
        assert to_lists(backend.encode(TEXTS, match)) == expected
    # As long as there is a backend, nothing is opened ahead.
    begin_opening(tokenizer, "auto")
    wait_for_openings()
    assert len(opened) == 1
    del backend
    begin_opening(tokenizer, "auto")
    wait_for_openings()
    assert len(opened) == 2


@pytest.mark.parametrize("content", [b"{", b'{"model": {"type": "New"}}', b'{"a": "\xff"}', None])
def test_a_file_that_cannot_be_opened_has_the_same_error(
    tokenizer: Tokenizer, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    broken = replace(tokenizer, path=str(path), hash="broken")

    def find_errors() -> list[str]:
        errors = list[str]()
        for attempt in (lambda: Fastokens(broken), lambda: open_backend(broken, "fastokens")):
            with pytest.raises(Exception) as caught:  # noqa: PT011  (also those of libraries)
                attempt()
            errors.append(repr(caught.value))
        return errors

    expected = find_errors()
    try:
        begin_opening(broken, "fastokens")
    except OSError:  # `open_tokenizer_early` leaves it to the run
        assert content is None
    assert bool(fast_model._openings) == (content is not None)
    assert find_errors() == expected


def test_an_unsupported_tokenizer_is_left_to_the_reference(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    text = Path(tokenizer.path).read_text()
    path.write_text(text.replace('"normalizer":null', '"normalizer":{"type":"NFKC"}'))
    other = replace(tokenizer, path=str(path), hash="nfkc")
    begin_opening(other, "auto")
    assert isinstance(open_backend(other), Reference)
    begin_opening(other, "auto")
    with pytest.raises(RecipeError, match="to auto or reference"):
        open_backend(other, "fastokens")


def test_nothing_is_opened_ahead_that_the_backend_does_not_need(
    tokenizer: Tokenizer, opened: list[tuple[str, bool]], tmp_path: Path
) -> None:
    begin_opening(tokenizer, "reference")
    # A difference is known.
    store_difference(tokenizer, Unequal(backend_files.name_fastokens(), "a text"))
    begin_opening(tokenizer, "auto")
    # The word form must be made first.
    sentencepiece = tmp_path / "tokenizer.json"
    sentencepiece.write_text('{"model": {"type": "BPE", "byte_fallback": true}}')
    begin_opening(replace(tokenizer, path=str(sentencepiece), hash="words"), "auto")
    wait_for_openings()
    assert opened == []
    # A recipe that asks for fastokens gets it although a difference is known.
    begin_opening(tokenizer, "fastokens")
    wait_for_openings()
    assert [in_thread for _, in_thread in opened] == [True]


def test_a_word_form_that_was_kept_is_opened_ahead(
    tokenizer: Tokenizer, opened: list[tuple[str, bool]]
) -> None:
    word_form = backend_files.locate_word_form(tokenizer.hash)
    word_form.parent.mkdir()
    word_form.write_bytes(Path(tokenizer.path).read_bytes())
    begin_opening(tokenizer, "auto")
    wait_for_openings()
    assert opened == [(str(word_form), True)]


def test_a_damaged_word_form_is_made_again(tokenizer: Tokenizer) -> None:
    """The thread's error is that of a damaged file, so this is as without a thread."""
    word_form = backend_files.locate_word_form(tokenizer.hash)
    word_form.parent.mkdir()
    word_form.write_bytes(b"{")
    begin_opening(tokenizer, "auto")
    assert open_backend(tokenizer).label.startswith("fastokens")


def test_a_model_is_opened_from_the_file_of_a_tokenizer_that_is_still_described(
    tokenizer: Tokenizer, tmp_path: Path, opened: list[tuple[str, bool]]
) -> None:
    """It is used if the description has the same ids. If it cannot be opened, the snapshot's is."""
    content = Path(tokenizer.path).read_text()
    for name, is_opened in (("same", True), ("broken", True), ("words", False)):
        file = tmp_path / name
        file.write_text({"broken": "{", "words": '{"byte_fallback": true}'}.get(name, content))
        opener = OpeningWhileDescribed("auto")
        opener.begin(str(file))
        opener.adopt_word_form(tokenizer.hash)
        opener.adopt(tokenizer.path)
        opened_again = [] if name == "same" else [(find_joined(tokenizer.path), False)]
        expected = to_lists(Reference(tokenizer).encode(TEXTS, True))
        assert to_lists(open_backend(tokenizer).encode(TEXTS, True)) == expected
        assert opened == [(str(file), True)] * is_opened + opened_again, name
        opened.clear()


def test_a_file_of_other_ids_is_not_used(
    tokenizer: Tokenizer, opened: list[tuple[str, bool]]
) -> None:
    OpeningWhileDescribed("reference").begin(tokenizer.path)
    opener = OpeningWhileDescribed("auto")
    opener.begin(tokenizer.path)
    wait_for_openings()
    assert opened == [(tokenizer.path, True)]
    open_backend(tokenizer)  # `adopt` was not called
    assert len(opened) == 2


def test_waiting_ends_when_no_thread_opens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    waits = threading.Event()

    def open_late(path: str) -> str:
        may_end.wait()
        return path

    monkeypatch.setattr(fast_model, "_open_now", open_late)
    begin_opening(tokenizer, "auto")

    def wait() -> None:
        waits.set()
        wait_for_openings()

    waiting = threading.Thread(target=wait)
    waiting.start()
    waits.wait()
    assert waiting.is_alive()
    assert any(isinstance(each, fast_model._Opening) for each in threading.enumerate())
    may_end.set()
    waiting.join()
    assert not any(isinstance(each, fast_model._Opening) for each in threading.enumerate())


LIST_THREADS = """
import sys
from pathlib import Path
from mdsmix.encode.fast_model import open_model

model = open_model(sys.argv[1], sys)
for file in sorted(Path("/proc/self/task").glob("*/comm")):
    print(file.read_text().strip() in ("python", "python3", Path(sys.executable).name))
print(model.encode_ordinary("déjà vu").ids)
model.encode_batch_flat(["déjà vu"])
print(len([*Path("/proc/self/task").iterdir()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_opening_leaves_no_thread_that_a_forked_worker_would_miss(tokenizer: Tokenizer) -> None:
    """fastokens starts a thread for each further processor when it encodes a batch."""
    command = [sys.executable, "-c", LIST_THREADS, find_joined(tokenizer.path)]
    environment = {**os.environ, "FASTOKENS_BPE_THREADS": "2"}
    printed = subprocess.check_output(command, text=True, env=environment).splitlines()
    threads, ids, after_batch = printed[:-2], printed[-2], printed[-1]
    assert threads == ["True"]
    assert ids == str(to_lists(Reference(tokenizer).encode(["déjà vu"], False))[0])
    assert after_batch == "2", "otherwise this test sees no threads"
