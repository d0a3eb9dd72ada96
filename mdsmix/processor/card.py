"""The description of a processor: its class, its image token and its hash."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import Say
from mdsmix.tokenizer.snapshot import CARD, find_snapshot, load_card, open_snapshot


@frozen(kw_only=True)
class Processor:
    """A processor as transformers describes it. The fields are also the keys of a snapshot's
    card.json.
    """

    name: str
    "Its folder or hub name."
    hash: str
    """xxh128 of the class and of the settings that decide token counts and pixels. The tokenizer
    does not enter it.
    """
    class_name: str
    image_token: str
    "The token in a text that the processor replaces by the tokens of an image."
    around: list[str]
    """Two strings: the ordinary text that the processor adds before an image, and the ordinary text
    that it adds after an image. Each is tokenized together with the text next to it.
    """
    path: str
    "The folder of the snapshot, which has the processor as transformers saves it."
    files: list[str]
    """Names of the files in the snapshot from which AutoProcessor.from_pretrained opens the
    processor.
    """


@lru_cache(maxsize=8)
def open_processor(name: str, say: Say | None = None) -> Processor:
    """Return a processor. It is read from a snapshot, which is the description and the files of the
    processor in the cache.

    Raises Unreachable if transformers cannot load the processor.

    Args:
        name: the processor's folder or hub name.
        say: called with a note for the user if the snapshot must be made first; None: no note.
    """
    folder = open_snapshot("processor", name, {}, say)
    return load_card(Processor, folder, name=name, path=str(folder))


def find_processor_folder(digest: str) -> Path:
    """Return a folder on this machine with the processor that has this hash.

    Raises Unreachable if the cache does not have the processor.
    """
    folder = find_snapshot(digest, f"processors/*/{CARD}", "fetched/*/*/mdsmix.processor")
    if folder is None:
        raise Unreachable(
            f"the processor with the hash {digest[:8]} is not in this machine's cache: run `mdsmix "
            "convert` here with a recipe that names this processor."
        )
    return folder
