"""Versions of rules: when one is raised, the streams that it shapes are converted again and no
others, and `check` names it for streams made before.

`raise_kind` and its like raise a rule. `recipe` is a recipe of streams that different rules shape.
"""

from __future__ import annotations

import re
import tarfile
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
from mdsmix.record import RecordRefused
from mdsmix.shapes import SHAPES
from mdsmix.shapes.training_marks import read_marks
from mdsmix.sources import SourceFile
from mdsmix.sources.csv_table import CsvTable
from mdsmix.sources.format import Format, parse_json_fields
from mdsmix.sources.jsonl import Jsonl
from mdsmix.sources.parquet import Parquet
from mdsmix.sources.tar import Tar
from tests.converting import (
    chats,
    documents,
    manifest_of,
    mdsmix,
    pairs,
    read_token_rows,
    run_ok,
    run_recipe,
    set_window_size,
    write_jsonl,
    write_recipe,
)
from tests.formats import encode_table, write_records

Raise = Callable[[pytest.MonkeyPatch], None]


RAISED_VERSION = 99
HISTORY = "template.rewritten_history"


def raise_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pairs, "version", Pairs.version + 1)


def raise_shape(patch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["messages"]
    patch.setitem(SHAPES, "messages", replace(shape, version=shape.version + 1))


def raise_format(patch: pytest.MonkeyPatch) -> None:
    set_format_version(patch, Parquet, Parquet.version + 1)


def raise_template_rule(patch: pytest.MonkeyPatch, name: str = HISTORY) -> None:
    rule = TEMPLATE_RULES[name]
    patch.setitem(TEMPLATE_RULES, name, rule._replace(version=rule.version + 1))


def raise_rule_of_parts(patch: pytest.MonkeyPatch) -> None:
    raise_template_rule(patch, "template.answer_parts")


def set_format_version(patch: pytest.MonkeyPatch, format: type[Format], version: int) -> None:
    """Set the version of a format for all of its files."""
    patch.setattr(format, "version", version)
    patch.setattr(format, "version_for", lambda self, file, fields: version)


class RaisedRule(NamedTuple):
    """A rule that is raised, and the streams that it shapes."""

    apply: Raise
    rule: str
    streams: set[str]


RAISED = [
    RaisedRule(raise_kind, "kind.pairs", {"pairs"}),
    RaisedRule(raise_shape, "shape.messages", {"chats", "rewritten", "parts"}),
    RaisedRule(raise_format, "format.parquet", {"rows"}),
    RaisedRule(raise_template_rule, "template.rewritten_history", {"rewritten"}),
    RaisedRule(raise_rule_of_parts, "template.answer_parts", {"parts"}),
]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a recipe of streams of at least two work units, each shaped by another kind, shape,
    format or template rule.
    """
    texts = [{"text": f"the document of the number {n} is not long"} for n in range(40)]
    questions = [{"prompt": f"what is {n}", "response": f"it is {n}"} for n in range(40)]
    conversations = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "so"}]}
        for n in range(40)
    ]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    write_jsonl(tmp_path / "pairs.jsonl", questions)
    write_jsonl(tmp_path / "chats.jsonl", conversations)
    write_rows(tmp_path / "rows.parquet", texts)
    set_window_size(monkeypatch, 1000)
    streams = {
        "texts": documents("texts.jsonl"),
        "rows": documents("rows.parquet", layout="document"),
        "pairs": pairs("pairs.jsonl"),
        "chats": chats("chats.jsonl"),
        "rewritten": chats("chats.jsonl", rewritten_history="last"),
        "parts": chats("chats.jsonl", train_parts={"reasoning": False}),
    }
    return write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)


def write_rows(path: Path, records: list[dict[str, str]]) -> None:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=10)


def read_published(recipe: Path, stream: str) -> dict[str, bytes]:
    """Return the index and manifest of a published stream."""
    split = recipe.parent / "out" / stream / "train"
    return {name: (split / name).read_bytes() for name in ("index.json", "mdsmix.manifest")}


@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: raised.rule)
def test_a_raised_rule_converts_only_the_streams_that_it_shapes(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, raised: RaisedRule
) -> None:
    # Convert, and keep the result.
    units = {outcome.stream: outcome.units for outcome in run_recipe(recipe)}
    assert min(units.values()) > 1
    before = {stream: read_published(recipe, stream) for stream in units}
    splits = {stream: recipe.parent / "out" / stream / "train" for stream in units}
    rows = {stream: read_token_rows(splits[stream]) for stream in units}
    yaml = recipe.parent / "train.yaml"
    run_ok("render-yaml", recipe, "-o", yaml)
    lock = Path(f"{yaml}.mix.lock").read_bytes()
    assert "rows-outdated" not in mdsmix("check", recipe).out
    raised.apply(monkeypatch)

    # `check` names the rule and the streams; an older stream is still read.
    output = run_ok("check", recipe).out
    (line,) = [line for line in output.splitlines() if "rows-outdated" in line]
    assert re.search(rf"the rule {re.escape(raised.rule)} was version \d+ .* and is \d+", line)
    assert "mdsmix convert" in line
    assert set(streams_in(line)) & set(units) == raised.streams
    again = recipe.parent / "again.yaml"
    run_ok("render-yaml", recipe, "-o", again)
    assert Path(f"{again}.mix.lock").read_bytes() == lock
    dry_run = run_ok("convert", recipe, "--dry-run").out
    assert dry_run.count(f"the rule {raised.rule} was version ") == len(raised.streams)

    # A conversion makes these streams again, and nothing else.
    converted = {outcome.stream: outcome.done for outcome in run_recipe(recipe)}
    for stream in units:
        is_raised = stream in raised.streams
        assert converted[stream] == (units[stream] if is_raised else 0)
        assert (read_published(recipe, stream) == before[stream]) == (not is_raised)
        assert read_token_rows(splits[stream]) == rows[stream]
        assert (raised.rule in manifest_of(splits[stream]).rules) == is_raised
    assert "rows-outdated" not in run_ok("check", recipe).out
    run_ok("check", "--lock", yaml)
    assert not any(outcome.done for outcome in run_recipe(recipe))


def test_an_added_field_of_a_shape_is_no_change_of_the_recipe(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe with only `shape: openai` names all fields of the shape; version 1 had no `system`.
    `check` refused such streams: "converted by another recipe".
    """
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages}] * 3)
    source = {"path": "chats.jsonl", "shape": "openai"}
    streams = {"chats": {"kind": "finetuning", "source": source}}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)
    older = replace(SHAPES["openai"], version=1, optional=("tools",))
    with monkeypatch.context() as patch:
        patch.setitem(SHAPES, "openai", older)
        run_recipe(recipe)
    output = run_ok("check", recipe).out
    assert "the rule shape.openai was version 1" in output
    assert "recipe-changed" not in output
    assert "source.system" not in run_ok("convert", recipe, "--dry-run").out
    # Another name of the added field, and another field of the same version, are changes.
    renamed = (
        "streams.chats.source={path: chats.jsonl, shape: openai, messages: messages, system: s}"
    )
    assert "source.system was not set and is s" in mdsmix("check", recipe, renamed).out
    run_recipe(recipe)
    short = "streams.chats.source={path: chats.jsonl, shape: openai, messages: messages}"
    assert "source.system was system and is not set" in mdsmix("check", recipe, short).out


