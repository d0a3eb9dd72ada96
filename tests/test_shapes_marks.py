"""Marks, which decide whether a message is trained, under any key and in any shape; and the
variables that a record gives to the chat template.
"""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import chain, product
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.kinds.read_records import RecordReader
from mdsmix.record import (
    AnswerLoss,
    Conversation,
    Span,
    canonical,
    canonical_forms,
    detail_of,
)
from mdsmix.shapes import SHAPES
from mdsmix.shapes.extras import OBJECTS
from tests.test_shapes_refused import ANSWER, QUESTION

KEYS = (
    "train",
    "weight",
    "loss",
    "loss_weight",
    "loss_mask",
    "step_loss_mask",
    "training",
    "trainable",
    "mine",
)
MARKS = st.lists(st.sampled_from([0, 1, False, True, 0.0, 1.0, None]), min_size=1, max_size=4)
SORTED = orjson.OPT_SORT_KEYS
SYSTEM = {"system": "Be brief."}


def read(name: str, record: Any, **options: Any) -> Any:
    return SHAPES[name].read(record, SHAPES[name].own_fields, **options)


def exchanges(count: int) -> list[dict[str, Any]]:
    """Return this many questions, each with its answer."""
    return [
        {"role": role, "content": f"{role} {number}"}
        for number in range(count)
        for role in ("user", "assistant")
    ]


def marked_record(shape: str, key: str, marks: list[Any]) -> dict[str, Any]:
    """Return a record of a shape whose answers have these marks under the key, and questions 0."""
    messages = exchanges(len(marks))
    for message in messages:
        message[key] = 0
    for answer, mark in zip(messages[1::2], marks, strict=True):
        answer[key] = mark
    if shape == "openai":
        return {"messages": messages}
    if shape == "rounds":
        rounds = [
            {"human": question["content"], "assistant": answer["content"], key: answer[key]}
            for question, answer in zip(messages[::2], messages[1::2], strict=True)
        ]
        return {"conversation": rounds}
    names = {"user": "human", "assistant": "gpt"}
    if shape == "qwen_vl":
        names = {"user": "user", "assistant": "assistant"}
    items = [{"from": names[m["role"]], "value": m["content"], key: m[key]} for m in messages]
    return {"conversations": items}


@pytest.mark.parametrize("shape", ["openai", "sharegpt", "llava", "qwen_vl", "rounds"])
@pytest.mark.parametrize("key", KEYS)
@given(marks=MARKS)
def test_a_mark_means_the_same_under_every_key(shape: str, key: str, marks: list[Any]) -> None:
    options = {"train_mark": "mine"} if key == "mine" else {}
    conversation = read(shape, marked_record(shape, key, marks), **options)
    contents = [message["content"] for message in conversation.messages]
    assert contents == [message["content"] for message in exchanges(len(marks))]
    assert all(message.keys() == {"role", "content"} for message in conversation.messages)
    trained = [mark is None or bool(mark) for mark in marks]
    if conversation.trained is None:
        assert all(trained)
    else:
        assert conversation.trained[1::2] == trained


PLAIN: dict[str, Any] = {
    "messages": {"messages": exchanges(2)},
    "openai": {"messages": exchanges(2)},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2
    },
    "llava": {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2
    },
    "qwen_vl": {
        "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}] * 2
    },
    "rounds": {"conversation": [{"human": "a", "assistant": "b"}] * 2},
    "alpaca": {"instruction": "a", "output": "b", "history": [["c", "d"]]},
}
"Shape -> a record of two questions and two answers."


