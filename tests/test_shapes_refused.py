"""Each fault of a record has its reason code, in every shape, and records that are read all at once
give the same results as one by one.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from itertools import product
from typing import Any

import pytest

from mdsmix.kinds.membership import fingerprints
from mdsmix.record import Conversation, RichConversation
from mdsmix.shapes import SHAPES
from mdsmix.shapes.messages import MESSAGES, OPENAI


def numbered_messages(*roles: str) -> list[dict[str, Any]]:
    """Return a message for each role, such as {"role": "user", "content": "user 0"}."""
    return [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]


QUESTION, ANSWER = numbered_messages("user", "assistant")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}
GOOD = {"instruction": "Add", "input": "1, 2", "output": "3"}


def calling_message(arguments: Any = "{}", **keys: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls} | keys


def span_entry(begin: Any, end: Any, train: Any = True) -> dict[str, Any]:
    """Return an entry of axolotl's `train_detail`; `end` is the last character."""
    return {"begin_offset": begin, "end_offset": end, "train": train}


def sharegpt_item(role: Any, value: Any) -> dict[str, Any]:
    return {"from": role, "value": value}


QUESTION_ITEM = sharegpt_item("human", "a")
ANSWER_ITEM = sharegpt_item("gpt", "b")
CALLED = [
    *(QUESTION_ITEM, sharegpt_item("function_call", json.dumps({"name": "f", "arguments": {}}))),
    *(sharegpt_item("observation", "x"), ANSWER_ITEM),
]
PARTS: list[Any] = [
    *([{"type": "image_url", "image_url": "x"}], [{"type": "text", "text": "a", "color": 0}]),
    *([{"type": "text", "text": 3}], [{"type": ["text"], "text": "a"}], None),
]
FLAGS = (
    {"weight": 0.5},
    {"weight": "1"},
    {"weight": 1, "train": False},
    {"loss": True, "loss_scale": 0.5},
    {"content": [{"type": "text", "text": "a", "weight": 0.5}]},
    {"train_detail": [span_entry(0, 4, train="yes")]},
    {"content": [{"type": "text", "text": "a", "weight": 1, "train": False}]},
)
SPANS = (
    3,
    ["0-4"],
    [{"begin_offset": 0}],
    [span_entry(0, 4) | {"color": 1}],
    [span_entry("0", 4)],
    [span_entry(True, 4)],
    [span_entry(0, 1.5)],
    [span_entry(0, float("inf"))],
    [span_entry(-1, 4)],
    [span_entry(4, 3)],
    [span_entry(0, len(ANSWER["content"]))],
    [span_entry(0, 4, train=None)],
    [span_entry(0, 4), span_entry(4, 6, train=False)],
)
"Values of `train_detail` that are not ranges of the answer."
FAULTY_MESSAGES: dict[str, list[list[Any]]] = {
    "bad_span": [[QUESTION, ANSWER | {"train_detail": detail}] for detail in SPANS],
    "span_with_calls": [
        [QUESTION, calling_message("{}", content="a", train_detail=[span_entry(0, 0)]), ANSWER],
    ],
    "bad_mark": [[QUESTION, ANSWER | flags] for flags in FLAGS],
    "trained_prompt": [
        [QUESTION | {"weight": 1}, ANSWER],
        [QUESTION | {"train_detail": [span_entry(0, 0)]}, ANSWER],
    ],
    "arguments_not_json": [[QUESTION, calling_message(text)] for text in ("{", "[1]", '"{}"')],
    "bad_tool_call": [
        [QUESTION, calling_message("{}", tool_calls=calls)] for calls in ([{"id": "c1"}], "f()")
    ],
    "bad_message_keys": [
        *([QUESTION, calling_message("{}", role="user"), ANSWER], [QUESTION, {"content": "x"}]),
        [QUESTION, calling_message() | {"function_call": {"name": "f", "arguments": "{}"}}],
    ],
    "unknown_tool_call": [
        [QUESTION, RESULT, ANSWER],
        *(
            [QUESTION, calling_message(), RESULT | {"tool_call_id": call_id}, ANSWER]
            for call_id in ("c2", ["c1"])
        ),
    ],
    "content_not_text": [
        [QUESTION, ANSWER | {"content": None}],
        *([QUESTION | {"content": content}, ANSWER] for content in PARTS),
    ],
    "empty_answer": [[QUESTION, ANSWER | {"content": ""}]],
    "unknown_role": [[QUESTION | {"role": role}, ANSWER] for role in ("human", {})],
    "repeated_role": [[QUESTION, QUESTION, ANSWER]],
    "lone_surrogate": [
        [QUESTION, calling_message('{"a": "\\ud800"}'), RESULT, ANSWER | {"content": "\ud800"}],
        *(
            [QUESTION, calling_message(arguments)]
            for arguments in ({"a": "\ud800"}, {"\ud800": "a"})
        ),
    ],
    "last_not_assistant": [[QUESTION, calling_message(), RESULT]],
}
"Reason -> messages in OpenAI's form."
FAULTY_RECORDS: dict[str, dict[str, list[Any]]] = {
    "openai": {
        "bad_tools": [
            {"messages": [QUESTION, ANSWER], "tools": tools}
            for tools in ("{", '{"name": "f"}', {"name": "f"}, ["f"], [{"type": "function"}], 3)
        ],
        "missing_tools": [{"messages": [QUESTION, calling_message()], "tools": None}],
        "lone_surrogate": [
            {
                "messages": [QUESTION, ANSWER],
                "tools": [{"type": "function", "function": {"name": "\ud800"}}],
            }
        ],
    },
    "messages": {
        "no_messages": [{"messages": []}],
        "too_few_messages": [{"messages": numbered_messages("assistant")}],
        "repeated_role": [
            {"messages": numbered_messages(*roles)}
            for roles in (
                ("user", "tool", "tool", "assistant"),
                ("user", "assistant", "assistant"),
                ("user", "user", "assistant"),
            )
        ],
        "bad_message_keys": [
            {"messages": [message | {"tool_calls": None} for message in (QUESTION, ANSWER)]},
            *(
                {"messages": [question, ANSWER]}
                for question in (
                    "hi",
                    {"role": "user"},
                    {"role": "user", "text": "a"},
                    QUESTION | {"name": "b"},
                )
            ),
        ],
        "unknown_role": [
            {"messages": numbered_messages("human", "assistant")},
            {"messages": [QUESTION | {"role": ["user"]}, ANSWER]},
        ],
        "content_not_text": [
            {"messages": [QUESTION | {"content": content}, ANSWER]}
            for content in (None, [{"type": "text", "text": "a"}])
        ],
        "last_not_assistant": [{"messages": numbered_messages("user", "assistant", "user")}],
        "starts_with_assistant": [
            {"messages": numbered_messages("assistant", "user", "assistant")}
        ],
    },
    "sharegpt": {
        "bad_message_keys": [{"conversations": ["a"]}, {"conversations": [{"from": "human"}]}],
        "unknown_role": [
            {"conversations": [sharegpt_item("bot", "a")]},
            {"conversations": [sharegpt_item(["human"], "a")]},
        ],
        "content_not_text": [{"conversations": [sharegpt_item("human", ["a"])]}],
        "missing_tools": [{"conversations": CALLED}],
        "bad_tools": [
            {"conversations": CALLED, "tools": "none"},
            {"conversations": CALLED, "tools": [{"description": "x"}]},
        ],
        "bad_tool_call": [
            {"conversations": [QUESTION_ITEM, sharegpt_item("function_call", calls)]}
            for calls in ("run", '{"name": "f", "arguments": {"n": NaN}}')
        ],
        "arguments_not_json": [
            {"conversations": [QUESTION_ITEM, sharegpt_item("function_call", calls)]}
            for calls in ('{"name": "f", "arguments": "x"}', '{"name": "f"}')
        ],
        "field_not_text": [{"conversations": [QUESTION_ITEM, ANSWER_ITEM], "system": 3}],
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
        "bad_history": [
            GOOD | {"history": history} for history in ("before", [["q"]], [["q", None]])
        ],
        "lone_surrogate": [
            GOOD | {"system": "\ud800"},
            GOOD | {"history": [["q", "\ud800"]]},
            GOOD | {"tools": '[{"name": "\\ud800"}]'},
        ],
        "bad_tools": [GOOD | {"tools": "no list"}],
    },
}