def test_streams_of_a_newer_mdsmix_are_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        raise_kind(patch)
        run_recipe(recipe)
    output = run_ok("convert", recipe)
    said = "stream pairs: a newer mdsmix has published the stream, by other rules (kind.pairs was"
    assert said in output.err + output.out
    assert "rules of mdsmix have changed" not in output.err + output.out


def test_only_streams_with_unread_extras_are_converted_again(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest counts fields that are not read, which tells these streams. The rule then
    stays.
    """
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}] * 2
    write_jsonl(tmp_path / "plain.jsonl", [{"messages": messages, "lang": "en"}] * 3)
    write_jsonl(tmp_path / "masked.jsonl", [{"messages": messages, "loss_mask": [1, 0]}] * 3)
    streams = {name: chats(f"{name}.jsonl") for name in ("plain", "masked")}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)
    with monkeypatch.context() as patch:
        patch.setitem(SHAPES, "messages", replace(SHAPES["messages"], extras=()))
        patch.setattr("mdsmix.shapes.extras.NAMES", frozenset())
        run_recipe(recipe)
    before = {stream: read_published(recipe, stream) for stream in streams}
    output = run_ok("check", recipe).out
    (line,) = [line for line in output.splitlines() if "rows-outdated" in line]
    assert "the rule record.extras was version 1" in line
    assert streams_in(line) == ["masked"]
    converted = {outcome.stream: outcome.done for outcome in run_recipe(recipe)}
    assert converted == {"plain": 0, "masked": 1}
    unchanged = {name for name in streams if read_published(recipe, name) == before[name]}
    assert unchanged == {"plain"}
    assert manifest_of(recipe.parent / "out/masked/train").rules == {"record.extras": 2}
    assert "rows-outdated" not in run_ok("check", recipe).out
    assert not any(outcome.done for outcome in run_recipe(recipe))
    run_ok("convert", recipe, "--reencode", "--only", "masked")
    assert not any(outcome.done for outcome in run_recipe(recipe))


def test_only_streams_with_refused_marks_are_converted_again(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records with `train_detail` were refused as bad_weight; a stream without such a record, and
    one with another bad mark, stay.
    """
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "so"}
    detail = [{"begin_offset": 0, "end_offset": 0, "train": True}]
    answers = {"plain": {}, "marked": {"train_detail": detail}, "bad": {"weight": "x"}}
    streams = {}
    for name, keys in answers.items():
        records = [{"messages": [question, answer]}, {"messages": [question, answer | keys]}]
        write_jsonl(tmp_path / f"{name}.jsonl", records)
        source = {"path": f"{name}.jsonl", "shape": "openai"}
        streams[name] = {"kind": "finetuning", "source": source}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)

    def refuse_marks(raw: Any, messages: Any, leading: int = 0) -> Any:
        if any("train_detail" in message for message in messages):
            raise RecordRefused("bad_weight")
        return read_marks(raw, messages, leading)

    with monkeypatch.context() as patch:
        patch.setattr("mdsmix.shapes.conversation_rules.read_marks", refuse_marks)
        # Each record is then read alone, by `refuse_marks`.
        patch.setattr("mdsmix.shapes.conversation_rules.add_marks", lambda *arguments: None)
        run_recipe(recipe)
    (line,) = [line for line in run_ok("check", recipe).out.splitlines() if "rows-outdated" in line]
    assert "the rule record.marks was version 1" in line
    assert streams_in(line) == ["marked"]
    converted = {outcome.stream: outcome.done for outcome in run_recipe(recipe)}
    assert converted == {"plain": 0, "marked": 1, "bad": 0}
    assert manifest_of(tmp_path / "out/marked/train").rules["record.marks"] == 2
    assert manifest_of(tmp_path / "out/marked/train").records.written == 2
    assert "rows-outdated" not in run_ok("check", recipe).out
    assert not any(outcome.done for outcome in run_recipe(recipe))


