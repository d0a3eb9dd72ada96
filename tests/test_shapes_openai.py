"""OpenAI's messages: what reaches the template, and what cannot."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.record import Conversation, RichConversation, canonical
from mdsmix.shapes.messages import MESSAGES, OPENAI
from tests.test_encode_chat import say

FIELDS = {"messages": "messages", "tools": "tools"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ASKED, ANSWERED = say("user", "assistant")
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def read(*messages: Any, tools: Any = TOOLS, **options: Any) -> Any:
    return OPENAI.read({"messages": list(messages), "tools": tools}, FIELDS, **options)


def test_messages_reach_the_template_as_they_are() -> None:
    messages = [ASKED, call('{"n": 1}'), RESULT, call({"n": 1}, content="Wait."), RESULT, ANSWERED]
    found = read(*messages)
    assert type(found) is RichConversation
    assert found == RichConversation(messages, None, TOOLS)


def test_plain_messages_are_a_plain_conversation() -> None:
    """So they are rendered once, as those of Foundry's shape."""
    for tools in (None, [], "[]", ""):
        found = read(ASKED | {"weight": None}, ANSWERED | {"weight": 1}, tools=tools)
        assert type(found) is Conversation
        assert found == Conversation([ASKED, ANSWERED])


FLAGS = st.sampled_from([{}, {"weight": 0}, {"weight": 1}, {"train": False}, {"loss": True}, {"loss_weight": 0.0}, {"train": True, "weight": 1}, {"weight": None}])  # fmt: skip


@settings(deadline=None)
@given(st.lists(FLAGS, min_size=1, max_size=4))
def test_a_flag_says_whether_a_message_is_trained(flags: list[dict[str, Any]]) -> None:
    messages = [m for flag in flags for m in (ASKED, ANSWERED | flag)]
    found = read(*messages)
    expected = [all(value is None or value for value in flag.values()) for flag in flags]
    assert found.messages == [ASKED, ANSWERED] * len(flags)
    if all(expected):
        assert found.trained is None
    else:
        assert found.trained == [trained for each in expected for trained in (True, each)]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASKED, ANSWERED | {"weight": 0.5}], "bad_weight"),
        ([ASKED, ANSWERED | {"weight": "1"}], "bad_weight"),
        ([ASKED, ANSWERED | {"weight": 1, "train": False}], "bad_weight"),
        ([ASKED, ANSWERED | {"train_detail": [{"begin_offset": 0}]}], "bad_weight"),
        ([ASKED | {"weight": 1}, ANSWERED], "trained_prompt"),
        ([ASKED, call("{")], "arguments_not_json"),
        ([ASKED, call("[1]")], "arguments_not_json"),
        ([ASKED, call('"{}"')], "arguments_not_json"),
        ([ASKED, call("{}", tool_calls=[{"id": "c1"}])], "bad_tool_call"),
        ([ASKED, call("{}", tool_calls="f()")], "bad_tool_call"),
        ([ASKED, call("{}", role="user"), ANSWERED], "bad_message_keys"),
        ([ASKED, RESULT, ANSWERED], "unknown_tool_call"),
        ([ASKED, call(), RESULT | {"tool_call_id": "c2"}, ANSWERED], "unknown_tool_call"),
        ([ASKED, call(), RESULT | {"tool_call_id": ["c1"]}, ANSWERED], "unknown_tool_call"),
        ([ASKED, ANSWERED | {"content": None}], "content_not_text"),
        ([ASKED | {"content": None}, ANSWERED], "content_not_text"),
        ([ASKED, ANSWERED | {"content": ""}], "empty_answer"),
        ([ASKED, {"role": "assistant", "content": None, "function_call": {"name": "f"}}], "bad_message_keys"),
        ([ASKED, {"content": "x"}], "bad_message_keys"),
        ([ASKED | {"role": "human"}, ANSWERED], "unknown_role"),
        ([ASKED | {"role": {}}, ANSWERED], "unknown_role"),
        ([ASKED, ASKED, ANSWERED], "repeated_role"),
        ([ASKED | {"content": [{"type": "image_url", "image_url": "x"}]}, ANSWERED], "content_not_text"),
        ([ASKED | {"content": [{"type": "text", "text": "a", "weight": 0}]}, ANSWERED], "content_not_text"),
        ([ASKED | {"content": [{"type": "text", "text": 3}]}, ANSWERED], "content_not_text"),
        ([ASKED | {"content": [{"type": ["text"], "text": "a"}]}, ANSWERED], "content_not_text"),
        ([ASKED, call('{"a": "\\ud800"}'), RESULT, ANSWERED | {"content": "\ud800"}], "lone_surrogate"),
        ([ASKED, call({"a": "\ud800"})], "lone_surrogate"),
        ([ASKED, call({"\ud800": "a"})], "lone_surrogate"),
        ([ANSWERED, ASKED, ANSWERED], "starts_with_assistant"),
        ([ASKED, call(), RESULT], "last_not_assistant"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_its_reason(messages: list[Any], reason: str) -> None:
    assert read(*messages) == reason


def test_tools_that_are_none_or_missing() -> None:
    for wrong in ("{", '{"name": "f"}', {"name": "f"}, ["f"], [{"type": "function"}], 3):
        assert read(ASKED, ANSWERED, tools=wrong) == "bad_tools"
    assert read(ASKED, call(), tools=None) == "missing_tools"
    named = [{"type": "function", "function": {"name": "\ud800"}}]
    assert read(ASKED, ANSWERED, tools=named) == "lone_surrogate"
    alone = OPENAI.read({"messages": [ASKED, call()]}, {"messages": "messages"})
    assert isinstance(alone, RichConversation)  # a system prompt may tell of them


def test_numbers_of_any_size_and_values_of_arrow_have_a_canonical_form() -> None:
    """So that they can be held out and compared: 2^70 is no number of orjson's, a Decimal no JSON."""
    huge = '[{"name": "f", "parameters": {"maximum": 1180591620717411303424}}]'
    found = read(ASKED, call({"n": Decimal("1.50")}), tools=huge)
    assert b"1180591620717411303424" in canonical(found)
    assert canonical(found) == canonical(read(ASKED, call({"n": Decimal("1.50")}), tools=huge))
    assert canonical(found) != canonical(read(ASKED, call({"n": Decimal("1.5")}), tools=huge))


def test_bare_tools_and_calls_are_wrapped() -> None:
    bare = {"type": "function", "name": "f", "parameters": {}}
    found = read(ASKED, call(tool_calls=[{"id": "c1", "name": "f", "arguments": {}}]), tools=[bare])
    assert found.tools == TOOLS
    assert found.messages[1]["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}]  # fmt: skip


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "value": "two"}]
    found = read(ASKED | {"content": parts}, ANSWERED | {"content": parts[:1]}, tools=None)
    assert [m["content"] for m in found.messages] == ["one two", "one "]


