"""The text of a recipe or a training YAML, before anything is made of it: a few hundred bytes may stand for a billion values.

The text is read once, so that it may come through a pipe, and never more than a recipe can need.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from mdsmix.errors import RecipeError

LONGEST = 1 << 20
"Bytes of the file: 1 MiB is some 5,000 streams."
MOST_VALUES = 100_000
"Values of the file, counted with every alias (`*name`) replaced by what it stands for, as OmegaConf does."
DEEPEST = 50


def read_text(path: Path) -> str:
    """The text of a YAML; RecipeError where it is too long or stands for too much."""
    with path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise RecipeError(
            f"{path} is longer than {LONGEST:,} bytes, so it is no recipe: name the YAML file, not the data."
        )
    text = content.decode()
    depth, values = _extent(text)
    if depth > DEEPEST:
        raise RecipeError(
            f"{path} nests its values more than {DEEPEST} deep, which no recipe needs: correct its brackets."
        )
    if values > MOST_VALUES:
        raise RecipeError(
            f"{path} stands for more than {MOST_VALUES:,} values once its aliases (*name) are put in, which no machine "
            "could hold: write out what is meant."
        )
    return text


def _extent(text: str) -> tuple[int, float]:
    """How deep the YAML nests, and its values with aliases put in: infinite where one holds itself."""
    import yaml

    known: dict[str | None, float] = {}
    deepest = 0
    open_ones: list[tuple[str | None, list[float]]] = [(None, [0.0])]
    with contextlib.suppress(yaml.YAMLError):  # whoever makes something of it says what is wrong
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.AliasEvent):
                open_ones[-1][1].append(known.get(event.anchor, float("inf")))
            elif isinstance(event, yaml.CollectionStartEvent):
                open_ones.append((event.anchor, [1.0]))
                deepest = max(deepest, len(open_ones))
                if deepest > DEEPEST:  # the parser takes the square of the depth
                    break
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, parts = open_ones.pop()
                known[anchor] = sum(parts)
                open_ones[-1][1].append(known[anchor])
            elif isinstance(event, yaml.ScalarEvent):
                known[event.anchor] = 1
                open_ones[-1][1].append(1)
    return deepest, sum(open_ones[0][1])


def refuse_growth(texts: Mapping[str, str], path: Path) -> None:
    """RecipeError where values that refer to each other (`${a}${a}`) come to more than a recipe can need.

    Args:
        texts: key -> value as it is written, of every value that is text.
    """
    known: dict[str, int] = {}

    def size(key: str) -> int:
        if key not in known:
            known[key] = (
                0  # while it is being counted; OmegaConf refuses a value that refers to itself
            )
            referred = [_place(key, name) for name in _REFERENCE.findall(texts.get(key, ""))]
            known[key] = len(texts.get(key, "")) + sum(map(size, referred))
        return known[key]

    for key in texts:
        if size(key) > LONGEST:
            raise RecipeError(
                f"{path}: {key} comes to {size(key):,} characters once what it refers to is put in, more than any recipe "
                "needs: write out what is meant."
            )


_REFERENCE = re.compile(r"\$\{\s*([\w.\[\]-]+)\s*\}")


def _place(key: str, name: str) -> str:
    """The key that a reference in `key` means: `.x` is beside it, `..x` one level up."""
    rest = name.lstrip(".")
    ups = len(name) - len(rest)
    return ".".join([*key.split(".")[:-ups], rest]) if ups else rest
