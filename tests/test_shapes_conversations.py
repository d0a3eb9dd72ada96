"""Conversations as Alpaca, OpenAI and ShareGPT write them: the messages that the template gets,
under any names of keys and roles.
"""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.kinds import open_recipe
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.record import Conversation, RichConversation, canonical
from mdsmix.shapes import SHAPES
from mdsmix.shapes.extras import EXTRAS
from mdsmix.shapes.nested_values import contains_null
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.shapes.tools import _ToolsCache
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import write_recipe
from tests.test_shapes_refused import (
    ANSWER,
    ANSWER_ITEM,
    GOOD,
    QUESTION,
    QUESTION_ITEM,
    RESULT,
    TOOLS,
    calling_message,
    numbered_messages,
    sharegpt_item,
)

CALL = {"name": "weather", "arguments": {"city": "Köln"}}
TOOL = {"name": "weather", "description": "Tells it", "parameters": {"type": "object"}}
GLAIVE = [
    *(sharegpt_item("human", "Rain in Köln?"), sharegpt_item("function_call", json.dumps(CALL))),
    *(sharegpt_item("observation", '{"rain": true}'), sharegpt_item("gpt", "Yes.")),
]
TEXTS = st.text("ab\n", max_size=3)
MERGED = {"consecutive_roles": "merge"}
FLAGS = st.sampled_from(
    [
        {},
        {"weight": 0},
        {"weight": 1},
        {"train": False},
        {"loss": True},
        {"loss_weight": 0.0},
        {"train": True, "weight": 1},
        {"weight": None},
        {"loss_mask": 0},
        {"training": False},
        {"trainable": 0.0},
        {"step_loss_mask": 0},
        {"trainable": True, "loss_mask": 1.0},
    ]
)
WORDS = st.sampled_from(["role", "speaker", "who", "text", "body", "q", "a", "fn", "out", "sys"])


def read(name: str, record: Any, **options: Any) -> Any:
    shape = SHAPES[name]
    return shape.read(record, {key: key for key in (*shape.fields, *shape.optional)}, **options)


def openai(*messages: Any, tools: Any = TOOLS, **options: Any) -> Any:
    return read("openai", {"messages": list(messages), "tools": tools}, **options)


def sharegpt(items: list[Any], options: dict[str, Any] | None = None, **fields: Any) -> Any:
    return read("sharegpt", {"conversations": items} | fields, **options or {})


REQUIRED = {"instruction": TEXTS, "output": TEXTS}
OPTIONAL = {
    "input": st.none() | TEXTS,
    "system": st.none() | TEXTS,
    "history": st.none() | st.lists(st.tuples(TEXTS, TEXTS).map(list), max_size=2),
}


