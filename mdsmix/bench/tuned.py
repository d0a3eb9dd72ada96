"""The file in which `mdsmix bench` leaves what it found, and from which `mdsmix render-yaml --tuned` takes it.

It holds keys of `train_loader` alone, those that Foundry's DataLoader section and Streaming take; what was measured stands beside
them for people. A rendering reads it as settings of the recipe, so that `key=value` behind it still decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.words import spelled


@dataclass(frozen=True, kw_only=True)
class TunedDataset:
    """Keys of `train_loader.dataset`."""

    predownload: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Keys of `train_loader`."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    dataset: TunedDataset = TunedDataset()


@dataclass(frozen=True, kw_only=True)
class TunedFile:
    """The whole file."""

    train_loader: Tuned
    measured: Mapping[str, Any] | None = None
    "On what, of what, with which result: for people."


def overrides_of(path: str) -> list[str]:
    """The settings as `key=value` of a recipe; RecipeError where the file is none of bench's."""
    loader = _read(path).train_loader
    found = {
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.dataset.predownload:
        found["dataset.predownload"] = loader.dataset.predownload
    return [f"train_loader.{key}={spelled(value)}" for key, value in found.items()]


def _read(path: str) -> TunedFile:
    try:
        return typed.load(TunedFile, Path(path).read_bytes())
    except OSError as error:
        raise RecipeError(f"--tuned {path} cannot be read: {error.strerror}.") from None
    except typed.Misfit as misfit:
        raise RecipeError(
            f"--tuned {path} is not what `mdsmix bench TRAIN.yaml -o {path}` writes: {misfit}"
        ) from None


def content(loader_keys: Mapping[str, Any], predownload: int | None, measured: Any) -> bytes:
    """The file's bytes."""
    dataset = {"dataset": {"predownload": predownload}} if predownload else {}
    tree = {"train_loader": dict(loader_keys) | dataset, "measured": measured}
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