def test_nulls_stay_unless_they_are_dropped() -> None:
    """As Arrow adds them where the objects of a list differ; a null inside of JSON text is the record's own."""
    said = [ASKED | {"tool_calls": None}, call({"city": "X", "n": None}), RESULT | {"name": None}, call('{"n": null}')]  # fmt: skip
    tools = [{"type": None, "function": {"name": "f", "strict": None, "parameters": {}}}]
    kept = read(*said, tools=tools)
    assert kept == RichConversation(said, None, tools)
    dropped = read(*said, tools=tools, nulls="drop")
    assert dropped.messages[0] == ASKED
    assert dropped.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "X"}
    assert dropped.messages[2] == RESULT
    assert dropped.messages[3]["tool_calls"][0]["function"]["arguments"] == '{"n": null}'
    assert dropped.tools == [{"function": {"name": "f", "parameters": {}}}]


def test_parallel_calls_have_results_one_after_the_other() -> None:
    both = call(tool_calls=[*call()["tool_calls"], {"id": "c2", "function": {"name": "f", "arguments": "{}"}}])  # fmt: skip
    said = [ASKED, both, RESULT, RESULT | {"tool_call_id": "c2"}, ANSWERED]
    assert len(read(*said).messages) == len(read(*said, consecutive_roles="merge").messages) == 5


def test_an_empty_text_vanishes_in_a_merge_and_an_answer_that_stays_empty_is_bad() -> None:
    """The same in `messages`, where LLM-Foundry takes an empty answer."""
    for texts in itertools.product(("", "so", "more"), repeat=2):
        said = [ASKED, *({"role": "assistant", "content": text} for text in texts)]
        whole = "\n\n".join(filter(None, texts))
        merged = [ASKED, {"role": "assistant", "content": whole}]
        assert MESSAGES.read({"messages": said}, FIELDS, consecutive_roles="merge") == Conversation(merged)  # fmt: skip
        expected = Conversation(merged) if whole else "empty_answer"
        assert read(*said, tools=None, consecutive_roles="merge") == expected
        assert read(*said, tools=None) == ("repeated_role" if all(texts) else "empty_answer")


@pytest.mark.parametrize("levels", [150, 250, 990, 5000])
def test_what_is_nested_too_deep_to_be_followed_has_its_reason(levels: int) -> None:
    text = '{"a":' * levels + "1" + "}" * levels
    nested: Any = 1
    for _ in range(levels):
        nested = {"a": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    tools = f'[{{"name": "f", "parameters": {text}}}]'
    found = [
        read(ASKED, ANSWERED, tools=[tool]),
        read(ASKED, ANSWERED, tools=tools),
        read(ASKED, ANSWERED | {"more": nested}),
        read(ASKED, call(text), RESULT, ANSWERED),
        MESSAGES.read({"messages": [ASKED, nested]}, {"messages": "messages"}, nulls="drop"),
    ]
    deep = [each == "too_deep" for each in found]
    assert all(deep) if levels > 200 else not any(deep)
