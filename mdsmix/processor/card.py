"""The description of a processor: its class, its image token and its hash."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mdsmix.errors import Unreachable
from mdsmix.messages import Say
from mdsmix.tokenizer.snapshot import CARD, find_snapshot, load_card, open_snapshot


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor as transformers describes it. The fields are also the keys of a snapshot's
    card.json.
    """

    name: str
    hash: str
    "xxh128 of the class and of the settings that decide counts and pixels, without the tokenizer."
    class_name: str
    image_token: str
    "The token in a text that the processor replaces with the tokens of an image."
    around: list[str]
    """Two strings: the text that the processor adds before an image, and the text after it. Both
    are tokenized together with the text next to them.
    """
    path: str
    "The folder of the snapshot: the processor as transformers saves it."
    files: list[str]
    "Names of the files in that folder from which AutoProcessor.from_pretrained opens it."


@lru_cache(maxsize=8)
def open_processor(name: str, say: Say | None = None) -> Processor:
    """Return the processor `name`, a folder or hub name, from its snapshot (its description and
    files in the cache).

    If there is no snapshot yet, it is made now, and `say` is called with a note on that.
    Raises Unreachable if transformers cannot load it.
    """
    folder = open_snapshot("processor", name, {}, say)
    return load_card(Processor, folder, name=name, path=str(folder))


def find_processor_folder(digest: str) -> Path:
    """Return a folder on this machine with the processor that has this hash.

    Raises Unreachable if there is none in the cache.
    """
    folder = find_snapshot(digest, f"processors/*/{CARD}", "fetched/*/*/mdsmix.processor")
    if folder is None:
        raise Unreachable(
            f"the processor {digest[:8]} is not in this machine's cache: run `mdsmix convert` with "
            "its name in the recipe."
        )
    return folder
