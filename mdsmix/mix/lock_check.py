"""The lock of a rendered mix: made by rendering, and compared later with the streams as published
then.

`mdsmix.foundry_yaml.lock` defines its contents. Here a Mix becomes a lock, and the differences of
two locks become findings, stream by stream: errors on training streams, warnings on evaluations.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.findings import Finding, Severity
from mdsmix.foundry_yaml.lock import (
    SUFFIX,
    LoaderLock,
    Lock,
    LockedStream,
    find_differences,
    lock_stream,
    locked_settings,
    parse_lock,
)
from mdsmix.foundry_yaml.training_yaml import TRAIN
from mdsmix.mix.epoch.draws import count_loader_draws
from mdsmix.mix.render.render import is_device
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix
from mdsmix.storage import locate
from mdsmix.table import Column, Row, Table

TRAINING_DIFFERS = (
    "lock-differs",
    "A checkpoint of the run that was planned, resumed on this, repeats samples and leaves others out.",
    "train on what the lock names (publish: versioned keeps every version), or render the YAML again and begin a new run; "
    "--accept-changed takes it for a warning.",
)
EVALUATION_DIFFERS = (
    "lock-eval-differs",
    "Its losses cannot be compared with those of before.",
    "nothing, if that is known; render the YAML again to lock what is there now.",
)
"Id, reason and fix of a finding: TRAINED on training streams, EVALUATED on evaluations."


def lock_path(target: str) -> str | None:
    """The path of a YAML's lock, beside the YAML; None where the YAML goes into a pipe or
    a device.
    """
    place = locate(target)
    return None if not place.is_store and is_device(place.url) else f"{target}{SUFFIX}"


def make_lock(mix: Mix) -> Lock:
    """Return the lock of the mix as published now: its streams' files, and how the loaders draw
    them. A loader with a stream that mdsmix cannot open is left out.
    """
    opened = [loader for loader in mix.loaders if not loader.unopened]
    return Lock(loaders={loader.label: _loader(mix, loader) for loader in opened})


def _loader(mix: Mix, loader: Loader) -> LoaderLock:
    drawn, card = count_loader_draws(loader) or [0] * len(loader.streams), mix.tokenizer
    settings = locked_settings(
        loader,
        batch=mix.yaml.batch_size if loader.trains else None,
        tokenizer=card and card.hash,
        chat_template=card and card.chat_template_hash,
    )
    return LoaderLock(streams=[*map(_stream, loader.streams, drawn)], settings=settings)


def _stream(stream: StreamInMix, drawn: int) -> LockedStream:
    files = [(shard.samples, shard.raw_data, shard.stored) for shard in stream.shards]
    return lock_stream(
        stream.name,
        drawn,
        [(n, raw.basename, raw.bytes, raw.hashes or stored.hashes) for n, raw, stored in files],
    )


STREAM_COLUMNS = (
    Column("loader", "text"),
    Column("stream", "text"),
    Column("state", "text"),
    Column("samples"),
    Column("drawn an epoch", key="drawn"),
)


def compare_locks(was: Lock, now: Lock, is_accepted: bool = False) -> tuple[list[Finding], Table]:
    """A finding for each difference, and a table of the streams of `now` with their states. A
    difference in training is an error, or a warning where it `is_accepted`; a difference in an
    evaluation is a warning.
    """
    found, rows, none = list[Finding](), list[Row](), LoaderLock(streams=[])
    for label in now.loaders | was.loaders:
        held = now.loaders.get(label, none)
        told = [*find_differences(was.loaders.get(label, none), held)]
        id, why, fix = TRAINING_DIFFERS if label == TRAIN else EVALUATION_DIFFERS
        severity: Severity = "error" if label == TRAIN and not is_accepted else "warning"
        found += [
            Finding(f"{label}: {sentence}.", fix, tuple(streams), id, severity, why)
            for sentence, streams in told
        ]
        changed = {name for _, streams in told for name in streams}
        rows += [
            (label, s.name, f"{'not ' * (s.name in changed)}as planned", s.samples, s.drawn)
            for s in held.streams
        ]
    return found, Table(columns=STREAM_COLUMNS, rows=rows)


def check_lock(mix: Mix, targets: Sequence[str], is_accepted: bool) -> tuple[list[Finding], Table]:
    """The lock beside the one YAML in `targets`, compared with the mix of now; RecipeError where no
    lock can be read.
    """
    if mix.recipe or mix.is_bare or len(targets) != 1:
        raise RecipeError(
            f"--lock compares one training YAML with the lock beside it, and {', '.join(targets)} is none; name the YAML that "
            "`mdsmix render-yaml` wrote."
        )
    mix.train.require_opened()
    target, place = targets[0], lock_path(targets[0])
    found = locate(place).fetch() if place else None
    if found is None:
        raise RecipeError(
            f"{target} has no lock: there is no {os.path.basename(target)}{SUFFIX} beside it, so what the run was planned with is "
            f"not known; `mdsmix render-yaml RECIPE -o {target}` writes both."
        )
    fix = "render the YAML again, which locks what is published now"
    return compare_locks(parse_lock(Lock, found[1], str(place), fix), make_lock(mix), is_accepted)