@given(st.fixed_dictionaries(REQUIRED, optional=OPTIONAL), st.sampled_from(["\n", "", " | "]))
def test_a_record_of_alpaca_is_its_exchanges_in_order(
    record: dict[str, Any], separator: str
) -> None:
    question, answer = record["instruction"], record["output"]
    if record.get("input"):
        question += (separator if question else "") + record["input"]
    exchanges = [*(record.get("history") or ()), [question, answer]]
    expected = [("system", record["system"])] if record.get("system") else []
    expected += [
        (role, text)
        for exchange in exchanges
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    conversation = read("alpaca", record, joined_by=separator)
    if not (question and answer):
        assert conversation == ("empty_answer" if question else "empty_question")
        return
    assert [(m["role"], m["content"]) for m in conversation.messages] == expected
    assert conversation.trained is None


def test_the_template_gets_tools_of_any_form_in_one_form() -> None:
    conversation = read("alpaca", GOOD | {"tools": '[{"name": "sum"}]'})
    assert type(conversation) is RichConversation
    assert conversation.tools == [{"type": "function", "function": {"name": "sum"}}]
    assert conversation.messages == read("alpaca", GOOD).messages
    plain = read("alpaca", GOOD)
    for absent in ("", None):
        assert read("alpaca", GOOD | {"tools": absent}) == plain
    for empty in ("[]", []):
        assert read("alpaca", GOOD | {"tools": empty}) == plain._replace(tools=[])
        assert canonical(plain._replace(tools=[])) == canonical(plain)
    call = calling_message(tool_calls=[{"id": "c1", "name": "f", "arguments": {}}])
    conversation = openai(
        QUESTION, call, tools=[{"type": "function", "name": "f", "parameters": {}}]
    )
    assert conversation.tools == TOOLS
    assert conversation.messages[1]["tool_calls"] == calling_message({})["tool_calls"]


def test_the_shape_follows_from_the_fields_and_only_these_are_read(
    tmp_path: Path, lettered: Tokenizer
) -> None:
    """A shape that is named without fields reads all of them. Extras, such as loss_mask, are always
    read.
    """
    alpaca = SHAPES["alpaca"]
    all_fields = {key: key for key in (*alpaca.fields, *alpaca.optional)}
    required = {"instruction": "instruction", "output": "output"}
    with_input = required | {"input": "input"}
    joined = {"joined_by": ""}
    for source, fields, options in (
        ({"shape": "alpaca"}, all_fields, {}),
        (required, required, {}),
        (with_input, with_input, {}),
        (with_input | joined, with_input, joined),
    ):
        stream = {"kind": "finetuning", "source": {"path": "a", **source}}
        recipe = open_recipe(write_recipe(tmp_path, tmp_path, streams={"s": stream}))
        resolved = resolve_stream(recipe, recipe.streams["s"], lettered)
        encoding = resolved.encoding
        assert (encoding.fields, encoding.shape_options) == (fields, options)
        assert encoding.shape is None
        assert {*resolved.fields_read} == {*fields.values(), *EXTRAS}


def test_messages_reach_the_template_as_they_are() -> None:
    """Plain messages become a plain conversation, which is rendered only once, as one of Foundry's
    shape is.
    """
    rich = [
        QUESTION,
        calling_message('{"n": 1}'),
        RESULT,
        calling_message({"n": 1}, content="Wait."),
        RESULT,
        ANSWER,
    ]
    assert type(openai(*rich)) is RichConversation
    assert openai(*rich) == RichConversation(rich, None, TOOLS)
    for tools, expected in ((None, None), ("", None), ([], []), ("[]", [])):
        conversation = openai(QUESTION | {"weight": None}, ANSWER | {"weight": 1}, tools=tools)
        assert type(conversation) is Conversation
        assert conversation == Conversation([QUESTION, ANSWER], None, expected)
    developer = {"role": "developer", "content": "Be brief."}
    assert type(openai(developer, QUESTION, ANSWER, tools=None)) is RichConversation
    parts = [{"type": "text", "text": "one "}, {"type": "text", "value": "two"}]
    conversation = openai(
        QUESTION | {"content": parts}, ANSWER | {"content": parts[:1]}, tools=None
    )
    assert [m["content"] for m in conversation.messages] == ["one two", "one "]


@given(st.lists(FLAGS, min_size=1, max_size=4))
def test_a_mark_decides_whether_a_message_is_trained(flags: list[dict[str, Any]]) -> None:
    conversation = openai(*[m for flag in flags for m in (QUESTION, ANSWER | flag)])
    expected = [all(value is None or value for value in flag.values()) for flag in flags]
    assert conversation.messages == [QUESTION, ANSWER] * len(flags)
    trained = list[bool]()
    for is_trained in expected:
        trained += [True, is_trained]
    assert conversation.trained == (None if all(expected) else trained)


def test_numbers_of_any_size_and_values_of_arrow_have_a_canonical_form() -> None:
    """So they can be held out and compared, although orjson does not write 2^70, and JSON has no
    Decimal.
    """
    huge = '[{"name": "f", "parameters": {"maximum": 1180591620717411303424}}]'
    calls = [calling_message({"n": Decimal(n)}) for n in ("1.50", "1.50", "1.5")]
    forms = [canonical(openai(QUESTION, call, tools=huge)) for call in calls]
    assert b"1180591620717411303424" in forms[0]
    assert forms[0] == forms[1] != forms[2]


def test_nulls_stay_unless_they_are_dropped() -> None:
    """Arrow adds nulls if the objects of a list differ. A null inside JSON text is the record's own
    and stays.
    """
    messages = [
        QUESTION | {"tool_calls": None},
        calling_message({"city": "X", "n": None}),
        RESULT | {"name": None},
        calling_message('{"n": null}'),
    ]
    tools = [{"type": None, "function": {"name": "f", "strict": None, "parameters": {}}}]
    unchanged = [QUESTION, *messages[1:]]  # null for calls means that a message calls nothing
    assert openai(*messages, tools=tools) == RichConversation(unchanged, None, tools)
    dropped = openai(*messages, tools=tools, nulls="drop")
    question, call, result, call_in_text = dropped.messages
    assert (question, result) == (QUESTION, RESULT)
    assert call["tool_calls"][0]["function"]["arguments"] == {"city": "X"}
    assert call_in_text["tool_calls"][0]["function"]["arguments"] == '{"n": null}'
    assert dropped.tools == [{"function": {"name": "f", "parameters": {}}}]
    nulls = {"messages": [message | {"tool_calls": None} for message in (QUESTION, ANSWER)]}
    assert read("messages", nulls, nulls="drop") == Conversation([QUESTION, ANSWER])


def test_parallel_calls_have_results_one_after_the_other() -> None:
    second = {"id": "c2", "function": {"name": "f", "arguments": "{}"}}
    both = calling_message(tool_calls=[*calling_message()["tool_calls"], second])
    messages = [QUESTION, both, RESULT, RESULT | {"tool_call_id": "c2"}, ANSWER]
    assert len(openai(*messages).messages) == len(openai(*messages, **MERGED).messages) == 5
    items = [*GLAIVE[:3], *GLAIVE[2:]]
    assert len(sharegpt(items, MERGED, tools=[TOOL]).messages) == 5


def test_merging_drops_an_empty_text_and_an_answer_that_stays_empty_is_bad() -> None:
    """The shape `messages` merges them too, but takes an empty answer, as LLM-Foundry does."""
    for texts in itertools.product(("", "so", "more"), repeat=2):
        messages = [QUESTION, *({"role": "assistant", "content": text} for text in texts)]
        whole = "\n\n".join(filter(None, texts))
        merged = Conversation([QUESTION, {"role": "assistant", "content": whole}])
        assert read("messages", {"messages": messages}, **MERGED) == merged
        assert openai(*messages, tools=None, **MERGED) == (merged if whole else "empty_answer")
        assert openai(*messages, tools=None) == ("repeated_role" if all(texts) else "empty_answer")


@given(st.lists(WORDS, min_size=7, max_size=7, unique=True))
def test_renamed_keys_and_roles_give_the_same_conversation(words: list[str]) -> None:
    tags = dict(zip(TAGS, words, strict=True))
    new_names = {TAGS[tag]: word for tag, word in tags.items()}
    items = [sharegpt_item("system", "Be brief."), *GLAIVE]
    renamed = [
        {new_names["from"]: new_names[m["from"]], new_names["value"]: m["value"]} for m in items
    ]
    assert sharegpt(renamed, {"tags": tags}, tools=[TOOL]) == sharegpt(items, tools=[TOOL])
    assert sharegpt(items, {"tags": tags}) in ("bad_message_keys", "unknown_role")


def test_messages_of_one_role_are_merged_if_the_recipe_asks_for_it() -> None:
    with_system = [sharegpt_item("system", "Be brief."), QUESTION_ITEM, ANSWER_ITEM]
    from_field = sharegpt([QUESTION_ITEM, ANSWER_ITEM], system="Be brief.")
    assert sharegpt(with_system, system="Be long.") == sharegpt(with_system) == from_field
    assert sharegpt(with_system, MERGED, system="y").messages[0]["content"] == "y\n\nBe brief."
    conversation = sharegpt(
        [
            QUESTION_ITEM,
            sharegpt_item("human", "b"),
            sharegpt_item("gpt", "c"),
            sharegpt_item("gpt", "d"),
        ],
        MERGED,
    )
    assert [m["content"] for m in conversation.messages] == ["a\n\nb", "c\n\nd"]
    text_and_call = sharegpt(
        [QUESTION_ITEM, sharegpt_item("gpt", "Wait."), *GLAIVE[1:]], MERGED, tools=[TOOL]
    )
    assert text_and_call.messages[1]["content"] == "Wait."
    assert text_and_call.messages[1]["tool_calls"][0]["function"] == CALL
    without_result = [QUESTION_ITEM, GLAIVE[1], GLAIVE[3]]
    assert sharegpt(without_result, MERGED, tools=[TOOL]) == "repeated_role"
    partly_trained = [QUESTION_ITEM, ANSWER_ITEM | {"weight": 0}, sharegpt_item("gpt", "c")]
    assert sharegpt(partly_trained, MERGED) == "repeated_role", "only one answer is trained"
    messages = numbered_messages("user", "user", "assistant", "tool", "tool", "assistant")
    conversation = read("messages", {"messages": messages}, **MERGED)
    texts = ["user 0\n\nuser 1", "assistant 2", "tool 3\n\ntool 4", "assistant 5"]
    assert [m["content"] for m in conversation.messages] == texts
    assert read("messages", {"messages": [3]}, **MERGED) == "bad_message_keys"


def test_records_with_equal_tools_share_their_tools() -> None:
    """Also those whose tools are the same JSON text. Tools that only look alike are not shared."""
    question = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello"}

    def parse(tools: Any, **options: Any) -> Any:
        record = {"messages": [question, answer], "tools": tools}
        return SHAPES["openai"].read(record, SHAPES["openai"].own_fields, **options).tools

    def make_tool(default: Any) -> list[dict[str, Any]]:
        return [{"name": "add", "parameters": {"properties": {"n": {"default": default}}}}]

    wrapped = {"type": "function", "function": make_tool(1)[0]}
    for value in (make_tool(1), json.dumps(make_tool(1))):
        assert parse(value) is parse(deepcopy(value))
        assert parse(value) == [wrapped]
    alike = [make_tool(default) for default in (1, 1.0, True, "1", None, float("nan"), 2**80)]
    texts = [json.dumps(parse(tools)) for tools in alike]
    assert len({*texts}) == len(alike)
    assert texts == [json.dumps([{"type": "function", "function": tools[0]}]) for tools in alike]
    dated = make_tool(date(2026, 1, 1))
    assert parse(dated)[0]["function"] == dated[0], "not the text of a date"
    (without_null,) = parse(make_tool(None), nulls="drop")
    assert without_null["function"]["parameters"] == {"properties": {"n": {}}}
    assert parse(make_tool(None))[0]["function"] == make_tool(None)[0]


def test_the_tools_that_are_kept_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source may have large tools, and other ones in each record."""
    cache = _ToolsCache()
    monkeypatch.setattr("mdsmix.shapes.tools.SHARED_TOOLS_BYTES", 1000)
    tools = [json.dumps([{"name": f"{n:0300}"}]).encode() for n in range(20)]
    for content in (*tools, tools[-1]):
        assert cache.parse(content, False) == cache.parse(content, True)
        assert cache.parse(content, False) is cache.parse(content, False)
        assert sum(len(kept) for kept, _ in cache._tools) == cache._bytes <= 1000


JSON_VALUES = st.recursive(
    st.none() | st.sampled_from(['"content":null', ":null", "a"]) | st.just(float("nan")),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["content", 'x"content', ',"content', "a"]), inner, max_size=2
        )
    ),
    max_leaves=6,
)


@given(JSON_VALUES)
def test_nulls_are_found_in_objects_but_not_as_contents(value: Any) -> None:
    def has_null(value: Any) -> bool:
        if isinstance(value, dict):
            return any((v is None and k != "content") or has_null(v) for k, v in value.items())
        return isinstance(value, list) and any(map(has_null, value))

    assert contains_null(value) == has_null(value)
    with_number = [value, 2**80]  # which orjson does not write
    assert contains_null(with_number) == has_null(value)
