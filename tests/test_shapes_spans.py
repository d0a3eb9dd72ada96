"""Which characters of an answer a record marks as trained: axolotl's `train_detail`, and parts of a
content that have marks.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mdsmix.record import AnswerLoss, Span, canonical, detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import with_images
from tests.test_shapes_refused import ANSWER, QUESTION, span_entry

TEXT = "One two three."


def read(answer: dict[str, Any], shape: str = "openai", **options: Any) -> Any:
    """Return the conversation of a question and this answer."""
    if shape == "sharegpt":
        items = [{"from": "human", "value": "?"}, {"from": "gpt", "value": TEXT} | answer]
        record: dict[str, Any] = {"conversations": items}
    else:
        record = {"messages": [QUESTION, ANSWER | {"content": TEXT} | answer]}
    return SHAPES[shape].read(record, SHAPES[shape].own_fields, **options)


def marked_text(conversation: Any) -> str:
    """Return the content of the answer with the trained characters in brackets."""
    content: str = conversation.messages[1]["content"]
    if conversation.losses is None:
        is_trained = conversation.trained is None or conversation.trained[1]
        return f"[{content}]" if is_trained else content
    spans = conversation.losses[1].spans
    for start, end, _ in reversed(spans):
        content = f"{content[:start]}[{content[start:end]}]{content[end:]}"
    return content


@pytest.mark.parametrize("shape", ["openai", "sharegpt"])
@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([span_entry(0, 2)], "[One] two three."),
        ([span_entry(0.0, 2.0)], "[One] two three."),
        ([span_entry(4, 4)], "One [t]wo three."),
        ([span_entry(0, 13)], "[One two three.]"),
        ([span_entry(8, 13), span_entry(0, 2)], "[One] two [three.]"),
        ([span_entry(0, 3), span_entry(4, 6)], "[One two] three."),
        ([span_entry(0, 5), span_entry(4, 6)], "[One two] three."),
        ([span_entry(0, 2, train=False), span_entry(8, 13)], "One two [three.]"),
        ([span_entry(0, 2, train=0), span_entry(8, 13, train=1)], "One two [three.]"),
        ([span_entry(0, 13, train=False)], TEXT),
        ([], TEXT),
        (None, f"[{TEXT}]"),
    ],
)
def test_the_end_of_a_range_is_its_last_character(shape: str, entries: Any, expected: str) -> None:
    """As in axolotl, which leaves characters without an entry untrained."""
    conversation = read({"train_detail": entries}, shape)
    assert marked_text(conversation) == expected
    assert all("train_detail" not in message for message in conversation.messages)


def test_a_mark_of_the_message_goes_before_its_ranges() -> None:
    detail = {"train_detail": [span_entry(0, 2)]}
    assert marked_text(read(detail | {"train": True})) == "[One] two three."
    assert marked_text(read(detail | {"weight": 0})) == TEXT
    # axolotl trains such a message as a whole.
    assert marked_text(read({"train_detail": [], "train": True})) == f"[{TEXT}]"


def test_offsets_count_characters_of_any_width() -> None:
    content = "\U0001f600é\U0001f600 ab"
    answer = {"content": content, "train_detail": [span_entry(2, 4)]}
    assert marked_text(read(answer)) == "\U0001f600é[\U0001f600 a]b"


def text_part(text: str, **keys: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **keys}


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([text_part("One "), text_part("two", train=False)], "[One ]two"),
        ([text_part("One ", weight=0), text_part("two", weight=1)], "One [two]"),
        ([text_part("One ", train=False), text_part(""), text_part("two")], "One [two]"),
        ([text_part("One ", train=True), text_part("two", train=None)], "[One two]"),
        ([text_part("One ", train=False), text_part("two", weight=0)], "One two"),
        ([text_part("One "), text_part("two")], "[One two]"),
    ],
)
def test_a_part_may_say_whether_it_is_trained(
    parts: list[Any], expected: str, images: bool
) -> None:
    """As in axolotl; also in a stream of images, where texts are joined before the shape."""
    shape = with_images(SHAPES["openai"], []) if images else SHAPES["openai"]
    record = {"messages": [QUESTION, ANSWER | {"content": parts}]}
    assert marked_text(shape.read(record, shape.own_fields)) == expected


def test_parts_with_marks_and_ranges_contradict() -> None:
    parts = [text_part("One", train=False)]
    reason = read({"content": parts, "train_detail": [span_entry(0, 0)]})
    assert reason == "bad_span"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (span_entry(0, 14), "the last character of the content is at offset 13"),
        (span_entry(5, 4), "ends before it begins"),
        (span_entry(0, "4"), "not a whole number"),
        ({"begin_offset": 0, "end_offset": 3}, "lacks begin_offset, end_offset or train"),
    ],
)
def test_the_detail_says_what_is_wrong(entry: Any, words: str) -> None:
    assert words in str(detail_of(read({"train_detail": [span_entry(0, 0), entry]}))["why"])


def test_characters_do_not_move_by_merging() -> None:
    """The separator would have to be trained or not, and the offsets moved."""
    detail = {"train_detail": [span_entry(0, 2)]}
    answers = [ANSWER | {"content": TEXT} | detail, ANSWER]
    shape = SHAPES["openai"]
    options = {"consecutive_roles": "merge"}
    merged = {"messages": [QUESTION, *answers]}
    assert shape.read(merged, shape.own_fields, **options) == "merged_spans"
    assert marked_text(read(detail, **options)) == "[One] two three."


def test_ranges_in_a_preference_are_refused() -> None:
    """Its loss is of the whole answer. Ranges of earlier answers are in the prompt."""
    marked = ANSWER | {"train_detail": [span_entry(0, 0)]}
    unmarked = ANSWER | {"content": "No."}
    for name in ("preference", "preference_openai"):
        shape = SHAPES[name]
        record = {"chosen": [QUESTION, marked], "rejected": [QUESTION, unmarked]}
        assert shape.read(record, shape.own_fields) == "bad_span"
        earlier = [QUESTION, marked, QUESTION]
        record = {"chosen": [*earlier, ANSWER], "rejected": [*earlier, unmarked]}
        preference = shape.read(record, shape.own_fields)
        assert preference.chosen.losses is preference.rejected.losses is None
    unpaired = SHAPES["unpaired_preference"]
    labelled = {"prompt": [QUESTION], "completion": [marked], "label": True}
    assert unpaired.read(labelled, unpaired.own_fields) == "bad_span"
    labelled |= {"prompt": [QUESTION, marked, QUESTION], "completion": [ANSWER]}
    assert unpaired.read(labelled, unpaired.own_fields).answer.losses is None
    prompt = SHAPES["prompt"]
    prompt_of_record = prompt.read({"prompt": [QUESTION, marked, QUESTION]}, prompt.own_fields)
    assert prompt_of_record.prompt.losses is None
    sharegpt = SHAPES["preference_sharegpt"]
    halves = {
        "conversations": [{"from": "human", "value": "?"}],
        "chosen": {"from": "gpt", "value": TEXT, "train_detail": [span_entry(0, 0)]},
        "rejected": {"from": "gpt", "value": "No."},
    }
    assert sharegpt.read(halves, sharegpt.own_fields) == "bad_span"


def test_records_that_differ_only_in_ranges_are_not_duplicates() -> None:
    records = [
        read({"train_detail": detail})
        for detail in (None, [span_entry(0, 2)], [span_entry(0, 3)], [span_entry(0, 13)])
    ]
    assert len({*map(canonical, records)}) == 4
    assert canonical(records[0]) == canonical(read({}))


@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), min_size=1, max_size=5))
def test_a_character_is_trained_if_an_entry_names_it(pairs: list[tuple[int, int]]) -> None:
    entries = [span_entry(min(pair), max(pair)) for pair in pairs]
    loss = read({"train_detail": entries}).losses[1]
    named = {offset for begin, end in map(sorted, pairs) for offset in range(begin, end + 1)}
    assert isinstance(loss, AnswerLoss)
    spans = loss.spans or ()
    assert {offset for span in spans for offset in range(span.start, span.end)} == named
    assert all(isinstance(span, Span) and span.weight == 1 for span in spans)
    edges = [edge for span in spans for edge in (span.start, span.end)]
    assert edges == sorted(set(edges)), "ascending, apart from each other"


@given(
    st.lists(
        st.tuples(st.integers(0, 13), st.integers(0, 13), st.sampled_from([0, 0.5, 1])),
        min_size=1,
        max_size=5,
    )
)
@example([(0, 13, 1), (1, 2, 1), (5, 6, 0)])
@example([(0, 13, 0.5), (1, 2, 0.5), (5, 6, 1)])
def test_entries_that_differ_on_a_character_contradict(
    entries: list[tuple[int, int, float]],
) -> None:
    """Also if an entry between them agrees with both."""
    weights: list[set[float]] = [set() for _ in TEXT]
    for first, second, weight in entries:
        for offset in range(min(first, second), max(first, second) + 1):
            weights[offset].add(weight)
    detail = [
        {"begin_offset": min(pair), "end_offset": max(pair), "weight": weight}
        for *pair, weight in entries
    ]
    conversation = read({"train_detail": detail}, loss_weights=True)
    if max(map(len, weights)) > 1:
        assert conversation == "bad_span"
    elif any(map(any, weights)):
        read_weights = [0.0] * len(TEXT)
        for span in conversation.losses[1].spans:
            read_weights[span.start : span.end] = [span.weight] * (span.end - span.start)
        assert read_weights == [sum(weights_of_one) for weights_of_one in weights]
    else:
        assert conversation.trained == [True, False]


def test_a_mark_on_an_empty_part_does_not_silence_the_calls() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    conversations = list[Any]()
    for content in ("", [{"type": "text", "text": "", "train": True}]):
        record = {"messages": [QUESTION, message | {"content": content}], "tools": tools}
        conversations.append(SHAPES["openai"].read(record, SHAPES["openai"].own_fields))
    plain, marked = conversations
    assert marked.messages == plain.messages
    assert (marked.losses, marked.trained) == (None, None)
