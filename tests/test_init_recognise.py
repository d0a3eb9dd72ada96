"""Records are recognised by the names of their fields and by trying, whatever shapes are registered."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from mdsmix.init.data_files import FirstRecords
from mdsmix.init.recognise import guesses
from mdsmix.sources import SourceFile
from mdsmix.sources.jsonl import Jsonl
from mdsmix.storage import Stat, locate

SAYS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
WEIGHED = [SAYS[0], {**SAYS[1], "weight": 1}]
KNOWN: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "text": ({"text": "a", "id": 1}, "text", {"text": "text"}),
    "another word": ({"Content": "a", "url": "b"}, "text", {"text": "Content"}),
    "a text in an object": ({"page": {"body": "a"}, "n": 1}, "text", {"text": "page.body"}),
    "a pair": ({"prompt": "a", "response": "b"}, "prompt_response", {"prompt": "prompt", "response": "response"}),
    "questions": ({"question": "a", "answer": "b"}, "prompt_response", {"prompt": "question", "response": "answer"}),
    "alpaca": ({"instruction": "a", "input": "", "output": "b"}, "alpaca", {"instruction": "instruction", "output": "output", "input": "input"}),
    "alpaca in an object": ({"data": {"instruction": "a", "input": "c", "output": "b"}, "input": "other"}, "alpaca", {"instruction": "data.instruction", "output": "data.output", "input": "data.input"}),
    "messages": ({"messages": SAYS, "source": "x"}, "messages", {"messages": "messages"}),
    "another list": ({"conversation": SAYS, "text": "a summary"}, "messages", {"messages": "conversation"}),
    "messages with weights": ({"messages": WEIGHED}, "openai", {"messages": "messages"}),
    "messages and tools": ({"messages": SAYS, "tools": []}, "openai", {"messages": "messages", "tools": "tools"}),
    "sharegpt": ({"conversations": SHARED, "system": "s"}, "sharegpt", {"conversations": "conversations", "system": "system"}),
    "rounds": ({"conversation": [{"human": "a", "assistant": "b"}]}, "rounds", {"conversation": "conversation"}),
    "a list under the other name": ({"conversations": SAYS}, "messages", {"messages": "conversations"}),
}  # fmt: skip


def head(*records: Any, bad: Mapping[str, int] | None = None) -> FirstRecords:
    place = locate("a.jsonl")
    file = SourceFile(location=place, stat=Stat(1, ""), name="a.jsonl")
    return FirstRecords(file=file, records=list(records), bad=Counter(bad or {}))


def test_what_people_have_is_known_by_its_fields() -> None:
    for case, (record, shape, fields) in KNOWN.items():
        best = guesses(head(record, record))[0]
        assert best.is_right, case
        assert (best.shape.name, best.fields) == (shape, fields)
        assert best.left == record.keys() - {name.split(".")[0] for name in fields.values()}


def test_other_words_for_keys_and_roles_are_tags() -> None:
    said = [{"speaker": "prompter", "utterance": "a"}, {"speaker": "bot", "utterance": "b"}]
    best = guesses(head({"dialog": said}))[0]
    words = {"role_tag": "speaker", "content_tag": "utterance", "user_tag": "prompter", "assistant_tag": "bot"}  # fmt: skip
    assert (best.shape.name, best.options) == ("sharegpt", {"tags": words})
    assert best.is_right


def test_roles_are_merged_where_more_than_a_tenth_needs_it() -> None:
    for repeated, options in ((1, {}), (3, {"consecutive_roles": "merge"})):
        records = [{"messages": [SAYS[0], *SAYS]}] * repeated
        best = guesses(head(*records, *[{"messages": SAYS}] * (20 - repeated)))[0]
        assert (best.shape.name, best.options) == ("messages", options)


def test_a_shape_must_read_half_of_the_records() -> None:
    good, bad = {"text": "a"}, {"text": None}
    best = guesses(head(good, good, bad, bad={"not_json": 1}))[0]
    assert best.is_right
    assert (best.read, len(best.head), best.reasons) == (2, 4, {"field_not_text": 1, "not_json": 1})
    for records in ((good, bad, bad), (), ("text", ["text"])):
        assert not guesses(head(*records))[0].is_right


def test_lists_in_cells_of_text_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jsonl, "cells_are_texts", True)
    best = guesses(head({"messages": json.dumps(SAYS)}))[0]
    assert (best.shape.name, best.is_right) == ("messages", True)
