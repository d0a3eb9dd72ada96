"""The processor's files beside the streams, so that whoever trains on another machine makes of images what was counted here.

`processor-<hash8>/` at the root of the mix holds what `AutoProcessor.from_pretrained` opens to the processor, and `mdsmix.processor`,
which is written last. Its name follows from what a manifest says of processor and tokenizer. As with the tokenizer, no lease guards it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import orjson

from mdsmix.convert.job import Job
from mdsmix.convert.tokenizer_folder import shown_name
from mdsmix.encode.fetched import (
    ProcessorCard,
    ProcessorFolderCard,
    content_of,
    fetched_processor,
)
from mdsmix.encode.processor import CARD, Processor
from mdsmix.shards.manifest import TokenizerCard, processor_folder
from mdsmix.storage import Location, locate, together


def publish_processor(job: Job) -> None:
    """Makes the folder of the job's processor whole, if it has one and it is not: one request where it is."""
    processor = job.processor
    if not processor or ((home := _home(job, processor)) / CARD).stat():
        return
    snapshot = locate(processor.path)
    files = {name: (snapshot / name).read() for name in processor.files}
    together(lambda name: (home / name).write(files[name]), processor.files)
    card = ProcessorFolderCard(
        processor=_card(processor), folder=home.name, content=content_of(files), files=[*files]
    )
    (home / CARD).write(orjson.dumps(card))


def fetch_processor(job: Job) -> None:
    """Makes the job's processor one that this machine knows, where its snapshot was taken on another."""
    if job.processor and not Path(job.processor.path).is_dir():
        fetched_processor(_home(job, job.processor))


def _home(job: Job, processor: Processor) -> Location:
    return job.root / processor_folder(processor.hash, TokenizerCard.of(job.tokenizer))


def _card(processor: Processor) -> ProcessorCard:
    own = {each.name: getattr(processor, each.name) for each in fields(ProcessorCard)}
    return replace(ProcessorCard(**own), name=shown_name(processor.name))
