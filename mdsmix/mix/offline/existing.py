"""What stands where the mix is to be published, and whether it may be replaced.

Every mix leaves a record, `.mdsmix/mixed`, beside its manifest or in place of one. It says by one key whether the mix that
is wanted is there already, and that a stream is a mix of ours and no one's only copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import orjson

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.mix.offline.mix_plan import MixPlan
from mdsmix.mix.streams import StreamInMix
from mdsmix.recipe import Recipe
from mdsmix.shards.index import BASENAME, read_index
from mdsmix.shards.manifest import Mixed
from mdsmix.shards.shard_files import refuse_links
from mdsmix.storage import Location

RECORD = ".mdsmix/mixed"
SPLIT = "train"
"Only streams of this split are mixed, so this is the split of what comes of them."


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRecord:
    """What a published mix was drawn from."""

    key: str
    "Plan.key."
    index_hash: str
    seed: int
    mixed: list[Mixed]

    def to_bytes(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


def read_record(folder: Location) -> MixRecord | None:
    """The record of the mix in `folder`; None where there is none that can be read."""
    found = (folder / RECORD).fetch()
    with suppress(typed.Misfit):
        return typed.load(MixRecord, found[1]) if found else None
    return None


def refuse_sources(recipe: Recipe, streams: Sequence[StreamInMix], out: Location) -> None:
    """RecipeError where the mix would land on or in a stream of the recipe."""
    folders = {s.name: s.folder.url for s in streams}
    places = {n: f"{recipe.published(s)}/{s.split}" for n, s in recipe.streams.items()} | folders
    target = _real(out / SPLIT)
    for name, place in places.items():
        if f"{target}/".startswith(f"{_real(place)}/"):
            raise RecipeError(
                f"--out {out} is where the stream {name} of the recipe lies, which the mix would overwrite; publish "
                "it elsewhere."
            )


def _real(place: object) -> str:
    text = str(place)
    return text if "://" in text else os.path.realpath(text)


def refuse_replacing(plan: MixPlan, out: Location) -> None:
    """RecipeError where another stream is published at `out` than this draw (streams, weights, seed) of what its streams held
    before."""
    folder = out / SPLIT
    refuse_links(out, SPLIT)
    held = next((f for f in (out, folder) if (f / BASENAME).stat()), None)
    if held is None:
        return
    record = read_record(held)
    if record is None or held is out:
        raise RecipeError(
            f"{held} holds a stream that `mdsmix mix` did not make; publish elsewhere, or pass --replace to put the "
            "mix in its place."
        )
    if change := _change(record, plan):
        raise RecipeError(
            f"{held} holds a mix {change}: another draw; publish elsewhere, or pass --replace to put the new mix in its place."
        )
    columns = {name for shard in read_index(held).shards for name in shard.columns}
    wanted = set(plan.layout.encodings)
    if columns != wanted:
        raise RecipeError(
            f"{held} holds a mix with the columns {', '.join(sorted(columns))}, and the new one has "
            f"{', '.join(sorted(wanted))}; publish elsewhere, or pass --replace to put the new mix in its place."
        )


def _change(record: MixRecord, plan: MixPlan) -> str | None:
    """In what the mix that is there was drawn otherwise than is planned; None where only its streams have grown."""
    was = {mixed.name: mixed.weight for mixed in record.mixed}
    now = {source.stream.name: dict(source.weight) for source in plan.sources}
    if was.keys() != now.keys():
        return f"of {', '.join(was)}, and this one is of {', '.join(now)}"
    for name, weight in was.items():
        if weight != now[name]:
            return f"with {_weight(weight)} of {name}, and this one has {_weight(now[name])}"
    return (
        f"of seed {record.seed}, and this one has seed {plan.seed}"
        if record.seed != plan.seed
        else None
    )


def _weight(weight: Mapping[str, int | float]) -> str:
    return ", ".join(f"{key} {value}" for key, value in weight.items()) or "all"