@pytest.mark.parametrize("shape", PLAIN)
def test_a_list_of_marks_has_an_entry_for_each_message_or_each_answer(shape: str) -> None:
    record = PLAIN[shape]
    for marks, trained in (
        ([0, 0, 0, 1], [False, False, False, True]),
        ([False, True], [True, False, True, True]),
        ([None, 0.0, None, 1.0], [True, False, True, True]),
        ("[0, 1]", [True, False, True, True]),
        (None, None),
        ("", None),
        ([1, 1], None),
    ):
        conversation = read(shape, record | {"loss_mask": marks})
        assert conversation.trained == trained, marks
        if shape in ("sharegpt", "llava", "qwen_vl", "rounds", "alpaca"):
            conversation = read(shape, record | SYSTEM | {"loss_mask": marks})
            expected = trained and [True, *trained]
            assert conversation.trained == expected, "marks do not count another field"
    assert read(shape, record).trained is None
    assert read(shape, record | {"loss_mask": [1, 1, 1, 1]}) == "trained_prompt"
    for marks in ([0, 0.5], [0, "1"], [[0], 1]):
        assert read(shape, record | {"loss_mask": marks}) == "bad_mark"
    for marks, entries in (([0], 1), ([0, 0, 1], 3), ([], 0), (1, 0), ("x", 0)):
        reason = read(shape, record | {"loss_mask": marks})
        assert reason == "bad_loss_mask"
        assert detail_of(reason) == {"entries": entries, "messages": 4, "answers": 2}


@pytest.mark.parametrize("shape", ["messages", "openai", "sharegpt"])
def test_lists_of_marks_are_read_at_once_as_one_by_one(shape: str) -> None:
    """Each list alone, and all lists that can be read at once together: no flag is mixed up."""
    fields = SHAPES[shape].own_fields
    values = (0, 1, True, 0.0, None, 2, 0.5, "1", [1])
    masks: list[Any] = [None, "", "[0, 1]", [], [1], [0, 0, 0], [0, 0, 0, 1, 0], 1]
    masks += [[*marks] for marks in product(values, repeat=2)]
    masks += [[0, first, None, second] for first, second in product(values, repeat=2)]
    masks.append([1, 0, 0, 0])
    record: dict[str, Any] = PLAIN[shape]
    read_at_once = list[dict[str, Any]]()
    for mask in masks:
        marked = record | {"loss_mask": mask}
        one_by_one = read(shape, marked)
        together = SHAPES[shape].read_plain([record, marked], fields)
        if together is not None:
            assert [*together] == [read(shape, record), one_by_one], mask
            read_at_once.append(marked)
        else:  # a reason code, or a mask that is JSON text
            assert isinstance(one_by_one, str) or isinstance(mask, str), mask
    assert len(read_at_once) > 40
    together = SHAPES[shape].read_plain(read_at_once, fields)
    assert together is not None
    assert [*together] == [read(shape, marked) for marked in read_at_once]
    # A prompt with a list of marks and a key of its own.
    if shape == "openai":
        messages = [message | {"weight": int("content" in message)} for message in exchanges(2)]
        messages[0]["weight"] = messages[2]["weight"] = 0
        twice_marked = {"messages": messages, "loss_mask": [1, 0]}
        assert read(shape, twice_marked) == "bad_mark"
        assert SHAPES[shape].read_plain([twice_marked], fields) is None


RANGES = st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from([True, False, 1, 0.5, 3]))
WEIGHTS = st.sampled_from([None, 0, 1, True, 0.0, 0.5, 0.25, 2, "1"])
MESSAGE_MARKS = st.fixed_dictionaries(
    {},
    optional={
        "weight": WEIGHTS,
        "loss": WEIGHTS,
        "train_detail": st.none() | st.lists(RANGES, max_size=3),
    },
)


