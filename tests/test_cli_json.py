"""`--json` of every command: one JSON document on stdout with the figures that a person is shown, and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.converting import documents, manifest_of, mdsmix, pairs, write_jsonl, write_recipe


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "docs.jsonl", [{"text": f"Document {n}"} for n in range(20)])
    write_jsonl(tmp_path / "faq.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": 1}])
    streams = {
        "docs": documents(tmp_path / "docs.jsonl"),
        "faq": pairs(tmp_path / "faq.jsonl"),
    }
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, max_bad=1.0)


def answer(*arguments: object) -> Any:
    said = mdsmix(*arguments, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_the_document_of_each_command(recipe: Path, tmp_path: Path) -> None:
    docs, faq = answer("convert", recipe)["rows"]
    totals = manifest_of(tmp_path / "out/docs/train").totals
    assert (docs["stream"], docs["read"], docs["tokens"]) == ("docs", 20, totals.tokens)
    assert faq["reasons"] == {"filtered": {}, "quarantined": {"field_not_text": 1}}
    again = answer("convert", recipe)
    assert again["rows"][0]["state"].startswith("up to date")
    assert again["total"]["read"] == 22
    assert answer("convert", recipe, "--dry-run")["plan"]

    docs = tmp_path / "out/docs"
    card = answer("inspect", docs)
    assert card["manifest"]["totals"]["samples"] == card["samples"] > 0
    assert [shown["number"] for shown in card["shown"]] == [0, 1, 2]
    assert card["shown"][0]["sample"][-1]["trained"] is True
    assert card["is_whole"] is True
    assert answer("verify", docs)["faults"] == []
    assert answer("repair", docs, "--recipe", recipe)["units"] == 0
    garbage = answer("gc", docs, "--older-than", "0s")
    assert (garbage["deleted"], garbage["garbage"]) == (False, [])
    assert answer("check", recipe)["may_be_mixed"] is True
