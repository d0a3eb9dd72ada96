"""What is wrong with a record has its reason, in every shape; records that are read together come
out as they do one by one.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from mdsmix.record import RichConversation
from mdsmix.shapes import SHAPES
from mdsmix.shapes.messages import MESSAGES, OPENAI


def say(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]


ASKED, ANSWERED = say("user", "assistant")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}
GOOD = {"instruction": "Add", "input": "1, 2", "output": "3"}


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def item(role: Any, value: Any) -> dict[str, Any]:
    return {"from": role, "value": value}


A, B = item("human", "a"), item("gpt", "b")
CALLED = [
    *(A, item("function_call", json.dumps({"name": "f", "arguments": {}}))),
    *(item("observation", "x"), B),
]
PARTS: list[Any] = [
    *([{"type": "image_url", "image_url": "x"}], [{"type": "text", "text": "a", "weight": 0}]),
    *([{"type": "text", "text": 3}], [{"type": ["text"], "text": "a"}], None),
]
FLAGS = (
    {"weight": 0.5},
    {"weight": "1"},
    {"weight": 1, "train": False},
    {"train_detail": [{"begin_offset": 0}]},
)
OF_MESSAGES: dict[str, list[list[Any]]] = {
    "bad_weight": [[ASKED, ANSWERED | flags] for flags in FLAGS],
    "trained_prompt": [[ASKED | {"weight": 1}, ANSWERED]],
    "arguments_not_json": [[ASKED, call(text)] for text in ("{", "[1]", '"{}"')],
    "bad_tool_call": [[ASKED, call("{}", tool_calls=calls)] for calls in ([{"id": "c1"}], "f()")],
    "bad_message_keys": [
        *([ASKED, call("{}", role="user"), ANSWERED], [ASKED, {"content": "x"}]),
        [ASKED, call() | {"function_call": {"name": "f", "arguments": "{}"}}],
    ],
    "unknown_tool_call": [
        [ASKED, RESULT, ANSWERED],
        *([ASKED, call(), RESULT | {"tool_call_id": at}, ANSWERED] for at in ("c2", ["c1"])),
    ],
    "content_not_text": [
        [ASKED, ANSWERED | {"content": None}],
        *([ASKED | {"content": said}, ANSWERED] for said in PARTS),
    ],
    "empty_answer": [[ASKED, ANSWERED | {"content": ""}]],
    "unknown_role": [[ASKED | {"role": role}, ANSWERED] for role in ("human", {})],
    "repeated_role": [[ASKED, ASKED, ANSWERED]],
    "lone_surrogate": [
        [ASKED, call('{"a": "\\ud800"}'), RESULT, ANSWERED | {"content": "\ud800"}],
        *([ASKED, call(arguments)] for arguments in ({"a": "\ud800"}, {"\ud800": "a"})),
    ],
    "last_not_assistant": [[ASKED, call(), RESULT]],
}
"Reason -> messages in OpenAI's form."
OF_RECORDS: dict[str, dict[str, list[Any]]] = {
    "openai": {
        "bad_tools": [
            {"messages": [ASKED, ANSWERED], "tools": tools}
            for tools in ("{", '{"name": "f"}', {"name": "f"}, ["f"], [{"type": "function"}], 3)
        ],
        "missing_tools": [{"messages": [ASKED, call()], "tools": None}],
        "lone_surrogate": [
            {
                "messages": [ASKED, ANSWERED],
                "tools": [{"type": "function", "function": {"name": "\ud800"}}],
            }
        ],
    },
    "messages": {
        "no_messages": [{"messages": []}],
        "too_few_messages": [{"messages": say("assistant")}],
        "repeated_role": [
            {"messages": say(*roles)}
            for roles in (
                ("user", "tool", "tool", "assistant"),
                ("user", "assistant", "assistant"),
                ("user", "user", "assistant"),
            )
        ],
        "bad_message_keys": [
            {"messages": [message | {"tool_calls": None} for message in (ASKED, ANSWERED)]},
            *(
                {"messages": [asked, ANSWERED]}
                for asked in (
                    "hi",
                    {"role": "user"},
                    {"role": "user", "text": "a"},
                    ASKED | {"name": "b"},
                )
            ),
        ],
        "unknown_role": [
            {"messages": say("human", "assistant")},
            {"messages": [ASKED | {"role": ["user"]}, ANSWERED]},
        ],
        "content_not_text": [
            {"messages": [ASKED | {"content": said}, ANSWERED]}
            for said in (None, [{"type": "text", "text": "a"}])
        ],
        "last_not_assistant": [{"messages": say("user", "assistant", "user")}],
        "starts_with_assistant": [{"messages": say("assistant", "user", "assistant")}],
    },
    "sharegpt": {
        "bad_message_keys": [{"conversations": ["a"]}, {"conversations": [{"from": "human"}]}],
        "unknown_role": [
            {"conversations": [item("bot", "a")]},
            {"conversations": [item(["human"], "a")]},
        ],
        "content_not_text": [{"conversations": [item("human", ["a"])]}],
        "missing_tools": [{"conversations": CALLED}],
        "bad_tools": [
            {"conversations": CALLED, "tools": "none"},
            {"conversations": CALLED, "tools": [{"description": "x"}]},
        ],
        "bad_tool_call": [
            {"conversations": [A, item("function_call", said)]}
            for said in ("run", '{"name": "f", "arguments": {"n": NaN}}')
        ],
        "arguments_not_json": [
            {"conversations": [A, item("function_call", said)]}
            for said in ('{"name": "f", "arguments": "x"}', '{"name": "f"}')
        ],
        "field_not_text": [{"conversations": [A, B], "system": 3}],
    },
    "prompt_response": {
        "missing_field": [{"prompt": "a"}],
        "field_not_text": [{"prompt": None, "response": "b"}, {"prompt": "a", "response": 3}],
        "lone_surrogate": [
            {"prompt": "a\ud800", "response": "b"},
            {"prompt": "a", "response": "\ud800"},
        ],
        "not_an_object": ["text", None],
    },
    "rounds": {
        "bad_message_keys": [{"conversation": [{"human": "a"}]}],
        "content_not_text": [{"conversation": [{"human": "a", "assistant": 1}]}],
        "empty_answer": [{"conversation": [{"human": "a", "assistant": ""}]}],
        "no_messages": [{"conversation": []}],
        "messages_not_a_list": [{"conversation": None}],
    },
    "alpaca": {
        "missing_field": [{"instruction": "a"}],
        "json_array": [[GOOD]],
        "field_not_text": [
            GOOD | {"output": None},
            GOOD | {"instruction": 3},
            GOOD | {"input": ["x"]},
        ],
        "bad_history": [GOOD | {"history": past} for past in ("before", [["q"]], [["q", None]])],
        "lone_surrogate": [
            GOOD | {"system": "\ud800"},
            GOOD | {"history": [["q", "\ud800"]]},
            GOOD | {"tools": '[{"name": "\\ud800"}]'},
        ],
        "bad_tools": [GOOD | {"tools": "no list"}],
    },
}


def test_what_is_wrong_has_its_reason() -> None:
    of_messages = {
        code: [{"messages": said, "tools": TOOLS} for said in given]
        for code, given in OF_MESSAGES.items()
    }
    for name, reasons in [("openai", of_messages), *OF_RECORDS.items()]:
        shape = SHAPES[name]
        fields = {key: key for key in (*shape.fields, *shape.optional)}
        for reason, records in reasons.items():
            for record in records:
                assert shape.read(record, fields) == reason, (name, record)
    # A system prompt may tell of tools, where no field is named.
    alone = OPENAI.read({"messages": [ASKED, call()]}, {"messages": "messages"})
    assert isinstance(alone, RichConversation)


def test_what_is_nested_too_deep_to_be_followed_has_its_reason() -> None:
    fields = {"messages": "messages", "tools": "tools"}
    for levels in (150, 250, 990, 5000):
        text, nested = '{"a":' * levels + "1" + "}" * levels, 1
        for _ in range(levels):
            nested = {"a": nested}  # type: ignore[assignment]
        tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
        tools = f'[{{"name": "f", "parameters": {text}}}]'
        records = [
            {"messages": [ASKED, ANSWERED], "tools": [tool]},
            {"messages": [ASKED, ANSWERED], "tools": tools},
            {"messages": [ASKED, ANSWERED | {"more": nested}]},
            {"messages": [ASKED, call(text), RESULT, ANSWERED], "tools": TOOLS},
        ]
        found = [OPENAI.read(record, fields) for record in records]
        strict = {"messages": [ASKED, nested]}
        found.append(MESSAGES.read(strict, {"messages": "messages"}, nulls="drop"))
        deep = [each == "too_deep" for each in found]
        assert all(deep) if levels > 200 else not any(deep)


def turn(answer: Any = "b", role: Any = "assistant", **more: Any) -> list[Any]:
    return [{"role": "user", "content": "a"}, {"role": role, "content": answer, **more}]


ODD_MESSAGES = [
    *(
        None,
        7,
        "ab",
        [],
        {},
        turn()[:1],
        turn()[1:],
        [*turn(), "ab"],
        [*turn(), ["role", "content"]],
    ),
    *(turn(role=role) for role in ("user", "bot", None, ["user"], True)),
    *(turn(answer) for answer in (None, 7, ["b"], "\ud800")),
    *(turn(weight=1), turn() + turn(role="user"), [*turn(), *turn()[:1]], turn()[::-1]),
    [{"role": "user", "text": "a"}, turn()[1]],
]


GOOD_MESSAGES = [turn(), turn() * 3, [{"role": "system", "content": "é"}, *turn()]]
TEXTS, NO_TEXTS = ("", "a", "é 数"), ("\ud800", None, 7, ["a"], {"a": 1})
GOOD_PAIRS = [{"my p": prompt, "my r": response} for prompt, response in product(TEXTS, repeat=2)]
ALIKE: list[tuple[str, dict[str, str], list[Any], list[Any]]] = [
    # shape, its fields, records, and what is none of its records
    (
        "text",
        {"text": "my p"},
        [{"my p": text} for text in TEXTS],
        [{"my p": text} for text in NO_TEXTS],
    ),
    (
        "prompt_response",
        {"prompt": "my p", "response": "my r"},
        GOOD_PAIRS,
        [GOOD_PAIRS[1] | {key: text} for key in ("my p", "my r") for text in NO_TEXTS],
    ),
    (
        "messages",
        {"messages": "said"},
        [{"said": each} for each in GOOD_MESSAGES],
        [{"said": each} for each in ODD_MESSAGES],
    ),
]


def test_records_are_read_as_one_by_one() -> None:
    for name, fields, good, odd in ALIKE:
        shape = SHAPES[name]
        found = shape.read_plain(good, fields)
        assert found == [shape.read(record, fields) for record in good]
        assert [*map(type, found or ())] == [shape.gives] * len(good)
        for each in (None, 7, "my p", ["my p"], good[:1], {}, *odd):
            assert isinstance(shape.read(each, fields), str), each
            assert shape.read_plain([good[0], each, good[1]], fields) is None, each
