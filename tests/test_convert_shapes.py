"""The shapes in which people publish conversations, from a file to a stream: small files of our own, with every key that such data has."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.converting import Web, chats, mdsmix
from tests.styles import train_style
from tests.tool_styles import QWEN_2_5

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "function_tag": "tool_call", "observation_tag": "tool_response"}  # fmt: skip
WEATHER = {
    "name": "weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"name": "weather", "arguments": '{"city": "Köln"}'}
RAINS, FUNCTION = '{"rain": true}', {"type": "function", "function": WEATHER}
OPENAI: dict[str, Any] = {
    "messages": [
        {"role": "developer", "content": "You help."},
        {"role": "user", "content": [{"type": "text", "text": "Rain in Köln?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}], "weight": 1},
        {"role": "tool", "tool_call_id": "call_1", "content": RAINS},
        {"role": "assistant", "content": "Yes.", "weight": 1},
    ],
    "tools": [FUNCTION],
}  # fmt: skip
SAID = {"system": "You help.", "user": "Rain in Köln?", "tool_call": json.dumps(CALL), "tool_response": RAINS, "assistant": "Yes."}  # fmt: skip
GLAIVE = dict(zip(("human", "function_call", "observation", "gpt"), [*SAID.values()][1:], strict=True))  # fmt: skip
ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Red."}
ROUNDS = [{"human": "Hi", "assistant": "Hello."}, {"human": "Bye", "assistant": "Bye."}]
DEMOS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "alpaca": (
        {"shape": "alpaca"},
        [ALPACA, {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "You count.", "history": [["Hi", "Hello."]]}],
    ),
    "identity": (
        {key: key for key in ALPACA},
        [{"instruction": "Who are you?", "input": "", "output": "I am {{name}}, made by {{author}}."}],
    ),
    "glaive": (
        {"shape": "sharegpt"},
        [
            {
                "conversations": [{"from": role, "value": text} for role, text in GLAIVE.items()],
                "system": "You help.",
                "tools": json.dumps([WEATHER]),
            },
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "tools": "[]"},
        ],
    ),
    "renamed": (
        {"conversations": "messages", "tools": "tools", "tags": TAGS},
        [{"messages": [{"role": role, "content": text} for role, text in SAID.items()], "tools": json.dumps([FUNCTION])}],
    ),
    "openai": ({"shape": "openai"}, [OPENAI]),
    "rounds": ({"shape": "rounds"}, [{"system": "You help.", "conversation": ROUNDS}]),
}  # fmt: skip
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_style(tmp_path_factory.mktemp("tools"), "plain", QWEN_2_5)


@pytest.fixture
def web(web: Web, tools: Path) -> Web:
    web.tokenizer = tools
    return web


def says(at: Web, **sources: dict[str, Any]) -> Web:
    streams = {name: {"kind": "finetuning", "source": source} for name, source in sources.items()}
    policies = {"max_seq_len": 1024, "target_responses": "all", "special_tokens_in_text": "allow"}
    return at.says(streams=streams, **policies)


def shown(web: Web, name: str) -> str:
    return mdsmix("inspect", web.out / name).out


def samples(shown: str) -> list[str]:
    """The samples below the card."""
    return re.split(r"\nsample \d+ ─+\n", shown)[1:]


def test_one_recipe_converts_them_all(web: Web) -> None:
    """The same exchange gives the same tokens in every shape."""
    sources = {name: {"path": f"{name}.jsonl"} | settings for name, (settings, _) in DEMOS.items()}
    for name, (_, records) in DEMOS.items():
        web.holds(records, f"{name}.jsonl")
    answer = says(web, **sources).convert("max_bad=0.0")
    assert answer.code == mdsmix("check", web.recipe).code == 0, answer.err
    assert "WARNING" not in answer.out
    assert "not read" not in answer.out
    texts = {name: shown(web, name) for name in DEMOS}
    firsts = []
    for name in ("glaive", "renamed", "openai"):
        row = samples(texts[name])[0]
        assert CALLED in row.replace("⟦", "").replace("⟧", "")
        assert '"name": "weather", "description": "Tells the weather"' in row  # the tools
        assert row.count("⟦") == 2  # the call and the answer are trained
        rows = json.loads(mdsmix("inspect", web.out / name, "--json").out)["shown"]
        firsts.append(rows[0]["sample"])
    assert firsts[0] == firsts[1] == firsts[2]
    assert "I am {{name}}, made by {{author}}." in texts["identity"]
    assert "Add.\n1, 2" in texts["alpaca"]
    assert texts["rounds"].count("⟦") == 2
    assert "messages: messages, tools: tools" in texts["openai"]
    assert (
        "conversations: messages, tools: tools\n  shape_options           tags: "
        in texts["renamed"]
    )
    mixed = web.folder / "mixed"
    assert mdsmix("mix", web.recipe, "--out", mixed, "--seed", "1").code == 0
    assert mdsmix("inspect", mixed).code == mdsmix("verify", mixed).code == 0


def test_what_is_not_to_be_trained_is_not_marked(web: Web) -> None:
    def said(*weights: int) -> dict[str, Any]:
        roles = [(n, role) for n in range(len(weights)) for role in ("user", "assistant")]
        messages = [{"role": role, "content": f"{role} {n}"} for n, role in roles]
        for message, weight in zip(messages[1::2], weights, strict=True):
            message["weight"] = weight
        return {"messages": messages}

    web.holds([said(0, 1, 0, 1), said(0, 0, 0, 0), said(1, 0)])
    source = {"path": "a.jsonl", "messages": "messages", "shape": "openai"}
    assert says(web, web=source).convert().code == 0
    assert web.manifest.records.filtered == {"nothing_trained": 1}
    rows = [row.split("⟦")[1:] for row in samples(shown(web, "web"))]
    trained = [[part.split("⟨")[0].split("⟧")[0] for part in parts] for parts in rows]
    assert trained == [["assistant 1", "assistant 3"], ["assistant 0"]]
    # Where prompts are trained, so would be an answer in one; the last ends before its own.
    assert web.convert("target_prompts=all", "--reencode").code == 0
    assert web.manifest.records.written == 1
    assert {bad["reason"] for bad in web.bad} == {"untrained_in_prompt"}


def test_nulls_of_arrow_are_told_and_taken_out_where_that_is_asked_for(web: Web) -> None:
    """A parquet file fills what one object lacks and another has; its tools and calls are rendered with that."""
    asked, calling, *rest = OPENAI["messages"][1:]
    rows = []
    for arguments in ({"city": "Köln"}, {"n": 3}):
        call = calling["tool_calls"][0] | {"function": {**CALL, "arguments": arguments}}
        messages = [asked | {"content": "Rain?"}, calling | {"tool_calls": [call]}, *rest]
        rows.append({"messages": messages, "tools": OPENAI["tools"]})
    parquet.write_table(pa.Table.from_pylist(rows), web.folder / "a.parquet")
    for nulls, printed in (("keep", '{"city": "Köln", "n": null}'), ("drop", '{"city": "Köln"}')):
        says(web, web={"path": "a.parquet", "shape": "openai", "nulls": nulls})
        answer = web.convert("--reencode")
        assert answer.code == 0, answer.err
        assert ("2 records have null entries inside messages" in answer.out) == (nulls == "keep")
        assert printed in shown(web, "web")
        assert ("null" in shown(web, "web").split("─")[-1]) == (nulls == "keep")


def talk(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": role[0]} for role in roles]}


def test_of_records_of_another_shape_it_is_said_what_to_do(web: Web) -> None:
    for record, said in (
        (OPENAI, "shape: openai that of a developer"),
        (ALPACA, 'The first missing_field, of a.jsonl: missing: messages in {"instruction":'),
        (talk("user", "user", "assistant"), "consecutive_roles: merge joins messages of one role"),
        ({"messages": ROUNDS}, "mdsmix init SOURCE says which shape and settings"),
        (talk("user", "bot"), "shape: sharegpt takes any role, named in its tags"),
    ):
        web.holds([record])
        answer = web.says(chats("a.jsonl")).convert()
        assert (answer.code, said in answer.err) == (5, True), answer.err
