"""The rendered YAML, and the comment at its head that says what an epoch comes to.

The text depends on the recipe and the streams alone: no time and no host, so that rendering twice gives the same bytes
and a difference under version control is a difference of the mix.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mdsmix import __version__
from mdsmix.mix.check import share_rows
from mdsmix.mix.sections import sections
from mdsmix.mix.streams import Mix
from mdsmix.mix.view import mix_of, read_text, resolved, view_recipe
from mdsmix.mix.weights import shares_of
from mdsmix.recipe import Recipe, load_recipe

MARK = "# mdsmix:"
"Begins every line of the head, so that the next rendering replaces it and nothing else."


def render(path: str, overrides: Sequence[str], into: str | None) -> tuple[Mix, str]:
    """The mix of a recipe and its YAML, a file of its own or set into the config `into`. Nothing is checked or written."""
    recipe = load_recipe(path, overrides)
    mix = view_recipe(recipe, path)
    if into is None:
        return mix, document(recipe, mix)
    from mdsmix.mix.into import set_into

    text = set_into(read_text(into), tree_of(recipe, mix), into)
    known = {stream.name: stream for stream in mix.streams}
    mix = mix_of(resolved(text, into), path, known, recipe)
    return mix, head(mix) + text


def tree_of(recipe: Recipe, mix: Mix) -> dict[str, Any]:
    """The sections that the recipe sets, with `${max_seq_len}` not yet filled in."""
    return sections(recipe, {stream.name: stream.settings for stream in mix.streams})


def document(recipe: Recipe, mix: Mix) -> str:
    """A whole file that resolves by itself: max_seq_len, tokenizer, train_loader, eval_loader."""
    return head(mix) + dump(tree_of(recipe, mix))


def dump(tree: Mapping[str, Any]) -> str:
    """Block YAML in the order of the mapping."""
    import yaml

    return str(yaml.safe_dump(dict(tree), sort_keys=False, width=1 << 20, allow_unicode=True))


def head(mix: Mix) -> str:
    """The comment: samples, tokens and share of every stream of an epoch, then what is evaluated on."""
    return "".join(f"{MARK} {line}".rstrip() + "\n" for line in _head_lines(mix))


def _head_lines(mix: Mix) -> Iterator[str]:
    recipe = os.path.basename(mix.recipe or mix.origin)
    yield f"rendered by version {__version__} from {recipe}. An epoch of the {mix.train.name} loader comes to"
    rows = share_rows(shares_of(mix.train))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        yield "  " + "  ".join(cells)
    for loader in mix.evals:
        for share in shares_of(loader):
            yield f"evaluated on {share.stream}: {share.drawn:,} samples"


def without_head(text: str) -> str:
    """The text without the head of an earlier rendering."""
    lines = text.splitlines(keepends=True)
    kept = next((i for i, line in enumerate(lines) if not line.startswith(MARK)), len(lines))
    return "".join(lines[kept:])
