"""LLaMA-Factory's dataset_info.json: every entry becomes a stream, or is told by name. The demo files of that project are rebuilt
here, small, with the same keys."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.kinds import open_recipe
from tests.converting import Answer, manifest_of, mdsmix, quarantined, write_jsonl
from tests.tool_styles import HERMES

TOOLS = json.dumps([{"name": "weather", "description": "how it is", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}])  # fmt: skip
CALL = json.dumps({"name": "weather", "arguments": {"city": "Ulm"}})
IDENTITY = [{"instruction": f"who are you, {n}?", "input": "", "output": "{{name}}, by {{author}}"} for n in range(4)]  # fmt: skip
ALPACA = [{"instruction": "add", "input": f"{n} and 1", "output": f"{n + 1}"} for n in range(4)]
TALK = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
GLAIVE = [
    {
        "conversations": [
            {"from": "human", "value": f"weather {n}?"},
            {"from": "function_call", "value": CALL},
            {"from": "observation", "value": '{"sky": "grey"}'},
            {"from": "gpt", "value": "It is grey."},
        ],
        "tools": TOOLS,
    }
    for n in range(3)
] + [{"conversations": TALK, "tools": "[]"}]
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
OPENAI = [
    {
        "messages": [
            {"role": "user", "content": f"weather {n}?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "grey"},
            {"role": "assistant", "content": "It is grey."},
        ],
        "tools": [FUNCTION],
    }
    for n in range(3)
]  # fmt: skip
RENAMED = [{"talk": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "sys": "s"}]  # fmt: skip
SYSTEMS = [
    {"conversations": [{"from": "system", "value": "Be kind."}, *TALK], "system": "Be curt."}
]
ASKED = [{"tools": TOOLS, "query": "hello", "answer": "hi"}]
ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}  # fmt: skip
INFO: dict[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json", "num_samples": 2},
    "glaive_toolcall_en_demo": {"file_name": "glaive.json", "formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}},
    "openai_tools": {"file_name": "openai.jsonl", "formatting": "openai", "columns": {"messages": "messages", "tools": "tools"}},
    "renamed": {"file_name": "renamed.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk", "system": "sys"}, "tags": ROLES},
    "roles": {"file_name": "roles.jsonl", "formatting": "openai", "columns": {"messages": "talk"}, "tags": ROLES | {"user_tag": "asks"}},
    "systems": {"file_name": "systems.jsonl", "formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system"}},
    "asked": {"file_name": "asked.jsonl", "columns": {"query": "query", "response": "answer"}},
    "tooled": {"file_name": "asked.jsonl", "columns": {"prompt": "query", "response": "answer", "tools": "tools"}},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "wiki_demo": {"file_name": "wiki_demo.txt", "columns": {"prompt": "text"}},
}  # fmt: skip
LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "dpo": ({"file_name": "x.json", "ranking": True}, "ranking: answers that are judged or ranked"),
    "kto": ({"file_name": "x.json", "columns": {"messages": "m", "kto_tag": "label"}}, "kto_tag: answers that are judged or ranked"),
    "mllm": ({"file_name": "x.json", "columns": {"messages": "m", "videos": "videos"}}, "videos: of media images alone are read"),
    "hub": ({"hf_hub_url": "org/name"}, "it lies elsewhere: fetch it, and name it as file_name, or write a stream of hf://datasets/org/name/..."),
    "gone": ({"file_name": "gone.json"}, "gone.json is no file"),
    "odd": ({"file_name": "x.json", "formatting": "csv"}, "formatting is 'csv'"),
    "less": ({"file_name": "c4_demo.jsonl", "columns": {"response": "text"}}, "columns names no prompt"),
    "more": ({"file_name": "c4_demo.jsonl", "columns": {"prompt": "text", "response": "r", "messages": "t"}}, "columns.messages: it is not read"),
    "no": ([], "it is no object"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tooled(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' tokenizer with a chat template that prints tools."""
    folder = tmp_path_factory.mktemp("tooled")
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": HERMES}))
    return folder


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset_info.json, in the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "LF"
    write_jsonl(folder / "openai.jsonl", OPENAI)
    write_jsonl(folder / "renamed.jsonl", RENAMED)
    asks = [{"role": "asks", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_jsonl(folder / "roles.jsonl", [{"talk": asks}])
    write_jsonl(folder / "c4_demo.jsonl", [{"text": f"some words {n}"} for n in range(5)])
    write_jsonl(folder / "systems.jsonl", SYSTEMS)
    write_jsonl(folder / "asked.jsonl", ASKED)
    (folder / "wiki_demo.txt").write_text("".join(f"Title {n}\n\n" for n in range(6)))
    for name, records in (("identity", IDENTITY), ("alpaca_en_demo", ALPACA), ("glaive", GLAIVE)):
        (folder / f"{name}.json").write_text(json.dumps(records, indent=2))
    return folder


def init(
    folder: Path, entries: Any, tokenizer: Path, *names: str, out: str = "recipe.yaml"
) -> Answer:
    """Of a dataset_info.json with these entries."""
    info = folder / "dataset_info.json"
    info.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return mdsmix("init", *names, "--dataset-info", info, "--tokenizer", tokenizer, "-o", out)


def test_one_recipe_converts_all_demo_files_and_nothing_is_quarantined(
    demo: Path, tooled: Path
) -> None:
    answer = init(demo, INFO, tooled)
    assert (answer.code, answer.err) == (0, "not read of asked: tools\n")
    converted = mdsmix("convert", "recipe.yaml", "--workers", "1")
    assert converted.code == 0, converted.err
    written = {}
    for stream in open_recipe("recipe.yaml").sourced:
        folder = Path("mix") / stream.name / "train"
        assert list(quarantined(folder)) == []
        written[stream.name] = manifest_of(folder).records.written
    assert written == {
        "identity": 4,
        "alpaca_en_demo": 4,
        "glaive_toolcall_en_demo": 4,
        "openai_tools": 3,
        "renamed": 1,
        "roles": 1,
        "systems": 1,
        "asked": 1,
        "tooled": 1,
        "c4_demo": 5,
        "wiki_demo": 6,
    }
    text = Path("recipe.yaml").read_text()
    assert "num_samples: 2 is left out: mix.alpaca_en_demo.choose: 2 draws as many" in text
    assert mdsmix("check", "recipe.yaml").code == 0


def test_the_same_files_are_recognised_without_it(demo: Path, tooled: Path) -> None:
    for name in ("renamed", "roles"):  # their lists have names of their own
        (demo / f"{name}.jsonl").unlink()
    answer = mdsmix("init", "LF", "--tokenizer", tooled, "-o", "recipe.yaml")
    assert (answer.code, answer.err) == (0, "not read of asked: tools\n")
    assert mdsmix("convert", "recipe.yaml", "--workers", "1").code == 0
    streams = open_recipe("recipe.yaml").sourced
    assert len(streams) == len(INFO) - 3
    assert all(manifest_of(Path("mix") / s.name / "train").records.bad == 0 for s in streams)


def test_a_stream_that_convert_would_refuse_is_a_comment_with_the_reason(
    demo: Path, tokenizer_folder: Path
) -> None:
    """The template prints no tools: of one file no record can be rendered, of another most cannot."""
    answer = init(demo, INFO, tokenizer_folder)
    text = Path("recipe.yaml").read_text()
    names = ("glaive_toolcall_en_demo", "openai_tools", "tooled")
    for name in names:
        line = next(each for each in answer.err.splitlines() if each.startswith(f"{name} is left"))
        assert "the chat template: it prints no tools" in line
        assert "name a tokenizer whose chat template prints tools" in line
        assert f"  # left out: {line.partition('is left out: ')[2]}\n  # {name}:" in text
    assert not set(names) & open_recipe("recipe.yaml").streams.keys()
    Path("all.yaml").write_text(re.sub(r"(?m)^  # (?!left out)", "  ", text))
    assert set(names) < open_recipe("all.yaml").streams.keys()
    alone = init(demo, INFO, tokenizer_folder, "openai_tools", out="none.yaml")
    assert "next: mend what keeps its streams out" in alone.out
    assert mdsmix("convert", "none.yaml").code == 2


def test_what_no_stream_can_stand_for_is_told_by_name(demo: Path, tokenizer_folder: Path) -> None:
    info = {"c4_demo": INFO["c4_demo"]} | {name: entry for name, (entry, _) in LEFT.items()}
    answer = init(demo, info, tokenizer_folder)
    assert answer.code == 0
    for line, (name, (_, said)) in zip(answer.err.splitlines(), LEFT.items(), strict=True):
        assert line.startswith(f"{name}: ")
        assert said in line
        alone = init(demo, info, tokenizer_folder, name, out="none.yaml")
        nothing = f"nothing that converts was found, so there is no recipe to write. {name}: "
        assert (alone.code, nothing in alone.err) == (2, True)
    assert list(open_recipe("recipe.yaml").streams) == ["c4_demo"]


def test_a_file_or_name_that_is_none_is_a_sentence(demo: Path, tokenizer_folder: Path) -> None:
    for entries, names, said in (
        ("{}", [], "no entries by name are in"),
        ("[", [], "is no JSON"),
        (INFO, ["identty"], "has no entry identty; did you mean identity?"),
    ):
        answer = init(demo, entries, tokenizer_folder, *names)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert said in answer.err
    tokenizer = ("--tokenizer", tokenizer_folder)
    gone = mdsmix("init", "--dataset-info", "gone.json", *tokenizer)
    assert (gone.code, "there is no file" in gone.err) == (2, True)
    itself = mdsmix("init", "LF/dataset_info.json", *tokenizer)
    said = (
        "dataset_info.json is left alone: --dataset-info LF/dataset_info.json makes streams of its"
    )
    assert (itself.code, said in itself.err) == (2, True)


def test_entries_whose_names_are_spelled_alike_in_a_recipe_are_streams_of_their_own(
    demo: Path, tokenizer_folder: Path
) -> None:
    entries = dict.fromkeys(("ein b", "ein_b", "数据", "文本"), INFO["c4_demo"])
    assert init(demo, entries, tokenizer_folder).code == 0
    assert list(open_recipe("recipe.yaml").streams) == ["ein_b", "ein_b-2", "data", "data-2"]
