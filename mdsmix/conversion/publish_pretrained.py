"""Publishes the tokenizer and the processor in folders next to the streams, where other machines
that convert or train find them.

Also refuses a processor if its batches of whole conversations differ from the batches that a loader
will make of the stream's rows. Both are made of the first records of the stream, before its first
unit is converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mdsmix.conversion.job import Job
from mdsmix.encode.backends import open_backend
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.kinds.read_records import open_record_encoder
from mdsmix.processor.card import Processor
from mdsmix.shards.manifest import TokenizerCard, name_processor_folder
from mdsmix.sources import SourceFile, read_batches
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.published import fetch_folder, publish_folder
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON

if TYPE_CHECKING:
    from mdsmix.processor.image_rows import StoredRow

TRIED_RECORDS = 16
"A processor is tried on the rows of so many first records of the source."


def publish_pretrained(jobs: Sequence[Job]) -> None:
    """Write the folders of these streams' tokenizer and processor, unless they are there.

    Args:
        jobs: the jobs of one recipe, which have the same tokenizer and processor.
    """
    # A stream without images has no processor.
    job = next((job for job in jobs if job.processor), jobs[0])
    publish_folder(_locate_tokenizer(job), Path(job.tokenizer.path).parent, job.tokenizer)
    if job.processor:
        folder = _locate_processor(job, job.processor)
        publish_folder(folder, Path(job.processor.path), job.processor)


def fetch_tokenizer(job: Job) -> Tokenizer:
    """Return the job's tokenizer with a path on this machine. If the run began on another machine,
    the tokenizer is fetched once from the folder next to the streams.

    Raises Unreachable if the tokenizer is not there.
    """
    tokenizer = job.tokenizer
    if Path(tokenizer.path).is_file():
        return tokenizer
    home = _locate_tokenizer(job)
    folder = fetch_folder(home)
    if not folder:
        raise Unreachable(
            f"{home} does not contain the tokenizer with which this run began: run the same "
            "command again, which publishes the tokenizer there."
        )
    return replace(tokenizer, path=str(folder / TOKENIZER_JSON))


def fetch_processor(job: Job) -> None:
    """Fetch the job's processor into the cache of this machine, if the run began on another one."""
    if job.processor and not Path(job.processor.path).is_dir():
        fetch_folder(_locate_processor(job, job.processor))


def _locate_tokenizer(job: Job) -> Location:
    return job.root / TokenizerCard.from_tokenizer(job.tokenizer).folder_name


def _locate_processor(job: Job, processor: Processor) -> Location:
    """Return the folder of a processor next to the streams."""
    tokenizer_card = TokenizerCard.from_tokenizer(job.tokenizer)
    return job.root / name_processor_folder(processor.hash, tokenizer_card)


def refuse_unproved_processor(job: Job, files: Sequence[SourceFile]) -> None:
    """Raise RecipeError if the batches that the job's processor makes of whole conversations differ
    from the batches that a loader will make of their rows. The first records of the source are
    tried.
    """
    if not job.processor:
        return
    from mdsmix.kinds.prove_processor import FIX_UNEQUAL, find_difference

    rows = _read_first_rows(job, files)
    difference = find_difference(Path(job.processor.path), job.encoding, job.tokenizer, rows)
    if difference:
        raise RecipeError(
            f"stream {job.name}: the image processor {job.processor.name} cannot be used, because "
            f"{difference}: {FIX_UNEQUAL}."
        )


def _read_first_rows(job: Job, files: Sequence[SourceFile]) -> Iterator[StoredRow]:
    """Yield the rows of the first records of the source."""
    from mdsmix.kinds.prove_processor import list_stored_rows

    backend = open_backend(job.tokenizer, "reference")
    first_units = job.make_units(files[:1])[:1]  # empty if the source has no files
    for unit in first_units:
        encoder = open_record_encoder(job.stream, job.tokenizer, backend, root=job.images_root)
        for batch in read_batches(unit, TRIED_RECORDS):
            image_folders = job.image_folders(unit)
            # Find the folder of each record's images.
            folders = list[Location]()
            if image_folders:
                names = batch.files(range(len(batch.records)))
                folders = [image_folders[name] for name in names]
            encoded = encoder.encode(batch.records, folders=folders)
            yield from list_stored_rows("a record of the source", encoded)