def test_each_fault_has_its_reason_code() -> None:
    openai_records = {
        code: [{"messages": messages, "tools": TOOLS} for messages in lists]
        for code, lists in FAULTY_MESSAGES.items()
    }
    for name, reasons in [("openai", openai_records), *FAULTY_RECORDS.items()]:
        shape = SHAPES[name]
        fields = {key: key for key in (*shape.fields, *shape.optional)}
        for reason, records in reasons.items():
            for record in records:
                assert shape.read(record, fields) == reason, (name, record)
    # If the recipe names no field of tools, a system prompt may describe them.
    conversation = OPENAI.read(
        {"messages": [QUESTION, calling_message()]}, {"messages": "messages"}
    )
    assert isinstance(conversation, RichConversation)


def test_values_of_more_than_200_levels_are_too_deep() -> None:
    fields = {"messages": "messages", "tools": "tools"}
    for levels in (150, 250, 990, 5000):
        text, nested = '{"a":' * levels + "1" + "}" * levels, 1
        for _ in range(levels):
            nested = {"a": nested}  # type: ignore[assignment]
        tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
        tools = f'[{{"name": "f", "parameters": {text}}}]'
        records = [
            {"messages": [QUESTION, ANSWER], "tools": [tool]},
            {"messages": [QUESTION, ANSWER], "tools": tools},
            {"messages": [QUESTION, ANSWER | {"more": nested}]},
            {"messages": [QUESTION, calling_message(text), RESULT, ANSWER], "tools": TOOLS},
        ]
        results = [OPENAI.read(record, fields) for record in records]
        strict = {"messages": [QUESTION, nested]}
        results.append(MESSAGES.read(strict, {"messages": "messages"}, nulls="drop"))
        are_deep = [result == "too_deep" for result in results]
        assert all(are_deep) if levels > 200 else not any(are_deep)


