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
    LockedStream,
    differences,
    parse_lock,
    settings_of,
    shard_word,
)
from mdsmix.words import plural

TRAIN = "train_loader"
WHY = "A checkpoint of the run that was planned, resumed on this, repeats samples and leaves others out."
FIX = (
    "train on what the lock names (publish: versioned keeps every version), or render the YAML again and begin a new run; "
    "--accept-changed takes it for a warning."
)
WHY_EVAL = "Its losses cannot be compared with those of before."
FIX_EVAL = "nothing, if that is known; render the YAML again to lock what is there now."


def place_of(target: str) -> str | None:
    """Where the lock of a YAML lies; None where the YAML goes into a pipe or a device."""
    place = locate(target)
    return None if not place.is_store and is_device(place.url) else f"{target}{SUFFIX}"


def lock_of(mix: Mix) -> Lock:
    """What is published now, and how the mix draws it."""
    return Lock(loaders={loader.label: _loader(mix, loader) for loader in mix.loaders})


def _loader(mix: Mix, loader: Loader) -> LoaderLock:
    drawn, card = draws_of(loader) or [0] * len(loader.streams), mix.tokenizer
    settings = settings_of(
        loader,
        batch=mix.yaml.batch_size if loader.trains else None,
        tokenizer=card and card.hash,
        chat_template=card and card.chat_template_hash,
    )
    return LoaderLock(streams=[*map(_stream, loader.streams, drawn)], settings=settings)


def _stream(stream: StreamInMix, drawn: int) -> LockedStream:
    words = [
        shard_word(
            s.samples, s.raw_data.basename, s.raw_data.bytes, s.raw_data.hashes or s.stored.hashes
        )
        for s in stream.shards
    ]
    manifest = stream.trusted_manifest
    return LockedStream(
        name=stream.name,
        drawn=drawn,
        shards=" ".join(words),
        index=stream.index.hash,
        manifest=xxhash.xxh128_hexdigest(manifest.to_bytes()) if manifest else None,
    )


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
        return [
            Finding(
                id="lock-differs" if label == TRAIN else "lock-eval-differs",
                severity="error" if label == TRAIN and not self.is_accepted else "warning",
                streams=tuple(streams),
                message=f"{label}: {sentence}.",
                why=WHY if label == TRAIN else WHY_EVAL,
                fix=FIX if label == TRAIN else FIX_EVAL,
            )
            for label in self.was.loaders | self.now.loaders
            for sentence, streams in differences(
                self.was.loaders.get(label, none), self.now.loaders.get(label, none)
            )
        ]

    @property
    def streams(self) -> list[dict[str, Any]]:
        """Each stream of each loader, and whether it is what was locked."""
        locked = {(n, s.name): s for n, loader in self.was.loaders.items() for s in loader.streams}
        return [
            {
                "loader": label,
                "stream": stream.name,
                "state": _state(locked.get((label, stream.name)), stream),
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


def _state(was: LockedStream | None, now: LockedStream) -> str:
    if was is None:
        return "new"
    if (was.shards, was.drawn) != (now.shards, now.drawn):
        return "not as planned"
    more = "" if was.index == now.index else ", published anew with the same shards"
    return f"as planned{more}"


def hold(mix: Mix, targets: Sequence[str], is_accepted: bool = False) -> ComparedLock:
    """The lock beside the YAML that was asked about, and the mix of now; RecipeError where there is none, or none that can be read."""
    if mix.recipe or mix.is_bare or len(targets) != 1:
        raise RecipeError(
            f"--lock compares one training YAML with the lock beside it, and {', '.join(targets)} is none; name the YAML that "
            "`mdsmix render-yaml` wrote."
        )
    target, place = targets[0], place_of(targets[0])
    found = locate(place).fetch(LARGEST) if place else None
    if found is None:
        raise RecipeError(
            f"{target} has no lock: there is no {os.path.basename(target)}{SUFFIX} beside it, so what the run was planned with is "
            f"not known; `mdsmix render-yaml RECIPE -o {target}` writes both."
        )
    was = parse_lock(
        Lock, found[1], str(place), "render the YAML again, which locks what is published now"
    )
    return ComparedLock(was=was, now=lock_of(mix), is_accepted=is_accepted)
