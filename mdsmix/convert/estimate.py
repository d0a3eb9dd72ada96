"""About how many tokens a source holds, by a survey of it. Nothing is converted.

It is kept in the cache of this machine and holds as long as the splits that were looked at are as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import orjson
import xxhash

from mdsmix import sources
from mdsmix.convert.job import Job
from mdsmix.convert.source_hashes import fingerprint
from mdsmix.convert.unit import open_tokenizer_backend
from mdsmix.encode.pretrained import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.kinds.survey import Rates, look, rates_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEstimate(Rates):
    """What a stream would hold if all of its source were converted."""

    tokens: float
    "Those that the loader would not cut off."
    records: float
    "That would be written."


def estimate_source(job: Job, files: Sequence[sources.SourceFile]) -> SourceEstimate | None:
    """None where the splits that were read from give no token."""
    encoding = replace(job.encoding, sample=None, holdout=None, held_out=False, duplicates="keep")
    job = replace(job, encoding=encoding)
    units = sources.chosen(files, fields=job.fields_read, parsed=job.fields_parsed)
    key = " ".join([job.settings_hash, *map(fingerprint, units)])
    path = cache_folder() / "looks" / f"{xxhash.xxh128_hexdigest(key)}.json"
    with suppress(OSError, ValueError, TypeError):
        return _whole(Rates(**orjson.loads(path.read_bytes())), files)
    # Images are read where a processor says what they become: each is one token else.
    looks = look(
        units,
        job.encoding,
        job.tokenizer,
        job.backend,
        lambda name: open_tokenizer_backend(job.with_backend(name)),
        job.images_root,
        "processor" in job.encoding.images,
    )
    found = rates_of(looks)
    if found is None:
        return None
    with suppress(Unreachable):  # then the next run reads these splits again
        keep_in_cache(path, orjson.dumps(asdict(found)))
    return _whole(found, files)


def _whole(rates: Rates, files: Sequence[sources.SourceFile]) -> SourceEstimate:
    tokens = rates.each * sources.size_of(files)
    return SourceEstimate(**asdict(rates), tokens=tokens, records=tokens / rates.mean)
