"""Marks, which say whether a message is trained, under any key and in any shape; and what a record
gives to the chat template.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.kinds.read_records import RecordReader
from mdsmix.record import Conversation, canonical, detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.extras import OBJECTS
from tests.test_shapes_refused import ANSWERED, ASKED

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
SAID = st.lists(st.sampled_from([0, 1, False, True, 0.0, 1.0, None]), min_size=1, max_size=4)
SYSTEM = {"system": "Be brief."}


def read(name: str, record: Any, **options: Any) -> Any:
    return SHAPES[name].read(record, SHAPES[name].own_fields, **options)


def talk(count: int) -> list[dict[str, Any]]:
    """So many questions, each with its answer."""
    return [
        {"role": role, "content": f"{role} {number}"}
        for number in range(count)
        for role in ("user", "assistant")
    ]


def marked(shape: str, key: str, marks: list[Any]) -> dict[str, Any]:
    """A record of a shape whose answers have these marks under the key."""
    said = [m | {key: mark} for m in talk(len(marks)) for mark in [marks[int(m["content"][-1])]]]
    said = [m if m["role"] == "assistant" else {**m, key: 0} for m in said]
    if shape == "rounds":
        asked, answered = said[::2], said[1::2]
        each = zip(asked, answered, strict=True)
        return {
            "conversation": [
                {"human": q["content"], "assistant": a["content"], key: a[key]} for q, a in each
            ]
        }
    if shape == "openai":
        return {"messages": said}
    names = (
        {"user": "user", "assistant": "assistant"}
        if shape == "qwen_vl"
        else {"user": "human", "assistant": "gpt"}
    )
    items = [{"from": names[m["role"]], "value": m["content"], key: m[key]} for m in said]
    return {"conversations": items}


@pytest.mark.parametrize("shape", ["openai", "sharegpt", "llava", "qwen_vl", "rounds"])
@pytest.mark.parametrize("key", KEYS)
@given(marks=SAID)
def test_a_mark_means_the_same_under_every_key(shape: str, key: str, marks: list[Any]) -> None:
    found = read(
        shape, marked(shape, key, marks), **{"train_mark": "mine"} if key == "mine" else {}
    )
    assert [m["content"] for m in found.messages] == [m["content"] for m in talk(len(marks))]
    assert all(message.keys() == {"role", "content"} for message in found.messages)
    trained = [mark is None or bool(mark) for mark in marks]
    if found.trained is None:
        assert all(trained)
    else:
        assert found.trained[1::2] == trained


PLAIN: dict[str, Any] = {
    "messages": {"messages": talk(2)},
    "openai": {"messages": talk(2)},
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
        *((marks, None) for marks in (None, "", [1, 1])),
    ):
        found = read(shape, record | {"loss_mask": marks})
        assert found.trained == trained, marks
        if shape in ("sharegpt", "llava", "qwen_vl", "rounds", "alpaca"):
            headed = read(shape, record | SYSTEM | {"loss_mask": marks})
            assert headed.trained == (trained and [True, *trained]), "the system is another field"
    assert read(shape, record).trained is None
    assert read(shape, record | {"loss_mask": [1, 1, 1, 1]}) == "trained_prompt"
    for marks in ([0, 0.5], [0, "1"], [[0], 1]):
        assert read(shape, record | {"loss_mask": marks}) == "bad_weight"
    for marks, entries in (([0], 1), ([0, 0, 1], 3), ([], 0), (1, 0), ("x", 0)):
        found = read(shape, record | {"loss_mask": marks})
        assert found == "bad_loss_mask"
        assert detail_of(found) == {"entries": entries, "messages": 4, "answers": 2}


def test_marks_that_disagree_make_a_bad_record() -> None:
    told: Any = {"messages": [ASKED, ANSWERED | {"weight": 1}]}
    for others in ({"training": False}, {"mine": 0}):
        said = {"messages": [ASKED, ANSWERED | {"weight": 1} | others]}
        assert read("openai", said, train_mark="mine") == "bad_weight"
    assert read("openai", told | {"loss_mask": [0, 0]}) == "bad_weight"
    assert read("openai", told | {"loss_mask": [1], "mine": [0]}, train_mark="mine") == "bad_weight"
    assert read("openai", told | {"loss_mask": [1]}).trained is None
    for shape in ("messages", "openai"):
        said = {"messages": talk(1), "mine": [0]}
        assert read(shape, said, train_mark="mine").trained == [True, False]
        assert read(shape, said).trained is None
    named = {"messages": [ASKED, ANSWERED | {"mine": 0}]}
    assert read("messages", named, train_mark="mine").trained == [True, False]
    assert read("messages", named) == "bad_message_keys"


def test_a_preference_without_its_marks_is_the_same_and_an_untrained_answer_is_none() -> None:
    before, (asked, answer) = talk(1), talk(1)
    said = {"chosen": [*before, asked, answer], "rejected": [*before, asked, ANSWERED]}
    plain = read("preference", said)
    weighed = {
        side: [
            *(message | {"weight": 0} for message in messages[:-1]),
            messages[-1] | {"trainable": True},
        ]
        for side, messages in said.items()
    }
    assert read("preference", weighed) == plain
    untrained = [*said["chosen"][:-1], answer | {"loss_mask": 0}]
    assert read("preference", said | {"chosen": untrained}) == "nothing_trained"
    assert read("preference", said | {"rejected": untrained}) == "nothing_trained"


@pytest.mark.parametrize("shape", [*PLAIN, "preference"])
def test_the_variables_of_a_record_are_in_its_conversation(shape: str) -> None:
    record = PLAIN.get(shape) or {"chosen": talk(1), "rejected": [ASKED, ANSWERED]}
    plain = read(shape, record)
    for none in (None, {}, "", "{}", "null", {"enable_thinking": None}):
        assert read(shape, record | {"chat_template_kwargs": none}) == plain
    want = {"enable_thinking": False, "custom": {"a": [1]}}
    filled = want | {"reasoning_effort": None, "custom": {"a": [1], "b": None}}
    for given_ in (want, filled, '{"enable_thinking": false, "custom": {"a": [1]}}'):
        found = read(shape, record | {"chat_template_kwargs": given_})
        halves = found[:2] if shape == "preference" else [found]
        assert all(half.variables == want for half in halves)
        bare = [half._replace(variables=None) for half in halves]
        assert bare == [*plain[:2]] if shape == "preference" else bare == [plain]
    for wrong in (
        3,
        [1],
        "{",
        "text",
        {"tools": []},
        {"add_generation_prompt": True},
        {"tokenize": False},
    ):
        bad = read(shape, record | {"chat_template_kwargs": wrong})
        assert bad == "bad_template_kwargs"
        assert detail_of(bad)["why"]
    lone = {"chat_template_kwargs": {"style": "\ud800"}}
    assert read(shape, record | lone) == "lone_surrogate"


def test_records_with_other_variables_say_something_else() -> None:
    said = [
        read("messages", {"messages": talk(1), "chat_template_kwargs": {"a": n}}) for n in (1, 2)
    ]
    plain = read("messages", {"messages": talk(1)})
    assert len({*map(canonical, [*said, plain])}) == 3
    assert canonical(plain) == canonical(Conversation(talk(1)))
    assert said[0].texts == [*plain.texts, "a"]


@pytest.mark.parametrize("word", ["<ref-object>", "<bbox>"])
def test_objects_that_are_not_filled_in_make_a_bad_record(word: str) -> None:
    held = {OBJECTS: {"ref": ["a cat"], "bbox": [[0, 0, 9, 9]]}}
    said = {"messages": [ASKED, ANSWERED | {"content": f"It is {word}."}]}
    assert read("messages", said | held) == read("openai", said | held) == "objects_not_filled"
    assert read("messages", said) == Conversation(said["messages"])
    assert read("messages", {"messages": talk(1)} | held) == Conversation(talk(1))


@pytest.mark.parametrize("shape", ["messages", "openai"])
def test_extras_are_read_beside_a_list_that_a_path_leads_to(shape: str) -> None:
    """As in an archive, whose record is the member `json`."""
    said = {"messages": talk(2), "loss_mask": [0, 1], "chat_template_kwargs": {"a": 1}}
    found = RecordReader(SHAPES[shape], {"messages": "json.messages"}).read(
        [{"json": said}, said | {"json": {"messages": talk(1)}}]
    )
    assert (found[0].trained, found[0].variables) == ([True, False, True, True], {"a": 1})
    assert found[1].trained == [False, True], "what is at the top of the record wins"
