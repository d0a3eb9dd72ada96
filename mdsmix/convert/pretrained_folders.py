"""The files of tokenizer and processor beside the streams, so that whoever converts or trains on another machine has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mdsmix.convert.job import Job
from mdsmix.encode.folders import fetch_folder, fetched_copy, publish
from mdsmix.encode.pretrained import Processor, Tokenizer
from mdsmix.errors import Unreachable
from mdsmix.shards.manifest import TokenizerCard, processor_folder
from mdsmix.storage import Location


def tokenizer_card(job: Job) -> TokenizerCard:
    """What the manifest says of the tokenizer; of a folder's path only the folder's name."""
    card = TokenizerCard.of(job.tokenizer)
    name = card.name.rstrip("/")
    return replace(card, name=name.rpartition("/")[2]) if name.startswith("/") else card


def publish_pretrained(job: Job) -> None:
    """Makes the folders of the job's tokenizer and processor whole, where they are not."""
    tokenizer, processor = job.tokenizer, job.processor
    home = job.root / TokenizerCard.of(tokenizer).folder_name
    publish(home, Path(tokenizer.path).parent, tokenizer.name, tokenizer.hash, tokenizer.files)
    if processor:
        home = _processor_home(job, processor)
        publish(home, Path(processor.path), processor.name, processor.hash, processor.files)


def at_hand(job: Job) -> Tokenizer:
    """The job's tokenizer with a path on this machine. One whose snapshot was taken on another is fetched from the mix's root,
    once; Unreachable where what lies there is not it."""
    tokenizer = job.tokenizer
    if Path(tokenizer.path).is_file():
        return tokenizer
    home = job.root / TokenizerCard.of(tokenizer).folder_name
    folder = fetched_copy(home.name, tokenizer.hash) or fetch_folder(home)
    if not folder:
        raise Unreachable(
            f"{home} does not hold the tokenizer with which the run began: start it again."
        )
    return replace(tokenizer, path=str(folder / "tokenizer.json"))


def fetch_processor(job: Job) -> None:
    """Makes the job's processor one that this machine knows, where its snapshot was taken on another."""
    if job.processor and not Path(job.processor.path).is_dir():
        fetch_folder(_processor_home(job, job.processor))


def _processor_home(job: Job, processor: Processor) -> Location:
    return job.root / processor_folder(processor.hash, TokenizerCard.of(job.tokenizer))
