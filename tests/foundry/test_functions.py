"""LLM-Foundry's own preprocessing functions, given as a shape, give the rows of its converter with `--preprocessor`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.converting import manifest_of, write_jsonl, write_recipe
from tests.foundry.conftest import Foundry

MODULE = "llmfoundry.data.finetuning.tasks"
TARGETS = {
    "target_prompts": "none",
    "target_responses": "last",
    "decoder_only_format": True,
    "max_seq_len": 128,
}
ASKED = "What is number {n}?"
TOLD = "It is {n} and no more."


def _turns(role: str, content: str) -> list[dict[str, str]]:
    human = "user" if role == "role" else "human"
    model = "assistant" if role == "role" else "gpt"
    return [{role: human, content: ASKED}, {role: model, content: TOLD}]


RECORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "alpaca_preprocessing_function": ("pair", {"text": f"{ASKED}\n### Response:{TOLD}"}),
    "dolly_preprocessing_function": (
        "pair",
        {"instruction": ASKED, "input": "{n}", "output": TOLD},
    ),
    "p3_preprocessing_function": ("pair", {"inputs": ASKED, "targets": TOLD}),
    "muennighoff_tokenize_function": ("pair", {"inputs": ASKED, "targets": TOLD}),
    "shareGPT_format_preprocessor": ("conversation", {"conversations": _turns("from", "value")}),
    "QA_format_preprocessor": ("conversation", {"Q": ASKED, "A": TOLD}),
    "messages_format_preprocessor": ("conversation", {"messages": _turns("role", "content")}),
}
"Function -> what it gives, and a record of it."
ROWS = 20


def _numbered(value: Any, n: int) -> Any:
    if isinstance(value, dict):
        return {key: _numbered(inner, n) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbered(inner, n) for inner in value]
    return value.replace("{n}", "7" * (n + 1))


@pytest.fixture(scope="module")
def ours(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, foundry_python: Path
) -> Path:
    """A stream a function, converted by the mdsmix that is installed beside LLM-Foundry."""
    home = tmp_path_factory.mktemp("functions")
    streams = {}
    for name, (gives, record) in RECORDS.items():
        path = write_jsonl(home / f"{name}.jsonl", [_numbered(record, n) for n in range(ROWS)])
        source = {"path": str(path), "shape": f"{MODULE}:{name}", "gives": gives}
        streams[name] = {"kind": "finetuning", "source": source}
    recipe = write_recipe(home, tokenizer_folder, streams=streams, **TARGETS)
    command = [str(foundry_python.with_name("mdsmix")), "convert", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert f"{MODULE}:alpaca_preprocessing_function imports torch" in done.stderr
    return home


@pytest.mark.parametrize("name", RECORDS)
def test_rows_are_those_of_foundrys_converter(
    name: str, ours: Path, tokenizer_folder: Path, foundry: Foundry, tmp_path: Path
) -> None:
    tokenizer = str(tokenizer_folder)
    taken = foundry(
        "convert.finetuning",
        path=str(ours / f"{name}.jsonl"),
        out=str(tmp_path),
        tokenizer=tokenizer,
        targets=TARGETS,
        preprocessor=f"{MODULE}:{name}",
    )
    assert taken == ROWS
    stream = f"{ours}/out/{name}/train"
    found = foundry(
        "loaders.same",
        tokenizer=tokenizer,
        theirs=f"{tmp_path}/train",
        ours=stream,
        name="finetuning",
        dataset=TARGETS,
    )
    assert found["rows"] == ROWS
    shape = manifest_of(stream).encoding.shape or ""
    assert shape.startswith(f"{RECORDS[name][0]} by {MODULE}:{name} of hash ")