def exchange(answer: Any = "b", role: Any = "assistant", **keys: Any) -> list[Any]:
    return [{"role": "user", "content": "a"}, {"role": role, "content": answer, **keys}]


ODD_MESSAGES = [
    *(
        None,
        7,
        "ab",
        [],
        {},
        exchange()[:1],
        exchange()[1:],
        [*exchange(), "ab"],
        [*exchange(), ["role", "content"]],
    ),
    *(exchange(role=role) for role in ("user", "bot", None, ["user"], True)),
    *(exchange(answer) for answer in (None, 7, ["b"], "\ud800")),
    *(
        exchange(weight=1),
        exchange() + exchange(role="user"),
        [*exchange(), *exchange()[:1]],
        exchange()[::-1],
    ),
    [{"role": "user", "text": "a"}, exchange()[1]],
]


GOOD_MESSAGES = [exchange(), exchange() * 3, [{"role": "system", "content": "é"}, *exchange()]]
TEXTS, NO_TEXTS = ("", "a", "é 数"), ("\ud800", None, 7, ["a"], {"a": 1})
GOOD_PAIRS = [{"my p": prompt, "my r": response} for prompt, response in product(TEXTS, repeat=2)]
CASES: list[tuple[str, dict[str, str], list[Any], list[Any]]] = [
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
        {"messages": "my messages"},
        [{"my messages": messages} for messages in GOOD_MESSAGES],
        [{"my messages": messages} for messages in ODD_MESSAGES],
    ),
]
"Shape, its fields, good records, and records that are refused."


def test_records_read_all_at_once_are_as_read_one_by_one() -> None:
    for name, fields, good, odd in CASES:
        shape = SHAPES[name]
        records = shape.read_plain(good, fields) or ()
        one_by_one = [shape.read(record, fields) for record in good]
        assert [*records] == one_by_one
        assert [*map(type, records)] == [shape.gives] * len(good)
        assert len(records) == len(good)
        assert [records[position] for position in range(len(good))] == one_by_one
        assert [*records[1:]] == one_by_one[1:]
        assert [*fingerprints(records)] == [*fingerprints(one_by_one)]
        for record in (None, 7, "my p", ["my p"], good[:1], {}, *odd):
            assert isinstance(shape.read(record, fields), str), record
            assert shape.read_plain([good[0], record, good[1]], fields) is None, record


def test_what_other_shapes_read_at_once_is_as_read_one_by_one() -> None:
    """Every order of up to four roles, also with an empty content and with other keys and fields.
    What is not plain is left to the reading one by one.
    """
    words = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    keys = {"openai": ("role", "content"), "sharegpt": ("from", "value")}
    for name, (role_key, text_key) in keys.items():
        shape = SHAPES[name]
        fields = shape.own_fields
        (field,) = shape.fields
        orders = list[tuple[str, ...]]()
        for count in range(5):
            for roles in product((*words, "bot"), repeat=count):
                said = [words.get(role, role) if name == "sharegpt" else role for role in roles]
                messages = [{role_key: role, text_key: "a"} for role in said]
                blank = [*messages[:-1], *(message | {text_key: ""} for message in messages[-1:])]
                named = [message | {"name": "b"} for message in messages]
                for record in (
                    *({field: messages}, {field: blank}, {field: named}),
                    *({field: messages, "tools": TOOLS}, {field: messages, "system": "s"}),
                    {field: messages, "chat_template_kwargs": {"a": 1}},
                    {field: messages, "score": 1},
                ):
                    together = shape.read_plain([record], fields)
                    if together is not None:
                        one_by_one = shape.read(record, fields)
                        assert [*together] == [one_by_one]
                        assert type(one_by_one) is Conversation
                        orders.append(roles)
        # With and without a score. A first answer that follows a system message is one of them.
        assert len(orders) == 2 * len({*orders})
        assert {("user", "assistant"), ("system", "user", "assistant")} < {*orders}
        assert ("system", "assistant", "user", "assistant") not in orders
        assert ("system", "assistant") in orders


