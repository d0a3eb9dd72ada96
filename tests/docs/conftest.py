"""Pages may load and preview, so torch is wanted; all of them share one process, one corpus and its streams."""

import os
from pathlib import Path
from typing import Any

import pytest

from mdsmix.encode import transformers_process
from tests.docs.homes import Homes
from tests.docs.shell import command_folder
from tests.with_torch.conftest import _own_numbers, _own_temporary  # noqa: F401


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Homes:
    return Homes(tmp_path_factory.mktemp("pages"))


@pytest.fixture
def reader(
    homes: Homes,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody with mdsmix and python at the prompt, in a window of 80 columns."""
    commands = command_folder(tmp_path_factory.getbasetemp() / "commands")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(
        transformers_process, "answered", lambda name, asked: (_opened(name).answer(asked), "")
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(Path.cwd())


def _opened(name: str) -> Any:
    """In this process: in one of its own it takes 10 s."""
    from mdsmix.load.vision import opened

    return opened(name)
