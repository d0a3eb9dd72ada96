"""Whether the token ids fit: their dtype, and the vocabulary.

The manifest answers where there is one. Otherwise the first samples of the first shard do, which can show that a stream
is wrong but not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mdsmix.mix.first_samples import (
    bytes_columns,
    largest_id,
)
from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.training.findings import Finding, check_streams

PLAUSIBLE_IDS = 1 << 22
"4 million: above any vocabulary in use, where the run's own is not known."


@check_streams(
    "error",
    "A column of bytes is read with one dtype for the whole loader (token_encoding_type); the wrong one gives ids that mean nothing.",
)
def tokens_dtype(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    given = str(loader.dataset.get("token_encoding_type", "int64"))
    actual = _dtype_of_bytes(stream, mix.tokenizer.vocab_size if mix.tokenizer else PLAUSIBLE_IDS)
    if actual and not _same_bytes(given, actual):
        yield Finding(
            f"{stream.name} holds bytes of {actual}, and {{loader}} reads all bytes columns as {given}.",
            f"set token_encoding_type: {actual}; where streams differ in it, convert them again: ndarray columns name their dtype.",
        )


def _dtype_of_bytes(stream: StreamInMix, limit: int) -> str | None:
    """The widest dtype under which the first samples hold ids of a vocabulary of `limit`; None without bytes columns."""
    columns = bytes_columns(stream)
    if not columns:
        return None
    samples = [s[c] for s in stream.head.samples for c in columns if isinstance(s.get(c), bytes)]
    for dtype in ("int64", "int32", "uint16", "uint8"):
        if samples and all(_fits(data, dtype, limit) for data in samples):
            return dtype
    return None


def _fits(data: bytes, dtype: str, limit: int) -> bool:
    if not data or len(data) % np.dtype(dtype).itemsize:
        return False
    ids = np.frombuffer(data, dtype)
    return bool(ids.min() >= 0 and ids.max() < limit)


def _same_bytes(given: str, actual: str) -> bool:
    """Equal for every id that occurs: the sign matters only to 16 bits and fewer."""
    try:
        one, other = np.dtype(given), np.dtype(actual)
    except TypeError:
        return True  # setting-value says that the dtype is none
    return one.itemsize == other.itemsize and (one.itemsize > 2 or one.kind == other.kind)


@check_streams(
    "error",
    "The loader passes such an id on; the embedding fails on it, on a GPU with a CUDA assert that names nothing.",
)
def id_vocabulary(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    limits = {
        "the tokenizer": mix.tokenizer.vocab_size if mix.tokenizer else None,
        "the model": mix.yaml.at("model", "vocab_size"),
    }
    top = largest_id(stream, loader)
    for whose, limit in limits.items():
        if top is not None and isinstance(limit, int) and top >= limit:
            yield Finding(
                f"{stream.name} holds the id {top}, and the vocabulary of {whose} ends at {limit - 1}.",
                "name the tokenizer that the stream was converted with, or convert it again; a model's vocab_size must cover it.",
            )
