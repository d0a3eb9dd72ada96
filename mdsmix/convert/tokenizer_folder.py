"""The tokenizer's files beside the streams, so that whoever converts or trains on another machine has them.

`tokenizer-<hash8>/` at the root of the mix holds what `AutoTokenizer.from_pretrained` opens to the same tokenizer, and
`mdsmix.tokenizer`, a small card that is written last: a folder with a card is whole. Its name follows from what every manifest
says of its tokenizer, so the manifests tell which folders are needed. It is no part of a stream and no lease guards it: two
runs that write it at once write the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson

from mdsmix.convert.job import Job
from mdsmix.encode.fetched import CARD, FolderCard, refuse_other
from mdsmix.encode.pretrained import cache_folder, keep_in_cache
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import locate, together


def tokenizer_card(job: Job) -> TokenizerCard:
    """What the manifest says of the tokenizer; of a folder's path only the folder's name."""
    card = TokenizerCard.of(job.tokenizer)
    return replace(card, name=shown_name(card.name))


def shown_name(name: str) -> str:
    """Of a folder's path the last name alone."""
    name = name.rstrip("/")
    return name.rsplit("/", 1)[1] if name.startswith("/") else name


def publish_tokenizer(job: Job) -> None:
    """Makes the folder of the job's tokenizer whole, if it is not: one request where it is."""
    tokenizer, card = job.tokenizer, tokenizer_card(job)
    home = job.root / card.folder_name
    if (home / CARD).stat():
        return
    snapshot = locate(Path(tokenizer.path).parent)
    together(lambda name: (home / name).write((snapshot / name).read()), tokenizer.files)
    (home / CARD).write(orjson.dumps(FolderCard(tokenizer=card, files=tokenizer.files)))


def at_hand(job: Job) -> Tokenizer:
    """The job's tokenizer with a path on this machine. One whose snapshot was taken on another is fetched from the mix's root,
    once; Unreachable where what lies there is not it."""
    tokenizer = job.tokenizer
    if Path(tokenizer.path).is_file():
        return tokenizer
    path = cache_folder() / "tokenizers" / tokenizer.hash / "tokenizer.json"
    if not path.is_file():
        home = job.root / TokenizerCard.of(tokenizer).folder_name
        content = (home / path.name).read()
        refuse_other(home, content, tokenizer)
        keep_in_cache(path, content)
    return replace(tokenizer, path=str(path))
