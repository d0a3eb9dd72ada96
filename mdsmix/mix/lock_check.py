"""The lock of a rendered mix: made when it is rendered, and held against what is published now.

`mdsmix.training.lock` says what is in it. Here a Mix becomes a lock, and the differences of two become findings, stream by
stream: what trains must be what was planned, what is evaluated had better be.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from mdsmix.errors import RecipeError
from mdsmix.mix.draws import draws_of
from mdsmix.mix.output import is_device
from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.shards.index import LARGEST
from mdsmix.storage import locate
from mdsmix.training.findings import Finding
from mdsmix.training.lock import (
    SUFFIX,
    LoaderLock,
    Lock,
    LockDifference,
    LockedStream,
    differences,
    parse_lock,
    settings_of,
    shard_word,
)
from mdsmix.words import plural

TRAIN = "train_loader"


def place_of(target: str) -> str | None:
    """Where the lock of a YAML lies; None where the YAML goes into a pipe or a device."""
    place = locate(target)
    return None if not place.is_store and is_device(place.url) else f"{target}{SUFFIX}"


def lock_of(mix: Mix) -> Lock:
    """What is published now, and how the mix draws it."""
    return Lock(loaders={loader.label: _loader(mix, loader) for loader in mix.loaders})


def _loader(mix: Mix, loader: Loader) -> LoaderLock:
    drawn = draws_of(loader) or [0] * len(loader.streams)
    more: dict[str, Any] = {"batch": mix.yaml.batch_size} if loader.trains else {}
    if card := mix.tokenizer:
        more |= {"tokenizer": card.hash, "chat_template": card.chat_template_hash}
    return LoaderLock(
        streams=[_stream(s, n) for s, n in zip(loader.streams, drawn, strict=True)],
        settings=settings_of(loader, **more),
    )


def _stream(stream: StreamInMix, drawn: int) -> LockedStream:
    words = [
        shard_word(
            shard.samples,
            shard.raw_data.basename,
            shard.raw_data.bytes,
            shard.raw_data.hashes or shard.stored.hashes,
        )
        for shard in stream.shards
    ]
    manifest = stream.trusted_manifest
    return LockedStream(
        name=stream.name,
        drawn=drawn,
        shards=" ".join(words),
        index=stream.index.hash,
        manifest=xxhash.xxh128_hexdigest(manifest.to_bytes()) if manifest else None,
    )


def read_lock(target: str) -> Lock:
    """The lock beside a YAML; RecipeError where there is none, or none that can be read."""
    place = place_of(target)
    found = locate(place).fetch(LARGEST) if place else None
    if found is None:
        raise RecipeError(
            f"{target} has no lock: there is no {os.path.basename(target)}{SUFFIX} beside it, so what the run was planned with is "
            f"not known; `mdsmix render-yaml RECIPE -o {target}` writes both."
        )
    return parse_lock(found[1], str(place))


@dataclass(frozen=True, kw_only=True)
class ComparedLock:
    """A lock and what is there now."""

    was: Lock
    now: Lock
    is_accepted: bool
    "What differs is told, and refuses nothing."

    @property
    def findings(self) -> list[Finding]:
        """Every difference: of what trains an error unless it is accepted, of what is evaluated a warning."""
        none = LoaderLock(streams=[])
        labels = [*self.was.loaders, *(n for n in self.now.loaders if n not in self.was.loaders)]
        return [
            _finding(label, found, self.is_accepted)
            for label in labels
            for found in differences(
                self.was.loaders.get(label, none), self.now.loaders.get(label, none)
            )
        ]

    @property
    def streams(self) -> list[dict[str, Any]]:
        """Each stream of each loader, and whether it is what was locked."""
        return [
            {
                "loader": label,
                "stream": stream.name,
                "state": _state(self.was.loaders.get(label), stream),
                "samples": stream.samples,
                "drawn": stream.drawn,
            }
            for label, loader in self.now.loaders.items()
            for stream in loader.streams
        ]

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        return [
            f"{s['loader']}: {s['stream']} is {s['state']}: {plural(s['samples'], 'sample')}, {s['drawn']:,} drawn an epoch"
            for s in self.streams
        ]


def hold(mix: Mix, targets: Sequence[str], is_accepted: bool = False) -> ComparedLock:
    """The lock beside the YAML that was asked about, and the mix of now; RecipeError where the two have nothing in common."""
    if mix.recipe or mix.is_bare or len(targets) != 1:
        raise RecipeError(
            f"--lock compares one training YAML with the lock beside it, and {', '.join(targets)} is none; name the YAML that "
            "`mdsmix render-yaml` wrote."
        )
    held = ComparedLock(was=read_lock(targets[0]), now=lock_of(mix), is_accepted=is_accepted)
    _refuse_another(held, targets[0])
    return held


def _refuse_another(held: ComparedLock, target: str) -> None:
    old, new = (
        {s.name for s in lock.loaders[TRAIN].streams} if TRAIN in lock.loaders else set[str]()
        for lock in (held.was, held.now)
    )
    if not old & new:
        raise RecipeError(
            f"{target}{SUFFIX} is the lock of another recipe: it names {', '.join(sorted(old)) or 'no stream'}, and {target} trains on "
            f"{', '.join(sorted(new))}; render the YAML again, which writes its own."
        )


def _finding(label: str, found: LockDifference, is_accepted: bool) -> Finding:
    trains = label == TRAIN
    return Finding(
        id="lock-differs" if trains else "lock-eval-differs",
        severity="error" if trains and not is_accepted else "warning",
        streams=tuple(found.streams),
        message=f"{label}: {found.sentence}.",
        why=WHY if trains else WHY_EVAL,
        fix=FIX if trains else FIX_EVAL,
    )


WHY = "A checkpoint of the run that was planned, resumed on this, repeats samples and leaves others out."
FIX = (
    "train on what the lock names (publish: versioned keeps every version), or render the YAML again and begin a new run; "
    "--accept-changed takes it for a warning."
)
WHY_EVAL = "Its losses cannot be compared with those of before."
FIX_EVAL = "nothing, if that is known; render the YAML again to lock what is there now."


def _state(was: LoaderLock | None, now: LockedStream) -> str:
    old = next((s for s in was.streams if s.name == now.name), None) if was else None
    if old is None:
        return "new"
    if old.shards != now.shards or old.drawn != now.drawn:
        return "not as planned"
    return (
        "as planned"
        if old.index == now.index
        else "as planned, published anew with the same shards"
    )
