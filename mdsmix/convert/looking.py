"""About how many tokens a source holds, from a look at the beginnings of a few of its splits: nothing of it is converted.

Tokens for each byte hardly differ from document to document, where tokens a document do by orders of magnitude, so bytes are
what is counted up. What was found is remembered in the cache of this machine as long as these splits are as they are.
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
class Look:
    """What a stream would hold if all of its source were converted, as far as a look tells."""

    tokens: float
    "Those that the loader would not cut off."
    error: float
    "The relative standard error of that, by how far the splits differ; 0 where there is one."
    records: float
    "That would be written."
    spread: float
    "The standard deviation of the tokens of a record, as a part of their mean."
    places: int
    "Splits that were looked at."


def look_at(job: Job, files: Sequence[sources.SourceFile]) -> Look | None:
    """None where the splits that were looked at give no token."""
    encoding = replace(job.encoding, sample=None, holdout=None, held_out=False, duplicates="keep")
    job = replace(job, encoding=encoding)
    units = sources.chosen(files, fields=job.fields_read, parsed=job.fields_parsed)
    key = " ".join([job.settings_hash, *map(fingerprint, units)])
    path = cache_folder() / "looks" / f"{xxhash.xxh128_hexdigest(key)}.json"
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return _whole(orjson.loads(path.read_bytes()), files)
    found = _seen(job, units)
    with suppress(Unreachable):  # all that is lost is a look
        keep_in_cache(path, orjson.dumps(found))
    return _whole(found, files)


def _seen(job: Job, units: Sequence[sources.Unit]) -> dict[str, Any]:
    """What is kept of a look: it holds as long as these splits do, however many others there are."""
    try:
        return _looked(job, units)
    except Unequal:
        return _looked(job.with_backend("reference"), units)


def _looked(job: Job, units: Sequence[sources.Unit]) -> dict[str, Any]:
    backend, counts_images = open_tokenizer_backend(job), "processor" in job.encoding.images
    # Images are read where a processor says what they become: each is one token else.
    root = job.images_root if counts_images else None
    reading = open_reading(job.encoding, job.tokenizer, backend, root=root)
    tokens, weights, each = list[int](), list[float](), list[NDArray[Any]]()
    for glimpse in sources.glimpses(units):
        folders = [glimpse.folder] * len(glimpse.records) if counts_images and not root else []
        encoded = reading.encode(glimpse.records, folders=folders)
        cut = 0 if encoded.cut is None else int(encoded.cut.sum())
        grown = _grown(encoded)
        tokens.append(encoded.tokens - cut + int(grown.sum()))
        weights.append(glimpse.weight)
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


def _whole(found: dict[str, Any], files: Sequence[sources.SourceFile]) -> Look | None:
    tokens = found["each"] * sources.size_of(files)
    if not tokens:
        return None
    return Look(
        tokens=tokens,
        error=found["error"],
        records=tokens / found["mean"],
        spread=found["spread"],
        places=found["places"],
    )
