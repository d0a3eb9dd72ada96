"""The tokenizer as a training node finds it: no folder of the machine that converted stands in a YAML for another.

With an S3 remote and a tokenizer from a folder or file, `convert` has put it at the mix's root. LLM-Foundry wants a folder or a hub name, so
the YAML names a folder beside the nodes' caches, and its head the line that fetches it there. So it names the folder of a processor, which
`mdsmix.load` fetches by itself.
"""

from __future__ import annotations

import os
import shlex

from mdsmix.errors import MdsmixError
from mdsmix.recipe import Recipe
from mdsmix.shards.manifest import TokenizerCard, processor_folder
from mdsmix.storage import Location, locate


def home_of(recipe: Recipe) -> Location | None:
    """`tokenizer-<hash8>/` at the remote; None where the tokenizer is at a hub, or everything on one disk."""
    from mdsmix.encode.pretrained import open_tokenizer

    is_remote = "://" in (recipe.remote or "") and recipe.sourced
    if not is_remote or not os.path.isabs(recipe.tokenizer.name):
        return None
    try:
        card = TokenizerCard.of(open_tokenizer(recipe.tokenizer))
    except MdsmixError:
        return None  # tokenizer-unseen says why
    return locate(str(recipe.remote)) / card.folder_name


def processor_home_of(recipe: Recipe) -> Location | None:
    """`processor-<hash8>/` at the remote; None where the processor is at a hub, or everything on one disk."""
    from mdsmix.encode.pretrained import open_processor, open_tokenizer

    is_remote = "://" in (recipe.remote or "") and recipe.sourced
    if not is_remote or not recipe.processor or not os.path.isabs(recipe.processor):
        return None
    try:
        card = TokenizerCard.of(open_tokenizer(recipe.tokenizer))
        digest = open_processor(recipe.processor).hash
    except MdsmixError:
        return None  # checks of the images say why
    return locate(str(recipe.remote)) / processor_folder(digest, card)


def on_node(recipe: Recipe, home: Location) -> str:
    """The folder on a training node: beside its caches, else in the folder in which training is started."""
    return f"{recipe.local or '.'}/{home.name}"


def fetch_line(home: Location, folder: str, endpoint: str | None = None) -> str:
    """The command that a training node runs once. `endpoint`: of the store that this machine uses; no YAML names it."""
    options = ["--endpoint-url", endpoint] if endpoint else []
    return shlex.join(["aws", "s3", "cp", "--recursive", *options, home.url, folder])
