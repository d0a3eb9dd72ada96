"""The YAML text itself, and the comment at its head that says what an epoch comes to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mdsmix import __version__
from mdsmix.mix.apportion import Apportioned
from mdsmix.mix.draws import METHODS, batching, delivered_of
from mdsmix.mix.epoch import epoch_of, epoch_table
from mdsmix.mix.node_tokenizer import fetch_line
from mdsmix.mix.shares_table import shares_table, title
from mdsmix.mix.streams import Mix
from mdsmix.table import lines

MARK = "# mdsmix:"
"Begins every line of the head, so that the next rendering replaces it and nothing else."


def dump(tree: Mapping[str, Any] | list[Any]) -> str:
    """Block YAML in the order of the mapping."""
    import yaml

    return str(yaml.safe_dump(tree, sort_keys=False, width=1 << 20, allow_unicode=True))


def head(mix: Mix) -> str:
    """The comment: samples, tokens and share of every stream of an epoch, then what is evaluated on."""
    return "".join(f"{MARK} {line}".rstrip() + "\n" for line in _head_lines(mix))


def _head_lines(mix: Mix) -> Iterator[str]:
    recipe = os.path.basename(mix.recipe or mix.yaml.origin)
    yield f"rendered by version {__version__} from {recipe}. An epoch of the {mix.train.name} loader comes to"
    yield from _counted(mix)
    for line in lines(epoch_table(epoch_of(mix.train, mix.yaml.batch_size))):
        yield f"  {line}"
    if mix.shares:
        yield from _shares(mix.shares)
    for loader in mix.evals:
        for each in epoch_of(loader):
            yield f"evaluated on {each.stream}: {each.drawn:,} samples"
    if mix.train.is_own:
        yield "name: mdsmix is read where mdsmix is installed beside LLM-Foundry: docs/loading.md"
    if mix.tokenizer_home:
        yield "the tokenizer lies beside the streams; on every training node, before training (--endpoint-url, where the store is not AWS):"
        yield f"  {fetch_line(mix.tokenizer_home, mix.yaml.at('tokenizer', 'name'))}"


def _shares(found: Apportioned) -> Iterator[str]:
    table = shares_table(found)
    yield title(found)
    for line in lines(table):
        yield f"  {line}"
    yield from (f"  {note}" for note in table.notes)


def _counted(mix: Mix) -> Iterator[str]:
    """What the table takes for granted where the batching method drops samples."""
    if (method := batching(mix.train)) not in METHODS:
        return
    if delivered_of(mix.train, mix.yaml.batch_size) is None:
        yield f"(before batching_method: {method} drops what fills no batch; the batch is not known here)"
    else:
        yield f"(what batching_method: {method} delivers of it in batches of {mix.yaml.batch_size}, counted for one device)"


def without_head(text: str) -> str:
    """The text without the head of an earlier rendering."""
    lines = text.splitlines(keepends=True)
    kept = next((i for i, line in enumerate(lines) if not line.startswith(MARK)), len(lines))
    return "".join(lines[kept:])
