"""LLM-Foundry's own loader gives the shares of tokens and of trained tokens that the recipe asked for, seed after seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.converting import mdsmix
from tests.foundry.conftest import Foundry
from tests.foundry.steps import rendered
from tests.mixtures import write_three

SEEDS = list(range(20))
ASKED = {"web": 0.5, "docs": 0.2, "chat": 0.3}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return write_three(tmp_path_factory.mktemp("three"), tokenizer_folder)


def planned(recipe: Path, **keys: Any) -> tuple[Path, dict[str, Any]]:
    """The recipe with these keys, and what `check` prints of each stream."""
    changed = recipe.with_name("mixed.yaml")
    changed.write_text(json.dumps(json.loads(recipe.read_text()) | keys))
    told = orjson.loads(mdsmix("check", changed, "--json").out)["shares"]["rows"]
    return changed, {row["stream"]: row for row in told}


def seen(recipe: Path, foundry: Foundry) -> Any:
    return foundry("shares.epochs", path=str(rendered(recipe)), seeds=SEEDS)


@pytest.mark.parametrize("unit", ["tokens", "loss_tokens"])
def test_epochs_hold_on_average_the_shares_asked(recipe: Path, foundry: Foundry, unit: str) -> None:
    mix = {name: {"share": share} for name, share in ASKED.items()}
    changed, told = planned(recipe, mix=mix, count=unit, budget="100k tokens")
    found = seen(changed, foundry)
    assert len(found[unit]) == len(SEEDS)
    for name, row in told.items():
        assert abs(row["reached"] - ASKED[name]) <= 0.001
        off = [epoch[name] - row["reached"] for epoch in found[unit]]
        assert max(map(abs, off)) <= 0.02
        assert abs(sum(off) / len(off)) <= 0.005


def test_streams_taken_whole_are_within_a_tenth_of_a_point(recipe: Path, foundry: Foundry) -> None:
    found = None
    for unit in ("tokens", "loss_tokens"):
        changed, told = planned(recipe, mix={}, budget="1 pass of chat", count=unit)
        found = found or seen(changed, foundry)
        for name, row in told.items():
            assert row["passes"] == 1
            assert all(abs(epoch[name] - row["asked"]) <= 0.001 for epoch in found[unit])