def test_only_preferences_with_rewards_are_converted_again(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 stored rewards that are not finite; streams without rewards have none of these."""
    alpaca = {"instruction": "?", "chosen": "so", "rejected": "no"}
    sharegpt = {
        "conversations": [{"from": "human", "value": "?"}],
        "chosen": {"from": "gpt", "value": "so"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    streams = dict[str, Any]()
    for shape, record in {"alpaca": alpaca, "sharegpt": sharegpt}.items():
        rewards = {"chosen_reward": 1.5, "rejected_reward": 0.5}
        for name, fields in {shape: record, f"{shape}_rated": record | rewards}.items():
            write_jsonl(tmp_path / f"{name}.jsonl", [fields] * 3)
            keys = {field: field for field in fields}
            source = {"path": f"{name}.jsonl", "shape": f"preference_{shape}", **keys}
            streams[name] = {"kind": "preference", "source": source}
    settings = {"train_loader": {"name": "pairwise_preference", "dataset": {}}}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams, **settings)
    with monkeypatch.context() as patch:
        patch.setattr("mdsmix.kinds.rules.REWARDS", ())
        run_recipe(recipe)
    rules = [manifest_of(tmp_path / f"out/{name}/train").rules for name in streams]
    assert rules == [{"kind.preferences": 2}] * len(streams)

    rated = {name for name in streams if name.endswith("_rated")}
    output = mdsmix("check", recipe).out
    (line,) = [line for line in output.splitlines() if "rows-outdated" in line]
    assert "the rule record.rewards was version 1" in line
    assert set(streams_in(line)) == rated
    converted = {outcome.stream: outcome.done for outcome in run_recipe(recipe)}
    assert converted == {name: int(name in rated) for name in streams}
    assert "rows-outdated" not in mdsmix("check", recipe).out
    assert not any(outcome.done for outcome in run_recipe(recipe))


def test_only_tables_with_texts_or_messages_are_converted_again(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 of csv decoded every JSON value in such a cell: it dropped the quotes here."""
    prompts = [{"prompt": '"Hello"'}, {"prompt": '"Why?"'}]
    (tmp_path / "prompts.csv").write_bytes(encode_table(prompts, ","))
    archive = write_records(tmp_path, "tar", prompts)
    write_jsonl(tmp_path / "lines.jsonl", prompts)
    sources = {
        "prompts": {"path": "prompts.csv", "prompt": "prompt"},
        "questions": {"path": "prompts.csv", "instruction": "prompt"},  # is always a text
        "archive": {"path": archive.name, "instruction": "prompt"},
        "lines": {"path": "lines.jsonl", "prompt": "prompt"},
    }
    streams = {name: {"kind": "prompt", "source": source} for name, source in sources.items()}
    settings = {"train_loader": {"name": "prompt", "dataset": {"max_gen_len": 8}}}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams, **settings)

    def parse_all(record: dict[str, Any], names: tuple[str, ...]) -> str:
        parse_json_fields(record, names)
        return ""

    with monkeypatch.context() as patch:
        patch.setattr(CsvTable, "version", 1)
        patch.setattr(Tar, "version", 2)
        patch.setattr("mdsmix.sources.content.describe_cells", lambda unit: "")
        patch.setattr("mdsmix.sources.format.parse_message_fields", parse_all)
        run_recipe(recipe)
    before = {name: read_published(recipe, name) for name in streams}
    assert before["prompts"]["index.json"] != before["lines"]["index.json"]

    output = mdsmix("check", recipe).out
    (line,) = [line for line in output.splitlines() if "rows-outdated" in line]
    assert "the rule format.csv was version 1" in line
    assert streams_in(line) == ["prompts"]
    converted = {outcome.stream: outcome.done for outcome in run_recipe(recipe)}
    assert converted == {"prompts": 1, "questions": 0, "archive": 0, "lines": 0}
    prompts_index = read_published(recipe, "prompts")["index.json"]
    assert prompts_index == before["lines"]["index.json"]  # shards are named by their content
    for name in ("questions", "archive", "lines"):
        assert read_published(recipe, name) == before[name]
    assert "rows-outdated" not in mdsmix("check", recipe).out
    assert not any(outcome.done for outcome in run_recipe(recipe))


