"""LLaMA-Factory's dataset_info.json: every entry becomes a stream, or is told by name. The demo files of that project are rebuilt
here, small, with the same keys."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import RecipeError
from mdsmix.init.other_tools import read_dataset_info
from mdsmix.kinds import open_recipe
from tests.converting import manifest_of, mdsmix, quarantined, write_jsonl
from tests.tool_styles import HERMES

TOOLS = json.dumps([{"name": "weather", "description": "how it is", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}])  # fmt: skip
CALL = {"name": "weather", "arguments": json.dumps({"city": "Ulm"})}
TALK = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
CALLED = [TALK[0], {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "{}"}, TALK[1]]  # fmt: skip
OPENAI = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "c1", "content": "grey"},
    {"role": "assistant", "content": "It is grey."},
]  # fmt: skip
FILES: dict[str, list[dict[str, Any]]] = {
    "alpaca.json": [{"instruction": "add", "input": f"{n} and 1", "output": f"{n + 1}"} for n in range(4)],
    "glaive.json": [{"conversations": CALLED, "tools": TOOLS}] * 3 + [{"conversations": TALK, "tools": "[]"}],
    "openai.jsonl": [{"messages": OPENAI, "tools": [{"type": "function", "function": json.loads(TOOLS)[0]}]}] * 3,
    "renamed.jsonl": [{"talk": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "sys": "s"}],
    "roles.jsonl": [{"talk": [{"role": "asks", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    "asked.jsonl": [{"tools": TOOLS, "query": "hello", "answer": "hi"}],
    "c4.jsonl": [{"text": f"some words {n}"} for n in range(5)],
}  # fmt: skip
ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}  # fmt: skip
INFO: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "alpaca": ({"file_name": "alpaca.json", "num_samples": 2}, {"instruction": "instruction", "input": "input", "output": "output"}, 4),
    "glaive": ({"file_name": "glaive.json", "formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}}, {"conversations": "conversations", "tools": "tools"}, 4),
    "openai": ({"file_name": "openai.jsonl", "formatting": "openai", "columns": {"messages": "messages", "tools": "tools"}}, {"messages": "messages", "tools": "tools"}, 3),
    "renamed": ({"file_name": "renamed.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk", "system": "sys"}, "tags": ROLES}, {"conversations": "talk", "system": "sys", "tags": ROLES}, 1),
    "roles": ({"file_name": "roles.jsonl", "formatting": "openai", "columns": {"messages": "talk"}, "tags": ROLES | {"user_tag": "asks"}}, {"conversations": "talk", "tags": ROLES | {"user_tag": "asks"}}, 1),
    "asked": ({"file_name": "asked.jsonl", "columns": {"query": "query", "response": "answer"}}, {"instruction": "query", "output": "answer"}, 1),
    "tooled": ({"file_name": "asked.jsonl", "columns": {"prompt": "query", "response": "answer", "tools": "tools"}}, {"instruction": "query", "output": "answer", "tools": "tools"}, 1),
    "c4": ({"file_name": "c4.jsonl", "columns": {"prompt": "text"}}, {"text": "text"}, 5),
    "wiki": ({"file_name": "wiki.txt", "columns": {"prompt": "text"}}, {"split_by": "line", "text": "text"}, 6),
}  # fmt: skip
"Entry -> what it says, the source that its stream gets, and its records."
LEFT: dict[str, tuple[Any, str]] = {
    "dpo": ({"file_name": "x.json", "ranking": True}, "ranking: answers that are judged or ranked"),
    "kto": ({"file_name": "x.json", "columns": {"messages": "m", "kto_tag": "label"}}, "kto_tag: answers that are judged or ranked"),
    "mllm": ({"file_name": "x.json", "columns": {"messages": "m", "videos": "videos"}}, "videos: of media images alone are read"),
    "hub": ({"hf_hub_url": "org/name"}, "it lies elsewhere: fetch it, and name it as file_name, or write a stream of hf://datasets/org/name/..."),
    "gone": ({"file_name": "gone.json"}, "gone.json is no file"),
    "odd": ({"file_name": "x.json", "formatting": "csv"}, "formatting is 'csv'"),
    "less": ({"file_name": "c4.jsonl", "columns": {"response": "text"}}, "columns names no prompt"),
    "more": ({"file_name": "c4.jsonl", "columns": {"prompt": "text", "response": "r", "messages": "t"}}, "columns.messages: it is not read"),
    "no": ([], "it is no object"),
}  # fmt: skip
REFUSED: list[tuple[str, list[str], str]] = [
    ("{}", [], "no entries by name are in"),
    ("[", [], "is no JSON"),
    ('{"identity": {}}', ["identty"], "has no entry identty; did you mean identity?"),
]


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset_info.json of all entries, in a folder of the current one."""
    monkeypatch.chdir(tmp_path)
    for name, records in FILES.items():
        path = write_jsonl(tmp_path / "LF" / name, records)
        if name.endswith(".json"):
            path.write_text(json.dumps(records, indent=2))
    (tmp_path / "LF/wiki.txt").write_text("".join(f"Title {n}\n\n" for n in range(6)))
    path = tmp_path / "LF/dataset_info.json"
    path.write_text(json.dumps({name: entry for name, (entry, *_) in (INFO | LEFT).items()}))  # type: ignore[operator]
    return path


