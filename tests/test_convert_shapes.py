"""The shapes in which people publish conversations, from a file to a stream: small files of our own, with every key that such data has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.converting import chats, manifest_of, mdsmix, quarantined, write_jsonl, write_recipe
from tests.styles import train_style
from tests.tool_styles import QWEN_2_5

WEATHER = {
    "name": "weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"name": "weather", "arguments": '{"city": "Köln"}'}
DEMOS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "alpaca": (
        {"shape": "alpaca"},
        [
            {"instruction": "Name a colour.", "input": "", "output": "Red."},
            {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "You count.", "history": [["Hi", "Hello."]]},
        ],
    ),
    "identity": (
        {"instruction": "instruction", "input": "input", "output": "output"},
        [{"instruction": "Who are you?", "input": "", "output": "I am {{name}}, made by {{author}}."}],
    ),
    "glaive": (
        {"shape": "sharegpt"},
        [
            {
                "conversations": [
                    {"from": "human", "value": "Rain in Köln?"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": '{"rain": true}'},
                    {"from": "gpt", "value": "Yes."},
                ],
                "system": "You help.",
                "tools": json.dumps([WEATHER]),
            },
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "tools": "[]"},
        ],
    ),
    "renamed": (
        {"conversations": "messages", "tools": "tools", "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "function_tag": "tool_call", "observation_tag": "tool_response"}},
        [
            {
                "messages": [
                    {"role": "system", "content": "You help."},
                    {"role": "user", "content": "Rain in Köln?"},
                    {"role": "tool_call", "content": json.dumps(CALL)},
                    {"role": "tool_response", "content": '{"rain": true}'},
                    {"role": "assistant", "content": "Yes.", "loss": True},
                ],
                "tools": json.dumps([{"type": "function", "function": WEATHER}]),
            }
        ],
    ),
    "openai": (
        {"shape": "openai"},
        [
            {
                "messages": [
                    {"role": "developer", "content": "You help."},
                    {"role": "user", "content": [{"type": "text", "text": "Rain in Köln?"}]},
                    {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}], "weight": 1},
                    {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
                    {"role": "assistant", "content": "Yes.", "weight": 1},
                ],
                "tools": [{"type": "function", "function": WEATHER}],
            }
        ],
    ),
    "rounds": (
        {"shape": "rounds"},
        [{"system": "You help.", "conversation": [{"human": "Hi", "assistant": "Hello."}, {"human": "Bye", "assistant": "Bye."}]}],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_style(tmp_path_factory.mktemp("tools"), "plain", QWEN_2_5)


def converted(folder: Path, tokenizer: Path, *names: str, **more: Any) -> Path:
    streams = {}
    for name in names:
        settings, records = DEMOS[name]
        path = write_jsonl(folder / f"{name}.jsonl", records)
        streams[name] = {"kind": "finetuning", "source": {"path": str(path), **settings}}
    policies = {"max_seq_len": 1024, "target_responses": "all", "special_tokens_in_text": "allow"}
    recipe = write_recipe(folder, tokenizer, **policies | {"streams": streams, "max_bad": 0.0} | more)  # fmt: skip
    answer = mdsmix("convert", recipe)
    assert answer.code == 0, answer.err
    assert "WARNING" not in answer.out
    assert "not read" not in answer.out
    return recipe


def shown(folder: Path, name: str) -> str:
    return mdsmix("inspect", folder / "out" / name).out


def test_one_recipe_converts_them_all(tmp_path: Path, tokenizer: Path) -> None:
    recipe = converted(tmp_path, tokenizer, *DEMOS)
    assert mdsmix("check", recipe).code == 0
    texts = {name: shown(tmp_path, name) for name in DEMOS}
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    rows = [texts[name].split(" ─")[1].split("\n", 1)[1] for name in ("glaive", "renamed", "openai")]  # fmt: skip
    for row in rows:
        assert called in row.replace("⟦", "").replace("⟧", "")
        assert '"name": "weather", "description": "Tells the weather"' in row  # the tools
        assert row.count("⟦") == 2  # the call and the answer are trained
    assert "I am {{name}}, made by {{author}}." in texts["identity"]
    assert "Add.\n1, 2" in texts["alpaca"]
    assert texts["rounds"].count("⟦") == 2
    assert "openai, messages, tools" in texts["openai"]
    assert "sharegpt, conversations: messages, tools, tags" in " ".join(texts["renamed"].split())
    mixed = tmp_path / "mixed"
    assert mdsmix("mix", recipe, "--out", mixed, "--seed", "1").code == 0
    for command in ("inspect", "verify"):
        assert mdsmix(command, mixed).code == 0


def test_the_same_exchange_gives_the_same_tokens_in_every_shape(
    tmp_path: Path, tokenizer: Path
) -> None:
    converted(tmp_path, tokenizer, "glaive", "renamed", "openai")
    first = {name: json.loads(mdsmix("inspect", tmp_path / "out" / name, "--json").out)["shown"][0]["sample"] for name in ("glaive", "renamed", "openai")}  # fmt: skip
    assert first["glaive"] == first["renamed"] == first["openai"]


def test_what_is_not_to_be_trained_is_not_marked(tmp_path: Path, tokenizer: Path) -> None:
    said = [
        {"role": role, "content": f"{role} {n}", **({"weight": n % 2} if role != "user" else {})}
        for n in range(4)
        for role in ("user", "assistant")
    ]
    none = [message | ({"weight": 0} if message["role"] != "user" else {}) for message in said]
    early = [m if "weight" not in m else m | {"weight": 1 - m["weight"]} for m in said[:4]]
    records = [{"messages": messages} for messages in (said, none, early)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    source = {"path": str(path), "messages": "messages", "shape": "openai"}
    policies = {"max_seq_len": 512, "special_tokens_in_text": "allow", "target_responses": "all"}
    recipe = write_recipe(tmp_path, tokenizer, streams={"a": {"kind": "finetuning", "source": source}}, **policies)  # fmt: skip
    assert mdsmix("convert", recipe).code == 0
    assert manifest_of(tmp_path / "out/a/train").records.filtered == {"nothing_trained": 1}
    rows = [row.split("⟦")[1:] for row in shown(tmp_path, "a").split(" ─")[1:]]
    trained = [[part.split("⟨")[0].split("⟧")[0] for part in parts] for parts in rows]
    assert trained == [["assistant 1", "assistant 3"], ["assistant 0"]]
    # Where prompts are trained, so would be an answer in one; `early` ends before its own.
    assert mdsmix("convert", recipe, "target_prompts=all", "--reencode").code == 0
    assert manifest_of(tmp_path / "out/a/train").records.written == 1
    reasons = {bad["reason"] for bad in quarantined(tmp_path / "out/a/train")}
    assert reasons == {"untrained_in_prompt"}


def test_nulls_of_arrow_are_told_and_taken_out_where_that_is_asked_for(
    tmp_path: Path, tokenizer: Path
) -> None:
    """A parquet file fills what one object lacks and another has; its tools and calls are rendered with that."""
    import pyarrow as pa
    from pyarrow import parquet

    settings, [record] = DEMOS["openai"]
    asked, _, *rest = record["messages"][1:]
    rows = []
    for arguments in ({"city": "Köln"}, {"n": 3}):
        call = {"id": "call_1", "type": "function", "function": {**CALL, "arguments": arguments}}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [asked | {"content": "Rain?"}, calling, *rest]
        rows.append({"messages": messages, "tools": record["tools"]})
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    texts = {}
    for nulls in ("keep", "drop"):
        source = {"path": str(tmp_path / "a.parquet"), **settings, "nulls": nulls}
        recipe = write_recipe(tmp_path, tokenizer, max_seq_len=1024, special_tokens_in_text="allow", streams={"a": {"kind": "finetuning", "source": source}})  # fmt: skip
        answer = mdsmix("convert", recipe, "--reencode")
        assert answer.code == 0, answer.err
        assert ("2 records have null entries inside messages" in answer.out) == (nulls == "keep")
        texts[nulls] = shown(tmp_path, "a")
    assert '{"city": "Köln", "n": null}' in texts["keep"]
    assert '{"city": "Köln"}' in texts["drop"]
    assert "null" not in texts["drop"].split("─")[-1]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (DEMOS["openai"][1], "shape: openai that of a developer"),
        (DEMOS["alpaca"][1], "a bad record of a.jsonl has the fields instruction, "),
        ([{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}], "consecutive_roles: merge joins messages of one role"),
        ([{"messages": DEMOS["rounds"][1][0]["conversation"]}], "mdsmix init SOURCE says which shape and settings"),
        ([{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}], "shape: sharegpt takes any role, named in its tags"),
    ],
)  # fmt: skip
def test_of_records_of_another_shape_it_is_said_what_to_do(
    records: list[Any], said: str, tmp_path: Path, tokenizer: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", records)
    answer = mdsmix("convert", write_recipe(tmp_path, tokenizer, streams={"a": chats(path)}))
    assert answer.code == 5
    assert said in answer.err
