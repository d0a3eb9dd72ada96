"""Conversations as Alpaca, OpenAI and ShareGPT write them: what reaches the template, under any
names of keys and roles.
"""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mdsmix.kinds import open_recipe
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.record import Conversation, RichConversation, canonical
from mdsmix.shapes import SHAPES
from mdsmix.shapes.extras import EXTRAS
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import write_recipe
from tests.test_shapes_refused import ANSWERED, ASKED, GOOD, RESULT, TOOLS, A, B, call, item, say

CALL = {"name": "weather", "arguments": {"city": "Köln"}}
TOOL = {"name": "weather", "description": "Tells it", "parameters": {"type": "object"}}
GLAIVE = [
    *(item("human", "Rain in Köln?"), item("function_call", json.dumps(CALL))),
    *(item("observation", '{"rain": true}'), item("gpt", "Yes.")),
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


def sharegpt(items: list[Any], options: dict[str, Any] | None = None, **more: Any) -> Any:
    return read("sharegpt", {"conversations": items} | more, **options or {})


NEEDED = {"instruction": TEXTS, "output": TEXTS}
OPTIONAL = {
    "input": st.none() | TEXTS,
    "system": st.none() | TEXTS,
    "history": st.none() | st.lists(st.tuples(TEXTS, TEXTS).map(list), max_size=2),
}


@given(st.fixed_dictionaries(NEEDED, optional=OPTIONAL), st.sampled_from(["\n", "", " | "]))
def test_a_record_of_alpaca_is_its_exchanges_in_order(record: dict[str, Any], between: str) -> None:
    question, answer = record["instruction"], record["output"]
    if record.get("input"):
        question += (between if question else "") + record["input"]
    exchanges = [*(record.get("history") or ()), [question, answer]]
    said = [("system", record["system"])] if record.get("system") else []
    said += [
        (role, text)
        for each in exchanges
        for role, text in zip(("user", "assistant"), each, strict=True)
    ]
    found = read("alpaca", record, joined_by=between)
    if not (question and answer):
        assert found == ("empty_answer" if question else "empty_question")
        return
    assert [(m["role"], m["content"]) for m in found.messages] == said
    assert found.trained is None


def test_tools_in_any_form_are_those_that_the_template_is_given() -> None:
    found = read("alpaca", GOOD | {"tools": '[{"name": "sum"}]'})
    assert type(found) is RichConversation
    assert found.tools == [{"type": "function", "function": {"name": "sum"}}]
    assert found.messages == read("alpaca", GOOD).messages
    plain = read("alpaca", GOOD)
    for none in ("", None):
        assert read("alpaca", GOOD | {"tools": none}) == plain
    for empty in ("[]", []):
        assert read("alpaca", GOOD | {"tools": empty}) == plain._replace(tools=[])
        assert canonical(plain._replace(tools=[])) == canonical(plain)
    asked = call(tool_calls=[{"id": "c1", "name": "f", "arguments": {}}])
    found = openai(ASKED, asked, tools=[{"type": "function", "name": "f", "parameters": {}}])
    assert found.tools == TOOLS
    assert found.messages[1]["tool_calls"] == call({})["tool_calls"]


def test_fields_tell_the_shape_and_only_these_are_read(tmp_path: Path, lettered: Tokenizer) -> None:
    """A shape that is named alone reads all of its fields; extras, such as loss_mask, are read
    wherever they are.
    """
    named, alpaca = {"instruction": "instruction", "output": "output"}, SHAPES["alpaca"]
    fed, spaced = named | {"input": "input"}, {"joined_by": ""}
    every = {key: key for key in (*alpaca.fields, *alpaca.optional)}
    for source, fields, options in (
        *(({"shape": "alpaca"}, every, {}), (named, named, {}), (fed, fed, {})),
        (fed | spaced, fed, spaced),
    ):
        stream = {"kind": "finetuning", "source": {"path": "a", **source}}
        recipe = open_recipe(write_recipe(tmp_path, tmp_path, streams={"s": stream}))
        resolved = resolve_stream(recipe, recipe.streams["s"], lettered)
        encoding = resolved.encoding
        assert (encoding.fields, encoding.shape_options) == (fields, options)
        assert encoding.shape is None
        assert {*resolved.fields_read} == {*fields.values(), *EXTRAS}


def test_messages_reach_the_template_as_they_are() -> None:
    """Plain ones as a plain conversation: so they are rendered once, as those of Foundry's
    shape.
    """
    rich = [ASKED, call('{"n": 1}'), RESULT, call({"n": 1}, content="Wait."), RESULT, ANSWERED]
    assert type(openai(*rich)) is RichConversation
    assert openai(*rich) == RichConversation(rich, None, TOOLS)
    for tools, known in ((None, None), ("", None), ([], []), ("[]", [])):
        found = openai(ASKED | {"weight": None}, ANSWERED | {"weight": 1}, tools=tools)
        assert type(found) is Conversation
        assert found == Conversation([ASKED, ANSWERED], None, known)
    told = {"role": "developer", "content": "Be brief."}
    assert type(openai(told, ASKED, ANSWERED, tools=None)) is RichConversation
    parts = [{"type": "text", "text": "one "}, {"type": "text", "value": "two"}]
    found = openai(ASKED | {"content": parts}, ANSWERED | {"content": parts[:1]}, tools=None)
    assert [m["content"] for m in found.messages] == ["one two", "one "]


@given(st.lists(FLAGS, min_size=1, max_size=4))
def test_a_flag_says_whether_a_message_is_trained(flags: list[dict[str, Any]]) -> None:
    found = openai(*[m for flag in flags for m in (ASKED, ANSWERED | flag)])
    expected = [all(value is None or value for value in flag.values()) for flag in flags]
    assert found.messages == [ASKED, ANSWERED] * len(flags)
    said = [trained for each in expected for trained in (True, each)]
    assert found.trained == (None if all(expected) else said)


def test_numbers_of_any_size_and_values_of_arrow_have_a_canonical_form() -> None:
    """So that they can be held out and compared: 2^70 is no number of orjson's, a Decimal
    no JSON.
    """
    huge = '[{"name": "f", "parameters": {"maximum": 1180591620717411303424}}]'
    calls = [call({"n": Decimal(n)}) for n in ("1.50", "1.50", "1.5")]
    one, same, other = (canonical(openai(ASKED, each, tools=huge)) for each in calls)
    assert b"1180591620717411303424" in one
    assert one == same != other


def test_nulls_stay_unless_they_are_dropped() -> None:
    """As Arrow adds them where the objects of a list differ; a null inside of JSON text is the
    record's own.
    """
    said = [
        ASKED | {"tool_calls": None},
        call({"city": "X", "n": None}),
        RESULT | {"name": None},
        call('{"n": null}'),
    ]
    tools = [{"type": None, "function": {"name": "f", "strict": None, "parameters": {}}}]
    kept = [ASKED, *said[1:]]  # null for calls means that a message calls nothing
    assert openai(*said, tools=tools) == RichConversation(kept, None, tools)
    dropped = openai(*said, tools=tools, nulls="drop")
    asked, called, result, texts = dropped.messages
    assert (asked, result) == (ASKED, RESULT)
    assert called["tool_calls"][0]["function"]["arguments"] == {"city": "X"}
    assert texts["tool_calls"][0]["function"]["arguments"] == '{"n": null}'
    assert dropped.tools == [{"function": {"name": "f", "parameters": {}}}]
    nulls = {"messages": [message | {"tool_calls": None} for message in (ASKED, ANSWERED)]}
    assert read("messages", nulls, nulls="drop") == Conversation([ASKED, ANSWERED])


def test_parallel_calls_have_results_one_after_the_other() -> None:
    second = {"id": "c2", "function": {"name": "f", "arguments": "{}"}}
    both = call(tool_calls=[*call()["tool_calls"], second])
    said = [ASKED, both, RESULT, RESULT | {"tool_call_id": "c2"}, ANSWERED]
    assert len(openai(*said).messages) == len(openai(*said, **MERGED).messages) == 5
    items = [*GLAIVE[:3], *GLAIVE[2:]]
    assert len(sharegpt(items, MERGED, tools=[TOOL]).messages) == 5


def test_an_empty_text_vanishes_in_a_merge_and_an_answer_that_stays_empty_is_bad() -> None:
    """The same in `messages`, where LLM-Foundry takes an empty answer."""
    for texts in itertools.product(("", "so", "more"), repeat=2):
        said = [ASKED, *({"role": "assistant", "content": text} for text in texts)]
        whole = "\n\n".join(filter(None, texts))
        merged = Conversation([ASKED, {"role": "assistant", "content": whole}])
        assert read("messages", {"messages": said}, **MERGED) == merged
        assert openai(*said, tools=None, **MERGED) == (merged if whole else "empty_answer")
        assert openai(*said, tools=None) == ("repeated_role" if all(texts) else "empty_answer")


@given(st.lists(WORDS, min_size=7, max_size=7, unique=True))
def test_renamed_keys_and_roles_give_the_same_conversation(words: list[str]) -> None:
    tags = dict(zip(TAGS, words, strict=True))
    named = {TAGS[tag]: word for tag, word in tags.items()}
    items = [item("system", "Be brief."), *GLAIVE]
    renamed = [{named["from"]: named[m["from"]], named["value"]: m["value"]} for m in items]
    assert sharegpt(renamed, {"tags": tags}, tools=[TOOL]) == sharegpt(items, tools=[TOOL])
    assert sharegpt(items, {"tags": tags}) in ("bad_message_keys", "unknown_role")


def test_messages_of_one_role_are_merged_where_that_is_asked_for() -> None:
    headed = [item("system", "Be brief."), A, B]
    alone = sharegpt([A, B], system="Be brief.")
    assert sharegpt(headed, system="Be long.") == sharegpt(headed) == alone
    assert sharegpt(headed, MERGED, system="y").messages[0]["content"] == "y\n\nBe brief."
    found = sharegpt([A, item("human", "b"), item("gpt", "c"), item("gpt", "d")], MERGED)
    assert [m["content"] for m in found.messages] == ["a\n\nb", "c\n\nd"]
    beside = sharegpt([A, item("gpt", "Wait."), *GLAIVE[1:]], MERGED, tools=[TOOL])
    assert beside.messages[1]["content"] == "Wait."
    assert beside.messages[1]["tool_calls"][0]["function"] == CALL
    after = [A, GLAIVE[1], GLAIVE[3]]  # what a call gave is missing
    assert sharegpt(after, MERGED, tools=[TOOL]) == "repeated_role"
    half = [A, B | {"weight": 0}, item("gpt", "c")]
    assert sharegpt(half, MERGED) == "repeated_role", "only one answer is trained"
    said = say("user", "user", "assistant", "tool", "tool", "assistant")
    found = read("messages", {"messages": said}, **MERGED)
    texts = ["user 0\n\nuser 1", "assistant 2", "tool 3\n\ntool 4", "assistant 5"]
    assert [m["content"] for m in found.messages] == texts
    assert read("messages", {"messages": [3]}, **MERGED) == "bad_message_keys"
