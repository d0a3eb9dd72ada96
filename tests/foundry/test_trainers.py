"""Composer's own trainer over `mdsmix.load`, as docs/loading.md has it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.converting import chats, documents
from tests.foundry.conftest import ROOT, Foundry
from tests.foundry.steps import converted, does

LOADER = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}


def test_composers_block_of_the_page_trains(
    foundry: Foundry, tokenizer_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs/loading.md").read_text("utf-8")
    (code,) = (
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "composer" in each
    )
    streams = {
        "docs": documents(corpus_folder / "docs.jsonl", layout="document", min_tokens=8),
        "chat": chats(corpus_folder / "chat.jsonl"),
    }
    mix = {"docs": {"choose": 16}, "chat": {"choose": 16}}
    settings = {"streams": streams, "mix": mix, "max_seq_len": 64, "train_loader": LOADER}
    recipe = converted(tmp_path, tokenizer_folder, **settings)
    does("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    code = code.replace('"train.yaml"', repr(str(tmp_path / "train.yaml")))
    assert foundry("pages.run", code=code) == 4
