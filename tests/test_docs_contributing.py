"""What docs/contributing.md teaches works as it stands: its shape and its format are taken from the page and registered."""

import gzip
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from mdsmix.shapes import SHAPES
from mdsmix.sources import formats
from tests.converting import (
    documents,
    manifest_of,
    mdsmix,
    quarantined,
    token_rows,
    write_jsonl,
    write_recipe,
)

PAGE = Path(__file__).parent.parent / "docs" / "contributing.md"
RECORDS = [{"text": f"text {n} of a sequence"} for n in range(30)]


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's code that begins with this docstring."""
    (code,) = [c for c in blocks("python") if c.startswith(f'"""{name}')]
    made = ModuleType(f"contributed_{name.split()[0].lower()}")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(code, str(PAGE), "exec"), made.__dict__)
    return made


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_the_shape(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the page's own lines of a recipe; the same prompts are written as pairs beside them."""
    monkeypatch.setitem(SHAPES, "dolly", module("Dolly", monkeypatch).SHAPE)
    (lines,) = blocks("yaml")
    write_jsonl(
        tmp_path / "dolly.jsonl",
        [
            {"instruction": "Who?", "context": "A king ruled.", "response": "A king."},
            {"instruction": "Where?", "context": "", "response": "Here.", "category": "open_qa"},
            {"instruction": "Where?", "context": None, "response": "Here."},
            {"instruction": "Where?", "response": "Here."},
        ],
    )
    pairs = [("A king ruled.\n\nWho?", "A king."), ("Where?", "Here.")]
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": q, "response": a} for q, a in pairs])
    streams = yaml.safe_load(lines)["streams"]
    streams["pairs"] = {"kind": "finetuning", "source": {"path": "pairs.jsonl", "shape": "prompt_response"}}  # fmt: skip
    answer = mdsmix(
        "convert", write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    )
    assert answer.code == 0, answer.err
    dolly, pairs_too = (tmp_path / "out" / name / "train" for name in ("dolly", "pairs"))
    assert token_rows(dolly) == token_rows(pairs_too)
    assert manifest_of(dolly).records.quarantined == {"field_not_text": 1, "missing_field": 1}


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_the_format(
    packing: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of a sequence give the rows of the same records in lines, and bad ones are named by their bytes."""
    made = module("JSON text sequences", monkeypatch)
    for suffix, known in formats._packed_or_not(made.JsonSeq, ".json-seq").items():
        monkeypatch.setitem(formats.FORMATS, suffix, known)
    texts = [json.dumps(record).encode() for record in RECORDS]
    stored = b"".join(b"\x1e%b\n" % text for text in [texts[0], b"{no", *texts[1:]])
    packed = gzip.compress(stored) if packing else stored
    (tmp_path / f"a.json-seq{packing}").write_bytes(packed)
    write_jsonl(tmp_path / "b.jsonl", RECORDS)
    names = {"sequence": f"a.json-seq{packing}", "lines": "b.jsonl"}
    streams = {name: documents(tmp_path / file, layout="document") for name, file in names.items()}
    answer = mdsmix(
        "convert", write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    )
    assert answer.code == 0, answer.err
    sequence, lines = (tmp_path / "out" / name / "train" for name in names)
    assert token_rows(sequence) == token_rows(lines)
    (bad,) = quarantined(sequence)
    assert (bad["reason"], bad["offset"]) == ("not_json", stored.index(b"{no"))
