"""Versions of rules: a raised one makes again what it shapes and nothing else, and `check` names it
for what was made before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdsmix.encode.template_rules import TEMPLATE_RULES
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.shapes import SHAPES
from mdsmix.sources import SourceFile
from mdsmix.sources.format import Format
from mdsmix.sources.jsonl import Jsonl
from mdsmix.sources.parquet import Parquet
from tests.converting import (
    chats,
    documents,
    done,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)

Raise = Callable[[pytest.MonkeyPatch], None]


RAISED_VERSION = 99
HISTORY = "template.rewritten_history"


def raise_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pairs, "version", Pairs.version + 1)


def raise_shape(patch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["messages"]
    patch.setitem(SHAPES, "messages", replace(shape, version=shape.version + 1))


def raise_format(patch: pytest.MonkeyPatch) -> None:
    raised_version(patch, Parquet, Parquet.version + 1)


def raise_template_rule(patch: pytest.MonkeyPatch) -> None:
    rule = TEMPLATE_RULES[HISTORY]
    patch.setitem(TEMPLATE_RULES, HISTORY, rule._replace(version=rule.version + 1))


def raised_version(patch: pytest.MonkeyPatch, format: type[Format], version: int) -> None:
    """Raise a format for all of its files."""
    patch.setattr(format, "version", version)
    patch.setattr(format, "version_for", lambda self, file, fields: version)


class Raised(NamedTuple):
    """A rule that is raised, and the streams that it shapes."""

    by: Raise
    rule: str
    streams: set[str]


RAISED = [
    Raised(raise_kind, "kind.pairs", {"pairs"}),
    Raised(raise_shape, "shape.messages", {"chats", "rewritten"}),
    Raised(raise_format, "format.parquet", {"rows"}),
    Raised(raise_template_rule, "template.rewritten_history", {"rewritten"}),
]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Streams of two work units or more, by another kind, shape, format or template rule each."""
    texts = [{"text": f"the document of the number {n} is not long"} for n in range(40)]
    asked = [{"prompt": f"what is {n}", "response": f"it is {n}"} for n in range(40)]
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "so"}]}
        for n in range(40)
    ]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    write_jsonl(tmp_path / "pairs.jsonl", asked)
    write_jsonl(tmp_path / "chats.jsonl", talks)
    write_rows(tmp_path / "rows.parquet", texts)
    windows(monkeypatch, 1000)
    streams = {
        "texts": documents("texts.jsonl"),
        "rows": documents("rows.parquet", layout="document"),
        "pairs": pairs("pairs.jsonl"),
        "chats": chats("chats.jsonl"),
        "rewritten": chats("chats.jsonl", rewritten_history="last"),
    }
    return write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)


def write_rows(path: Path, records: list[dict[str, str]]) -> None:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=10)


def published(recipe: Path, stream: str) -> dict[str, bytes]:
    split = recipe.parent / "out" / stream / "train"
    return {name: (split / name).read_bytes() for name in ("index.json", "mdsmix.manifest")}


@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: raised.rule)
def test_a_raised_rule_makes_again_what_it_shapes(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, raised: Raised
) -> None:
    before = {o.stream: o.units for o in run_recipe(recipe)}
    assert min(before.values()) > 1
    kept = {stream: published(recipe, stream) for stream in before}
    split = {stream: recipe.parent / "out" / stream / "train" for stream in before}
    rows = {stream: token_rows(split[stream]) for stream in before}
    yaml = recipe.parent / "train.yaml"
    done("render-yaml", recipe, "-o", yaml)
    lock = Path(f"{yaml}.mix.lock").read_bytes()
    assert "rows-outdated" not in mdsmix("check", recipe).out
    raised.by(monkeypatch)

    warned = done("check", recipe).out
    (line,) = [line for line in warned.splitlines() if "rows-outdated" in line]
    assert re.search(rf"the rule {re.escape(raised.rule)} was version \d+ .* and is \d+", line)
    assert "mdsmix convert" in line
    assert {stream for stream in before if f"{stream}" in named(line)} == raised.streams
    again = recipe.parent / "again.yaml"
    done("render-yaml", recipe, "-o", again)  # an older stream is still read
    assert Path(f"{again}.mix.lock").read_bytes() == lock
    dry = done("convert", recipe, "--dry-run").out
    assert dry.count(f"the rule {raised.rule} was version ") == len(raised.streams)

    outcomes = {o.stream: o for o in run_recipe(recipe)}
    assert {o.stream: o.done for o in outcomes.values()} == {
        stream: units if stream in raised.streams else 0 for stream, units in before.items()
    }
    for stream in before:
        now = published(recipe, stream)
        assert (now == kept[stream]) == (stream not in raised.streams)
        assert token_rows(split[stream]) == rows[stream]
        assert (raised.rule in manifest_of(split[stream]).rules) == (stream in raised.streams)
    assert "rows-outdated" not in done("check", recipe).out
    done("check", "--lock", yaml)
    assert not any(o.done for o in run_recipe(recipe))