def draw_marked(shape: str, marks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record whose answers have these marks, and whose questions have none."""
    names = {"user": "human", "assistant": "gpt"}
    items = list[dict[str, Any]]()
    for message, of_answer in zip(
        exchanges(len(marks)), chain.from_iterable(({}, one) for one in marks), strict=True
    ):
        item = {**of_answer}
        if of_answer.get("train_detail"):
            item["train_detail"] = [
                {"begin_offset": first, "end_offset": first + more, "weight": weight}
                for first, more, weight in of_answer["train_detail"]
            ]
        if shape == "sharegpt":
            items.append({"from": names[message["role"]], "value": message["content"], **item})
        else:
            items.append({"content": message["content"], **item, "role": message["role"]})
    return {"conversations" if shape == "sharegpt" else "messages": items}


@pytest.mark.parametrize("shape", ["openai", "sharegpt"])
@pytest.mark.parametrize("options", [{}, {"loss_weights": True}], ids=["marks", "weights"])
@given(answers=st.lists(st.lists(MESSAGE_MARKS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_weights_and_ranges_are_read_at_once_as_one_by_one(
    shape: str, options: dict[str, Any], answers: list[list[dict[str, Any]]]
) -> None:
    records = [draw_marked(shape, marks) for marks in answers]
    one_by_one = [read(shape, record, **options) for record in records]
    together = SHAPES[shape].read_plain(records, SHAPES[shape].own_fields, **options)
    if together is None:
        assert any(isinstance(conversation, str) for conversation in one_by_one)
        return
    assert [*together] == one_by_one
    assert [*canonical_forms(together)] == [*map(canonical, one_by_one)]
    # A template may print whole messages, with their keys in order.
    for conversation, read_alone in zip(together, one_by_one, strict=True):
        assert [*map(list, conversation.messages)] == [*map(list, read_alone.messages)]


def test_marks_that_disagree_make_a_bad_record() -> None:
    marked: Any = {"messages": [QUESTION, ANSWER | {"weight": 1}]}
    for mark in ({"training": False}, {"mine": 0}):
        twice_marked = {"messages": [QUESTION, ANSWER | {"weight": 1} | mark]}
        assert read("openai", twice_marked, train_mark="mine") == "bad_mark"
    assert read("openai", marked | {"loss_mask": [0, 0]}) == "bad_mark"
    two_lists = marked | {"loss_mask": [1], "mine": [0]}
    assert read("openai", two_lists, train_mark="mine") == "bad_mark"
    assert read("openai", marked | {"loss_mask": [1]}).trained is None


def test_a_recipe_may_name_a_further_mark() -> None:
    for shape in ("messages", "openai"):
        listed = {"messages": exchanges(1), "mine": [0]}
        assert read(shape, listed, train_mark="mine").trained == [True, False]
        assert read(shape, listed).trained is None
    marked = {"messages": [QUESTION, ANSWER | {"mine": 0}]}
    assert read("messages", marked, train_mark="mine").trained == [True, False]
    assert read("messages", marked) == "bad_message_keys"


def test_marks_do_not_change_a_preference_but_an_untrained_answer_leaves_it_out() -> None:
    prompt, (question, answer) = exchanges(1), exchanges(1)
    record = {
        "chosen": [*prompt, question, answer],
        "rejected": [*prompt, question, ANSWER],
    }
    marked = {
        side: [
            *(message | {"weight": 0} for message in messages[:-1]),
            messages[-1] | {"trainable": True},
        ]
        for side, messages in record.items()
    }
    assert read("preference", marked) == read("preference", record)
    untrained = [*record["chosen"][:-1], answer | {"loss_mask": 0}]
    assert read("preference", record | {"chosen": untrained}) == "nothing_trained"
    assert read("preference", record | {"rejected": untrained}) == "nothing_trained"


@pytest.mark.parametrize("shape", [*PLAIN, "preference"])
def test_the_variables_of_a_record_are_in_its_conversation(shape: str) -> None:
    record = PLAIN.get(shape) or {"chosen": exchanges(1), "rejected": [QUESTION, ANSWER]}
    plain = read(shape, record)
    for empty in (None, {}, "", "{}", "null", {"enable_thinking": None}):
        assert read(shape, record | {"chat_template_kwargs": empty}) == plain
    variables = {"enable_thinking": False, "custom": {"a": [1]}}
    with_nulls = variables | {"reasoning_effort": None, "custom": {"a": [1], "b": None}}
    as_text = '{"enable_thinking": false, "custom": {"a": [1]}}'
    for value in (variables, with_nulls, as_text):
        parsed = read(shape, record | {"chat_template_kwargs": value})
        halves = parsed[:2] if shape == "preference" else [parsed]
        plain_halves = [*plain[:2]] if shape == "preference" else [plain]
        assert all(half.variables == variables for half in halves)
        assert [half._replace(variables=None) for half in halves] == plain_halves
    for wrong in (
        3,
        [1],
        "{",
        "text",
        {"tools": []},
        {"add_generation_prompt": True},
        {"tokenize": False},
    ):
        reason = read(shape, record | {"chat_template_kwargs": wrong})
        assert reason == "bad_template_kwargs"
        assert detail_of(reason)["why"]
    lone = {"chat_template_kwargs": {"style": "\ud800"}}
    assert read(shape, record | lone) == "lone_surrogate"


def test_records_that_differ_only_in_variables_are_not_duplicates() -> None:
    record = {"messages": exchanges(1)}
    plain = read("messages", record)
    with_variables = [
        read("messages", record | {"chat_template_kwargs": {"a": number}}) for number in (1, 2)
    ]
    assert len({*map(canonical, [*with_variables, plain])}) == 3
    assert canonical(plain) == canonical(Conversation(exchanges(1)))
    assert with_variables[0].texts == [*plain.texts, "a"]


@pytest.mark.parametrize("word", ["<ref-object>", "<bbox>"])
def test_objects_that_are_not_filled_in_make_a_bad_record(word: str) -> None:
    objects = {OBJECTS: {"ref": ["a cat"], "bbox": [[0, 0, 9, 9]]}}
    record = {"messages": [QUESTION, ANSWER | {"content": f"It is {word}."}]}
    for shape in ("messages", "openai"):
        assert read(shape, record | objects) == "objects_not_filled"
    assert read("messages", record) == Conversation(record["messages"])
    without_word = {"messages": exchanges(1)}
    assert read("messages", without_word | objects) == Conversation(exchanges(1))


@pytest.mark.parametrize("shape", ["messages", "openai"])
def test_extras_are_read_next_to_a_list_that_a_path_names(shape: str) -> None:
    """As in an archive, whose record is the member `json`."""
    record = {"messages": exchanges(2), "loss_mask": [0, 1], "chat_template_kwargs": {"a": 1}}
    nested, at_top = RecordReader(SHAPES[shape], {"messages": "json.messages"}).read(
        [{"json": record}, record | {"json": {"messages": exchanges(1)}}]
    )
    assert (nested.trained, nested.variables) == ([True, False, True, True], {"a": 1})
    assert at_top.trained == [False, True], "extras at the top of the record win"


def test_the_canonical_form_of_a_conversation_with_losses_is_unchanged() -> None:
    """Samples, holdouts and duplicates depend on it: the JSON of Python, with spaces."""
    messages = exchanges(1)
    losses = [None, AnswerLoss((Span(0, 4),), 0.5)]
    form = canonical(Conversation(messages, [False, True], losses=losses))
    fields = [messages, [False, True], None, [], None, losses]
    assert form == json.dumps(fields, sort_keys=True, ensure_ascii=False).encode()
    # A user's function may return a list without any loss.
    without = canonical(Conversation(messages, losses=[None, None]))
    assert without == orjson.dumps([messages, None, None, [], None, [None, None]], option=SORTED)


def test_a_decimal_is_no_weight_beside_an_equal_number() -> None:
    """Files of one batch may have weights of different types."""
    records = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "weight": weight},
            ]
        }
        for weight in (0.5, Decimal("0.50"))
    ]
    fields = {"messages": "messages"}
    assert SHAPES["openai"].read_plain(records, fields, loss_weights=True) is None
    read = [SHAPES["openai"].read(record, fields, loss_weights=True) for record in records]
    assert read[0].losses[1].weight == 0.5
    assert read[1] == "bad_mark"
