"""ShareGPT's records, under any names of keys and roles."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.record import Conversation, RichConversation
from mdsmix.shapes import sharegpt
from mdsmix.shapes.messages import MESSAGES
from tests.test_encode_chat import say

FIELDS = {"conversations": "conversations", "system": "system", "tools": "tools"}
CALL = {"name": "weather", "arguments": {"city": "Köln"}}
TOOL = {"name": "weather", "description": "Tells it", "parameters": {"type": "object"}}
WORDS = st.sampled_from(["role", "speaker", "who", "text", "body", "q", "a", "fn", "out", "sys"])


def item(role: str, value: Any) -> dict[str, Any]:
    return {"from": role, "value": value}


GLAIVE = [
    item("human", "Rain in Köln?"),
    item("function_call", json.dumps(CALL)),
    item("observation", '{"rain": true}'),
    item("gpt", "Yes."),
]


def read(items: Any, **more: Any) -> Any:
    options = {key: more.pop(key) for key in ("tags", "consecutive_roles", "nulls") if key in more}
    return sharegpt.SHAREGPT.read({"conversations": items} | more, FIELDS, **options)


def test_a_call_and_its_result_are_those_of_chat_templates() -> None:
    found = read(GLAIVE, tools=json.dumps([TOOL]), system="Be brief.")
    assert type(found) is RichConversation
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool", "assistant"]  # fmt: skip
    assert found.messages[2]["tool_calls"] == [{"type": "function", "function": CALL}]
    assert found.tools == [{"type": "function", "function": TOOL}]
    assert found.trained is None


@settings(deadline=None)
@given(st.lists(WORDS, min_size=7, max_size=7, unique=True))
def test_renamed_keys_and_roles_give_the_same_conversation(words: list[str]) -> None:
    tags = dict(zip(sharegpt.TAGS, words, strict=True))
    named = {sharegpt.TAGS[tag]: word for tag, word in tags.items()}
    head = item("system", "Be brief.")
    renamed = [
        {named["from"]: named[m["from"]], named["value"]: m["value"]} for m in (head, *GLAIVE)
    ]
    assert read(renamed, tags=tags, tools=[TOOL]) == read([head, *GLAIVE], tools=[TOOL])
    assert read([head, *GLAIVE], tags=tags) in ("bad_message_keys", "unknown_role")


@pytest.mark.parametrize(
    ("items", "more", "reason"),
    [
        ("x", {}, "messages_not_a_list"),
        ([], {}, "no_messages"),
        ([item("human", "a")], {}, "too_few_messages"),
        (["a"], {}, "bad_message_keys"),
        ([{"from": "human"}], {}, "bad_message_keys"),
        ([item("bot", "a")], {}, "unknown_role"),
        ([item(["human"], "a")], {}, "unknown_role"),  # type: ignore[arg-type]
        ([item("human", ["a"])], {}, "content_not_text"),
        ([item("human", "a"), item("gpt", "")], {}, "empty_answer"),
        ([item("human", "a"), item("human", "b"), item("gpt", "c")], {}, "repeated_role"),
        ([*GLAIVE, item("human", "b")], {"tools": [TOOL]}, "last_not_assistant"),
        (GLAIVE[3:] + GLAIVE, {"tools": [TOOL]}, "starts_with_assistant"),
        (GLAIVE, {}, "missing_tools"),
        (GLAIVE, {"tools": "none"}, "bad_tools"),
        (GLAIVE, {"tools": [{"description": "x"}]}, "bad_tools"),
        ([item("human", "a"), item("function_call", "run")], {}, "bad_tool_call"),
        ([item("human", "a"), item("function_call", '{"name": "f", "arguments": "x"}')], {}, "arguments_not_json"),
        ([item("human", "a"), item("function_call", '{"name": "f", "arguments": {"n": NaN}}')], {}, "bad_tool_call"),
        ([item("human", "a"), item("function_call", '{"name": "f"}')], {}, "arguments_not_json"),
        ([item("human", "\ud800"), item("gpt", "b")], {}, "lone_surrogate"),
        ([item("human", "a"), item("gpt", "b")], {"system": 3}, "field_not_text"),
        ([item("human", "a") | {"train": True}, item("gpt", "b")], {}, "trained_prompt"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_its_reason(items: Any, more: dict[str, Any], reason: str) -> None:
    assert read(items, **more) == reason


def test_a_system_message_is_taken_before_the_field() -> None:
    items = [item("human", "a"), item("gpt", "b")]
    headed = [item("system", "Be brief."), *items]
    assert read(headed, system="Be long.") == read(headed) == read(items, system="Be brief.")


def test_no_field_no_record() -> None:
    assert sharegpt.SHAREGPT.read({"text": "a"}, FIELDS) == "missing_field"
    assert sharegpt.SHAREGPT.read([{"a": 1}], FIELDS) == "json_array"


def test_messages_of_one_role_are_merged_where_that_is_asked_for() -> None:
    items = [item("human", "a"), item("human", "b"), item("gpt", "c"), item("gpt", "d")]
    found = read(items, consecutive_roles="merge")
    assert [m["content"] for m in found.messages] == ["a\n\nb", "c\n\nd"]
    beside = read([item("human", "a"), item("gpt", "Wait."), *GLAIVE[1:]], tools=[TOOL], consecutive_roles="merge")  # fmt: skip
    assert beside.messages[1]["content"] == "Wait."
    assert beside.messages[1]["tool_calls"][0]["function"] == CALL
    after = [item("human", "a"), GLAIVE[1], GLAIVE[3]]  # what a call gave is missing
    assert read(after, tools=[TOOL], consecutive_roles="merge") == "repeated_role"
    system = read([item("system", "x"), *items[:1], *items[2:3]], system="y", consecutive_roles="merge")  # fmt: skip
    assert system.messages[0] == {"role": "system", "content": "y\n\nx"}


def test_answers_of_which_only_one_is_trained_are_not_merged() -> None:
    items = [item("human", "a"), item("gpt", "b") | {"weight": 0}, item("gpt", "c")]
    assert read(items, consecutive_roles="merge") == "repeated_role"


def test_rounds_are_exchanges() -> None:
    fields = {"conversation": "conversation", "system": "system"}
    said = [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]
    found = sharegpt.ROUNDS.read({"conversation": said, "system": "s"}, fields)
    assert isinstance(found, Conversation)
    assert [m["content"] for m in found.messages] == ["s", "a", "b", "c", "d"]
    for wrong, reason in (([{"human": "a"}], "bad_message_keys"), ([{"human": "a", "assistant": 1}], "content_not_text"), ([{"human": "a", "assistant": ""}], "empty_answer"), ([], "no_messages"), (None, "messages_not_a_list")):  # fmt: skip
        assert sharegpt.ROUNDS.read({"conversation": wrong}, fields) == reason


def test_messages_are_merged_in_foundry_s_shape_too() -> None:
    fields = {"messages": "messages"}
    said = say("user", "user", "assistant", "tool", "tool", "assistant")
    assert MESSAGES.read({"messages": said}, fields) == "repeated_role"
    found = MESSAGES.read({"messages": said}, fields, consecutive_roles="merge")
    assert isinstance(found, Conversation)
    texts = ["user 0\n\nuser 1", "assistant 2", "tool 3\n\ntool 4", "assistant 5"]
    assert [m["content"] for m in found.messages] == texts
    assert MESSAGES.read({"messages": [3]}, fields, consecutive_roles="merge") == "bad_message_keys"
    with_null = [message | {"tool_calls": None} for message in say("user", "assistant")]
    assert MESSAGES.read({"messages": with_null}, fields) == "bad_message_keys"
    assert MESSAGES.read({"messages": with_null}, fields, nulls="drop") == Conversation(say("user", "assistant"))  # fmt: skip