def test_a_stream_whose_records_had_unread_extras_is_made_again_and_no_other(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest tells, since fields that are not read are counted there; the rule then stays."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}] * 2
    write_jsonl(tmp_path / "plain.jsonl", [{"messages": messages, "lang": "en"}] * 3)
    write_jsonl(tmp_path / "masked.jsonl", [{"messages": messages, "loss_mask": [1, 0]}] * 3)
    streams = {name: chats(f"{name}.jsonl") for name in ("plain", "masked")}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)
    with monkeypatch.context() as patch:
        patch.setitem(SHAPES, "messages", replace(SHAPES["messages"], extras=()))
        for module in ("extras", "messages"):
            patch.setattr(f"mdsmix.shapes.{module}.NAMES", frozenset())
        run_recipe(recipe)
    kept = {stream: published(recipe, stream) for stream in streams}
    warned = done("check", recipe).out
    (line,) = [line for line in warned.splitlines() if "rows-outdated" in line]
    assert "the rule record.extras was version 1" in line
    assert named(line) == ["masked"]
    assert {o.stream: o.done for o in run_recipe(recipe)} == {"plain": 0, "masked": 1}
    assert {s for s in streams if published(recipe, s) == kept[s]} == {"plain"}
    assert manifest_of(recipe.parent / "out/masked/train").rules == {"record.extras": 2}
    assert "rows-outdated" not in done("check", recipe).out
    assert not any(o.done for o in run_recipe(recipe))
    done("convert", recipe, "--reencode", "--only", "masked")
    assert not any(o.done for o in run_recipe(recipe))


def named(line: str) -> list[str]:
    """The streams that a finding's line names in its brackets."""
    return line.partition("[")[2].partition("]")[0].split(", ")


def test_a_raised_format_makes_again_the_units_of_its_files_alone(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": f"the document of the number {n} is not long"} for n in range(60)]
    write_jsonl(tmp_path / "a.jsonl", records[:30])
    write_rows(tmp_path / "b.parquet", records[30:45])
    write_rows(tmp_path / "c.parquet", records[45:])
    windows(monkeypatch, 400)
    streams = {"mixed": documents("*.*l*", layout="document")}
    source: dict[str, Any] = {"path": ["a.jsonl", "b.parquet", "c.parquet"], "text": "text"}
    streams["mixed"]["source"] = source
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    version, of_lines = Parquet.version + 1, Jsonl.version + 1
    raised_version(monkeypatch, Parquet, version - 1)
    (first,) = run_recipe(recipe)

    def only_b(self: Parquet, file: SourceFile, fields: tuple[str, ...]) -> int:
        return version if file.name.endswith("b.parquet") else version - 1

    monkeypatch.setattr(Parquet, "version", version)
    monkeypatch.setattr(Parquet, "version_for", only_b)
    (of_b,) = run_recipe(recipe)
    assert 0 < of_b.done < first.units / 2
    assert manifest_of(tmp_path / "out" / "mixed" / "train").formats["format.parquet"] == version
    raised_version(monkeypatch, Parquet, version + 1)
    (of_rows,) = run_recipe(recipe)
    assert of_b.done < of_rows.done < first.units
    raised_version(monkeypatch, Jsonl, of_lines)
    (others,) = run_recipe(recipe)
    assert others.done == first.units - of_rows.done


def test_versions_published_beside_each_other_name_the_rules_that_made_them(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("publish=versioned",)
    run_recipe(recipe, *overrides)
    monkeypatch.setattr(Pretraining, "version", RAISED_VERSION)
    (version,) = (recipe.parent / "out" / "texts").glob("train-*")
    assert "kind.pretraining" in mdsmix("check", version).out
    run_recipe(recipe, *overrides)
    assert "rows-outdated" not in mdsmix("check", recipe, *overrides).out
    # The rows are the same, so the version is: its manifest names the rule now.
    assert "rows-outdated" not in mdsmix("check", version).out


def test_a_stream_of_a_newer_mdsmix_is_told(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "version", RAISED_VERSION)
        run_recipe(recipe)
    told = mdsmix("check", recipe).out
    assert f"kind.pretraining was version {RAISED_VERSION}" in told
    assert "a newer mdsmix made the stream" in told


def test_a_stream_drawn_of_older_ones_is_outdated_too(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(20)])
    streams = {name: documents(f"{name}.jsonl", layout="document") for name in ("one", "other")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    drawn = tmp_path / "drawn"
    run_recipe(recipe)
    monkeypatch.setattr(Pretraining, "version", RAISED_VERSION)
    run_recipe(recipe, only=["one"])
    done("mix", recipe, "--out", drawn)
    assert "kind.pretraining was version" in mdsmix("check", drawn).out
    run_recipe(recipe)
    done("mix", recipe, "--out", drawn)
    assert "rows-outdated" not in mdsmix("check", drawn).out