def test_an_entry_is_a_stream_or_is_told_by_name(info: Path) -> None:
    said: list[Any] = []
    drafts = {d.name: d for d in read_dataset_info(str(info), [], info.parent.parent, said)}
    for name, (entry, source, _) in INFO.items():
        file = {"path": [f"LF/{entry['file_name']}"]}
        assert drafts.pop(name).source == file | source, name
    assert not drafts
    for line, (name, (_, words)) in zip(map(str, said), LEFT.items(), strict=True):
        assert line.startswith(f"{name}: ")
        assert words in line
    for content, names, words in REFUSED:
        info.write_text(content)
        with pytest.raises(RecipeError, match=re.escape(words)):
            read_dataset_info(str(info), names, info.parent, said)
    with pytest.raises(RecipeError, match="there is no file"):
        read_dataset_info("gone.json", [], info.parent, said)


def test_one_recipe_converts_all_files_and_nothing_is_quarantined(
    info: Path, tokenizer_folder: Path
) -> None:
    """By a tokenizer whose template prints tools; by one that prints none these streams are comments with the reason."""
    command = ("init", *INFO, "--dataset-info", info, "--tokenizer")
    tooled = shutil.copytree(tokenizer_folder, Path("tooled"))
    config = json.loads((tooled / "tokenizer_config.json").read_text())
    (tooled / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": HERMES}))
    answer = mdsmix(*command, tooled, "-o", "recipe.yaml")
    assert (answer.code, answer.err) == (0, "not read of asked: tools\n")
    text = Path("recipe.yaml").read_text()
    assert "num_samples: 2 is left out: mix.alpaca.choose: 2 draws as many" in text
    converted = mdsmix("convert", "recipe.yaml", "--workers", "1")
    assert converted.code == 0, converted.err
    for name, (*_, count) in INFO.items():
        folder = Path("mix") / name / "train"
        assert (manifest_of(folder).records.written, quarantined(folder)) == (count, [])
    answer = mdsmix(*command, tokenizer_folder, "-o", "toolless.yaml")
    text, names = Path("toolless.yaml").read_text(), {"glaive", "openai", "tooled"}
    for name in names:
        line = next(each for each in answer.err.splitlines() if each.startswith(f"{name} is left"))
        assert "the chat template: it prints no tools" in line
        assert "name a tokenizer whose chat template prints tools" in line
        assert f"  # left out: {line.partition('is left out: ')[2]}\n  # {name}:" in text
    assert open_recipe("toolless.yaml").streams.keys() == INFO.keys() - names
    nothing = mdsmix("init", "dpo", *command[-3:], tokenizer_folder)
    assert (nothing.code, "so there is no recipe to write. dpo: " in nothing.err) == (2, True)
