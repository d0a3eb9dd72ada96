"""About how many tokens a source holds, estimated from the beginnings of a few of its splits. Nothing is converted.

Documents differ in length by orders of magnitude, but hardly in tokens per byte, so the estimate is made per byte. It is kept in
the cache of this machine and holds as long as these splits are as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from mdsmix import sources
from mdsmix.convert.job import Job
from mdsmix.convert.source_hashes import fingerprint
from mdsmix.convert.unit import open_tokenizer_backend
from mdsmix.encode.backends import Unequal
from mdsmix.encode.base import Encoded
from mdsmix.encode.tokenizer import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.kinds.reading import open_reading


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEstimate:
    """What a stream would hold if all of its source were converted."""

    tokens: float
    "Those that the loader would not cut off."
    error: float
    "The relative standard error of that, by how far the splits differ; 0 where there is one."
    records: float
    "That would be written."
    spread: float
    "The standard deviation of the tokens of a record, as a part of their mean."
    places: int
    "Splits that were read from."


def estimate_source(job: Job, files: Sequence[sources.SourceFile]) -> SourceEstimate | None:
    """None where the splits that were read from give no token."""
    encoding = replace(job.encoding, sample=None, holdout=None, held_out=False, duplicates="keep")
    job = replace(job, encoding=encoding)
    units = sources.chosen(files, fields=job.fields_read, parsed=job.fields_parsed)
    key = " ".join([job.settings_hash, *map(fingerprint, units)])
    path = cache_folder() / "looks" / f"{xxhash.xxh128_hexdigest(key)}.json"
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return _whole(orjson.loads(path.read_bytes()), files)
    found = _measured(job, units)
    with suppress(Unreachable):  # then the next run reads these splits again
        keep_in_cache(path, orjson.dumps(found))
    return _whole(found, files)


def _measured(job: Job, units: Sequence[sources.Unit]) -> dict[str, Any]:
    """What is kept in the cache: figures per byte, which hold however many other splits there are."""
    try:
        return _encoded(job, units)
    except Unequal:
        return _encoded(job.with_backend("reference"), units)


def _encoded(job: Job, units: Sequence[sources.Unit]) -> dict[str, Any]:
    backend, counts_images = open_tokenizer_backend(job), "processor" in job.encoding.images
    # Images are read where a processor says what they become: each is one token else.
    root = job.images_root if counts_images else None
    reading = open_reading(job.encoding, job.tokenizer, backend, root=root)
    tokens, weights, each = list[int](), list[float](), list[NDArray[Any]]()
    for beginning in sources.read_beginnings(units):
        folders = [beginning.folder] * len(beginning.records) if counts_images and not root else []
        encoded = reading.encode(beginning.records, folders=folders)
        cut = 0 if encoded.cut is None else int(encoded.cut.sum())
        grown = _grown(encoded)
        tokens.append(encoded.tokens - cut + int(grown.sum()))
        weights.append(beginning.weight)
        each.append(_of_records(encoded, grown))
    total, weight = sum(tokens), sum(weights)
    if not total:
        return {"each": 0.0, "error": 0.0, "mean": 1.0, "spread": 0.0, "places": len(tokens)}
    lengths = np.concatenate(each)
    return {
        "each": total / weight,
        "error": _error(np.array(tokens), np.array(weights)),
        "mean": float(np.mean(lengths)),
        "spread": float(np.std(lengths) / np.mean(lengths)),
        "places": len(tokens),
    }


def _grown(encoded: Encoded) -> NDArray[np.int64]:
    """int64 [n]: how many tokens more than are stored the images of each sample become."""
    found = [sum(max(0, image.tokens - 1) for image in of) for of in encoded.images]
    return np.array(found or [0] * len(encoded.lengths), np.int64)


def _of_records(encoded: Encoded, grown: NDArray[np.int64]) -> NDArray[Any]:
    """Tokens of each record that becomes samples, cut off or not."""
    lengths, rows = np.asarray(encoded.lengths) + grown, encoded.rows_of
    if rows is None:
        return lengths
    return np.bincount(np.repeat(np.arange(len(rows)), rows), lengths, len(rows))


def _error(tokens: NDArray[Any], weights: NDArray[Any]) -> float:
    """The relative standard error of the ratio of the sums."""
    n, total = len(tokens), tokens.sum()
    if n < 2:
        return 0.0
    off = tokens - weights * (total / weights.sum())
    return math.sqrt(n / (n - 1) * float((off**2).sum())) / float(total)


def _whole(found: dict[str, Any], files: Sequence[sources.SourceFile]) -> SourceEstimate | None:
    tokens = found["each"] * sources.size_of(files)
    if not tokens:
        return None
    return SourceEstimate(
        tokens=tokens,
        error=found["error"],
        records=tokens / found["mean"],
        spread=found["spread"],
        places=found["places"],
    )
