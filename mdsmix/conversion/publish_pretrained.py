"""The files of tokenizer and processor beside the streams, so that whoever converts or trains on
another machine has them. A processor is used only where it is proved equal on the stream, before
the first of its units is converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mdsmix.conversion.job import Job
from mdsmix.encode.backends import open_backend
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.kinds.prove_processor import FIX_UNEQUAL, StoredRow, find_difference, list_stored_rows
from mdsmix.kinds.read_records import open_record_encoder
from mdsmix.processor.card import Processor
from mdsmix.shards.manifest import TokenizerCard, name_processor_folder
from mdsmix.sources import SourceFile, read_batches
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.published import fetch_folder, publish_folder
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON

LOOKED_AT = 16
"First records of the source, whose rows the processor is tried on."


def publish_pretrained(jobs: Sequence[Job]) -> None:
    """Makes the folders of the tokenizer and of the processor of these streams whole, where they
    are not.
    """
    job = next((job for job in jobs if job.processor), jobs[0])
    publish_folder(_tokenizer_home(job), Path(job.tokenizer.path).parent, job.tokenizer)
    if job.processor:
        publish_folder(_processor_home(job, job.processor), Path(job.processor.path), job.processor)


def fetch_tokenizer(job: Job) -> Tokenizer:
    """The job's tokenizer with a path on this machine. One whose snapshot was taken on another is
    fetched from the mix's root, once; Unreachable where another one lies there.
    """
    tokenizer = job.tokenizer
    if Path(tokenizer.path).is_file():
        return tokenizer
    home = _tokenizer_home(job)
    if not (folder := fetch_folder(home)):
        raise Unreachable(
            f"{home} does not hold the tokenizer with which the run began: start it again."
        )
    return replace(tokenizer, path=str(folder / TOKENIZER_JSON))


def fetch_processor(job: Job) -> None:
    """Makes the job's processor one that this machine knows, where its snapshot was taken on
    another.
    """
    if job.processor and not Path(job.processor.path).is_dir():
        fetch_folder(_processor_home(job, job.processor))


def _tokenizer_home(job: Job) -> Location:
    return job.root / TokenizerCard.from_tokenizer(job.tokenizer).folder_name


def _processor_home(job: Job, processor: Processor) -> Location:
    return job.root / name_processor_folder(
        processor.hash, TokenizerCard.from_tokenizer(job.tokenizer)
    )


def refuse_unproved_processor(job: Job, files: Sequence[SourceFile]) -> None:
    """RecipeError where the job's processor makes of whole conversations other batches than a
    loader will make of their rows.
    """
    if not job.processor:
        return
    if found := find_difference(
        Path(job.processor.path), job.encoding, job.tokenizer, _own_rows(job, files)
    ):
        raise RecipeError(
            f"{job.name}: the processor {job.processor.name} cannot be used, because {found}: {FIX_UNEQUAL}."
        )


def _own_rows(job: Job, files: Sequence[SourceFile]) -> Iterator[StoredRow]:
    """Rows of the first records."""
    backend = open_backend(job.tokenizer, "reference")
    for unit in job.units_of(files[:1])[:1]:
        reading = open_record_encoder(job.stream, job.tokenizer, backend, root=job.images_root)
        for batch in read_batches(unit, LOOKED_AT):
            beside = job.image_folders(unit)
            names = batch.files(range(len(batch.records))) if beside else ()
            encoded = reading.encode(batch.records, folders=[beside[name] for name in names])
            yield from list_stored_rows("a record of the source", encoded)
