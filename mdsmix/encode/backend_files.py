"""Finds the files in the cache that decide how a tokenizer's backend is opened: its word form, and
what earlier runs found when they compared fastokens with the reference.

Like fast_model.py, which imports this module, it imports neither numpy nor a library of tokenizers.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from mdsmix.cache import cache_folder
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

WORD_FORM_VERSION = 4
"""The version of the rules in word_form.py. If it is raised, word forms are made again, and those
in the cache are not used any more.
"""
BYTE_FALLBACK = re.compile(rb'"byte_fallback"\s*:\s*true')


def name_fastokens() -> str:
    """Return the name and the installed version, such as `fastokens 0.3.5`."""
    return f"fastokens {package_version('fastokens')}"


def locate_word_form(digest: str) -> Path:
    """Return the file in the cache for the word form of a tokenizer; it need not exist.

    Args:
        digest: the hash of the tokenizer.
    """
    return cache_folder() / "backends" / f"{digest}.words-{WORD_FORM_VERSION}.json"


def locate_difference(tokenizer: Tokenizer, label: str) -> Path:
    """Return the file in the cache for a difference between a fast backend and the reference; it
    need not exist. Its name contains the versions of both libraries.

    Args:
        tokenizer: the tokenizer.
        label: name and version of the fast backend.
    """
    return _locate_comparison(tokenizer, label, "unequal")


def locate_proof(tokenizer: Tokenizer, label: str) -> Path:
    """Return the file in the cache which says that a fast backend gave the reference's ids for the
    hard strings; it need not exist. The arguments are those of `locate_difference`.
    """
    return _locate_comparison(tokenizer, label, "equal")


def _locate_comparison(tokenizer: Tokenizer, label: str, ending: str) -> Path:
    compared = f"{label}-tokenizers-{package_version('tokenizers')}".replace(" ", "-")
    return cache_folder() / "backends" / f"{tokenizer.hash}-{compared}.{ending}"


@cache
def may_have_word_form(path: str) -> bool:
    """Return whether a tokenizer may have a word form (word_form.py): False if its model encodes no
    unknown character as bytes. This takes 10 ms for Llama 3.1, and parsing its file 100 ms.

    Args:
        path: the tokenizer.json of a snapshot, which never changes.
    """
    return encodes_bytes(path)


def encodes_bytes(path: str) -> bool:
    """Return whether the model of a tokenizer.json encodes unknown characters as bytes."""
    return BYTE_FALLBACK.search(Path(path).read_bytes()) is not None