def test_only_archives_with_links_are_converted_again(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before 4 of tar skipped links without counting them."""
    for name in ("plain", "linked"):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(20):
            (folder / f"{number}.text").write_text(f"some text {number}")
        if name == "linked":
            (folder / "20.text").hardlink_to(folder / "0.text")
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(folder, "data")
    streams = {name: documents(f"{name}.tar") for name in ("plain", "linked")}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=8, streams=streams)

    with monkeypatch.context() as patch:
        patch.setattr(Tar, "version", 3)
        patch.setattr(Tar, "version_without_messages", 2)
        # As if the only link were skipped.
        patch.setattr("mdsmix.sources.tar._is_hidden", lambda name: name == "data/20.text")
        run_recipe(recipe)
    before = {name: read_published(recipe, name) for name in streams}
    (line,) = [line for line in run_ok("check", recipe).out.splitlines() if "rows-outdated" in line]
    assert "the rule format.tar was version 2" in line
    converted = {outcome.stream: outcome.done for outcome in run_recipe(recipe)}
    assert converted == {"plain": 0, "linked": 1}
    records = manifest_of(tmp_path / "out/linked/train").records
    assert (records.read, records.quarantined) == (21, {"not_a_file": 1})
    assert read_published(recipe, "plain")["index.json"] == before["plain"]["index.json"]
    assert "rows-outdated" not in run_ok("check", recipe).out
    assert not any(outcome.done for outcome in run_recipe(recipe))


def streams_in(line: str) -> list[str]:
    """Return the streams that the line of a finding names in brackets."""
    return line.partition("[")[2].partition("]")[0].split(", ")


def test_a_raised_format_converts_only_the_units_of_its_files(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": f"the document of the number {n} is not long"} for n in range(60)]
    write_jsonl(tmp_path / "a.jsonl", records[:30])
    write_rows(tmp_path / "b.parquet", records[30:45])
    write_rows(tmp_path / "c.parquet", records[45:])
    set_window_size(monkeypatch, 400)
    streams = {"mixed": documents("*.*l*", layout="document")}
    source: dict[str, Any] = {"path": ["a.jsonl", "b.parquet", "c.parquet"], "text": "text"}
    streams["mixed"]["source"] = source
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    version = Parquet.version + 1
    jsonl_version = Jsonl.version + 1
    set_format_version(monkeypatch, Parquet, version - 1)
    (first,) = run_recipe(recipe)

    def only_b(self: Parquet, file: SourceFile, fields: tuple[str, ...]) -> int:
        return version if file.name.endswith("b.parquet") else version - 1

    monkeypatch.setattr(Parquet, "version", version)
    monkeypatch.setattr(Parquet, "version_for", only_b)
    (after_b,) = run_recipe(recipe)
    assert 0 < after_b.done < first.units / 2
    assert manifest_of(tmp_path / "out" / "mixed" / "train").formats["format.parquet"] == version
    set_format_version(monkeypatch, Parquet, version + 1)
    (after_parquet,) = run_recipe(recipe)
    assert after_b.done < after_parquet.done < first.units
    set_format_version(monkeypatch, Jsonl, jsonl_version)
    (after_jsonl,) = run_recipe(recipe)
    assert after_jsonl.done == first.units - after_parquet.done


def test_a_published_version_names_the_rules_that_made_it(
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


def test_check_reports_a_stream_of_a_newer_mdsmix(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "version", RAISED_VERSION)
        run_recipe(recipe)
    output = mdsmix("check", recipe).out
    assert f"kind.pretraining was version {RAISED_VERSION}" in output
    assert "a newer mdsmix converted the stream" in output


def test_a_stream_drawn_from_older_ones_is_outdated_too(
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
    run_ok("mix", recipe, "--out", drawn)
    assert "kind.pretraining was version" in mdsmix("check", drawn).out
    run_recipe(recipe)
    run_ok("mix", recipe, "--out", drawn)
    assert "rows-outdated" not in mdsmix("check", drawn).out
