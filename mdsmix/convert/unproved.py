"""A stream of images is converted only for a processor that is proved equal on it, before the first of its units is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mdsmix.convert.image_stamps import folders_of
from mdsmix.convert.job import Job
from mdsmix.encode.asked_processor import StoredRow
from mdsmix.encode.backends import open_backend
from mdsmix.errors import RecipeError
from mdsmix.kinds.processor_proof import difference, rows_of
from mdsmix.kinds.read_records import open_reading
from mdsmix.sources import SourceFile, plan, read

LOOKED_AT = 16
"Records of the source, of whose rows some are compared."


def refuse_unproved(job: Job, files: Sequence[SourceFile]) -> None:
    """RecipeError where the job's processor makes other batches of whole conversations than a loader will of its rows."""
    if not job.processor:
        return
    if found := difference(
        Path(job.processor.path), job.encoding, job.tokenizer, _own_rows(job, files)
    ):
        raise RecipeError(
            f"{job.name}: the processor {job.processor.name} cannot be used, because {found}: {found.way_out}."
        )


def _own_rows(job: Job, files: Sequence[SourceFile]) -> Iterator[StoredRow]:
    """Rows of the first records."""
    backend = open_backend(job.tokenizer, "reference")
    first = plan(
        [*files[:1]], fields=job.fields_read, parsed=job.fields_parsed, blobs=job.fields_of_bytes
    )
    for unit in first[:1]:
        reading = open_reading(job.encoding, job.tokenizer, backend, root=job.images_root)
        for batch in read(unit, LOOKED_AT):
            beside = folders_of(job, unit)
            names = batch.files(range(len(batch.records))) if beside else ()
            encoded = reading.encode(batch.records, folders=[beside[name] for name in names])
            yield from rows_of("a record of the source", encoded)
