"""Opens a tokenizer as `llmfoundry train` does."""

from __future__ import annotations

from collections.abc import Sequence

from llmfoundry.utils.builders import build_tokenizer


def ids(name: str, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = build_tokenizer(name, {})
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def failure(name: str) -> str:
    """Return the error that ends the opening; an empty text if there is none."""
    try:
        build_tokenizer(name, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