def make_record(shape: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record of the shape `openai` or `sharegpt` with these messages."""
    if shape == "openai":
        return {"messages": messages}
    words = {"user": "human", "assistant": "gpt"}
    items = []
    for message in messages:
        role = message["role"]
        others = {key: message[key] for key in message if key not in ("role", "content")}
        items.append({"from": words.get(role, role), "value": message["content"], **others})
    return {"conversations": items}


@pytest.mark.parametrize("name", ["openai", "sharegpt"])
def test_marked_messages_read_at_once_are_as_read_one_by_one(name: str) -> None:
    """Every order of up to four roles, with marks of all sorts drawn at random: valid ones, other
    values, and two that may differ. A batch with one bad record is left to the reading one by one.
    """
    rng = random.Random(0)
    shape = SHAPES[name]
    fields = shape.own_fields
    marks = (None, True, False, 1, 0, 1.0, 0.0)
    odd_keys = (
        *({"loss": True}, {"train": 0.5}, {"loss": "yes"}, {"train": [1]}, {"train_detail": []}),
        *({"name": "b"}, {"role": "developer"}, {"content": ""}, {"content": "\ud800"}),
    )
    seen = set[Any]()
    good = list[Any]()
    for count in range(2, 5):
        for roles in product(("user", "assistant", "system"), repeat=count):
            messages = [{"role": role, "content": f"a{role}"} for role in roles]
            for _ in range(10):
                marked = [message | {"weight": rng.choice(marks)} for message in messages]
                odd = rng.choice(odd_keys)
                edge = rng.randrange(count)
                for marked_messages in (
                    marked,
                    [*marked[:edge], marked[edge] | odd, *marked[edge + 1 :]],
                    [*marked[:edge], messages[edge], *marked[edge + 1 :]],
                ):
                    record = make_record(name, marked_messages)
                    before = deepcopy(record)
                    one_by_one = shape.read(record, fields)
                    together = shape.read_plain([record], fields)
                    if together is not None:
                        assert [*together] == [one_by_one]
                        assert type(one_by_one) is Conversation
                        seen.add(one_by_one.trained and tuple(one_by_one.trained))
                        good.append(record)
                    assert record == before
    assert {None, (False, True), (True, False)} < seen
    assert {len(flags or ()) for flags in seen} == {0, 2, 3, 4}
    # Flags are not mixed up between the records of a batch.
    rng.shuffle(good)
    one_by_one = [shape.read(record, fields) for record in good]
    together = shape.read_plain(good, fields)
    assert together is not None
    assert [*together] == one_by_one
    assert [*fingerprints(together)] == [*fingerprints(one_by_one)]
    bad = make_record(name, [message | {"weight": 2} for message in exchange()])
    assert shape.read(bad, fields) == "bad_mark"
    assert shape.read_plain([*good, bad], fields) is None


def test_prompts_and_completions_read_at_once_are_as_read_one_by_one() -> None:
    """Every order of up to four roles, split at every place into a prompt and a completion: also
    with marks and other fields. Answers in the prompt are not trained.
    """
    shape = SHAPES["prompt_completion"]
    fields = shape.own_fields
    flags = set[Any]()
    for count in range(5):
        for roles in product(("user", "assistant", "system", "tool", "bot"), repeat=count):
            messages = [{"role": role, "content": f"a{role}"} for role in roles]
            marked = [message | {"train": True} for message in messages]
            for end in range(count + 1):
                record = {"prompt": messages[:end], "completion": messages[end:]}
                for raw in (
                    *(record, record | {"score": 1}, record | {"system": "s"}),
                    *(record | {"prompt": marked[:end]}, record | {"completion": marked[end:]}),
                    *(record | {"loss_mask": [1] * count}, record | {"prompt": "a"}),
                ):
                    before = deepcopy(raw)
                    together = shape.read_plain([raw], fields)
                    if together is not None:
                        one_by_one = shape.read(raw, fields)
                        assert [*together] == [one_by_one]
                        assert type(one_by_one) is Conversation
                        assert [*fingerprints(together)] == [*fingerprints([one_by_one])]
                        flags.add(one_by_one.trained and tuple(one_by_one.trained))
                    assert raw == before
    assert None in flags
    assert (True, False, True, True) in flags  # user, assistant | user, assistant
    assert (True, False, True, False) in flags  # the completion is empty
    odd = [{"prompt": {"role": "user", "content": "a"}, "completion": GOOD_MESSAGES[0]}, {}, None]
    for record in odd:
        assert shape.read_plain([record], fields) is None
