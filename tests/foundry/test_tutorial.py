"""docs/tutorial.md from its first command to the last: the YAML that it renders trains in the real LLM-Foundry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.homes import Homes
from tests.docs.page import Counts, Page
from tests.foundry.conftest import ROOT, Foundry


def test_the_yaml_of_the_tutorial_trains(
    foundry: Foundry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    homes = Homes(tmp_path)
    page = Page(ROOT / "docs/tutorial.md", homes, Counts())
    page.read()
    assert page.wrong == []
    losses = foundry("train.losses", path=str(homes.home / "foundry.yaml"), steps=12)
    assert losses[-1] < losses[0] - 0.3
