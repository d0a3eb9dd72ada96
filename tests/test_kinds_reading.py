"""What becomes of records that are read, of rows that are packed, and of a recipe that cannot be
right: one sentence, before sources are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix import sources
from mdsmix.encode.encoded import Encoded, make_encoded
from mdsmix.errors import RecipeError
from mdsmix.estimate.survey import read_splits
from mdsmix.kinds import open_recipe
from mdsmix.kinds.assemble import best_fit
from mdsmix.kinds.read_records import RecordReader
from mdsmix.ragged import Ragged
from mdsmix.record import detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.condition import parse_where
from mdsmix.shapes.image_parts import with_images
from tests.converting import documents, write_recipe
from tests.styles import lists


class Refusing:
    """An encoder that refuses what holds a `!`, and gives a row of one token, the text's length,
    for the others.
    """

    def encode(self, records: Sequence[Any]) -> Encoded:
        good = [n for n, (text, *_) in enumerate(records) if "!" not in text]
        rows = Ragged.from_rows([[len(records[n][0])] for n in good], np.uint16)
        bad = dict.fromkeys({*range(len(records))} - {*good}, "too_long")
        return make_encoded({"tokens": rows}, [rows], good, 0, rejected=bad)


WHYS = {"c!": "too_long", None: "field_not_text", "\ud800": "lone_surrogate"}
LANGS, SAID = st.sampled_from(["en", "de", None]), st.sampled_from(["ab", "", *WHYS])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.fixed_dictionaries({"lang": LANGS, "text": SAID})), st.booleans())
def test_every_record_is_a_row_or_has_its_reason(drawn: list[Any], has_condition: bool) -> None:
    """A condition leaves records out before the shape sees them."""
    records = [{"id": n, "text": of["text"], "in": [of]} for n, of in enumerate(drawn)]
    where = parse_where("field('in[0].lang') == 'en'") if has_condition else None
    reading = RecordReader(SHAPES["text"], {"text": "text"}, Refusing(), where=where, id="id")
    made = reading.encode(records)
    texts = [record["text"] if record["lang"] == "en" or not where else "-" for record in drawn]
    whys = [WHYS.get(text, "where" * (text == "-")) for text in texts]
    expected = {n: (why, {"id": n}) for n, why in enumerate(whys) if why}
    assert {at: (why, detail_of(why)) for at, why in made.rejected.items()} == expected
    lengths = [len(text) for text, why in zip(texts, whys, strict=True) if not why]
    assert made.columns["tokens"].values.tolist() == lengths


def test_a_bad_record_has_its_name_and_what_a_template_lacks() -> None:
    reading = RecordReader(SHAPES["text"], {"text": "{title} {body}"}, Refusing(), id="id")
    for record, detail in (
        ({"id": "a7", "title": "t"}, {"id": "a7", "missing": "body"}),
        ({"id": ["no", "name"], "title": "t", "body": 1}, {"not text": "body"}),
        ({"id": True, "title": "t", "body": "\ud800"}, {}),
    ):
        (bad,) = reading.encode([record]).rejected.values()
        assert detail_of(bad) == detail
    # A record that is a text is no reason.
    reading = RecordReader(
        SHAPES["text"], {"text": "a.b"}, Refusing(), where=parse_where("a.b == 'x'")
    )
    found = reading.encode(["where", {"a": 1}]).rejected
    assert [*found.values()] == ["not_an_object", "where_missing_field"]


def test_nulls_are_counted_in_records_that_are_read_and_not_in_bad_ones() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"city": "Köln", "n": None}}}
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    good = [asked, called, {"role": "tool", "content": "x", "tool_call_id": "c"}, answer]
    bad = [asked, called, {"role": "nobody", "content": "x"}]
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "a", "image": None}]
    records = [{"messages": good}, {"messages": bad}, {"messages": [asked | {"content": parts}, answer], "image": "a.jpg"}]  # fmt: skip
    reading = RecordReader(with_images(SHAPES["openai"], ()), {"messages": "messages"}, Refusing())
    assert [*reading.encode(records).rejected.values()] == ["unknown_role"]
    assert reading.diagnostics.counts["nulls"] == {"messages": 1}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 40), max_size=60))
def test_each_document_is_in_one_row_and_rows_are_in_order(width: int, drawn: list[int]) -> None:
    lengths = [length for length in drawn if length <= width]
    packed = best_fit(np.array(lengths, np.int64), width)
    assert sorted(packed.values.tolist()) == list(range(len(lengths)))
    rows = lists(packed)
    assert all(sum(lengths[i] for i in row) <= width for row in rows)
    assert all(row == sorted(row) and row for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    # The fullest row that has room, the longest documents first, of equal ones the earlier:
    # published rows hold these.
    assert lists(best_fit(np.array([3, 3, 3]), 7)) == [[0, 1], [2]]
    assert lists(best_fit(np.array([2, 5, 7, 2, 1]), 9)) == [[0, 2], [1, 3, 4]]


def test_images_count_as_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is cut off does not count, in what the beginning of a split says of its source; here
    of two rows of the first record.
    """
    rows = Ragged.from_rows([[1, 2, 3], [4, 5], [6]], np.int64)
    images = [[SimpleNamespace(tokens=5), SimpleNamespace(tokens=0)], [], []]
    said: dict[str, Any] = {"images": images, "rejected": {1: "empty"}}
    made = make_encoded({}, [rows], [0, 0, 2], 0, cut=np.array([1, 0, 0]), **said)
    beginning = SimpleNamespace(records=[{}] * 4, folder=None, weight=10, bad=Counter(not_json=2))
    reading: Any = SimpleNamespace(encode=lambda records, folders: made)
    monkeypatch.setattr(sources, "read_beginnings", lambda units, size: [beginning])
    (found,) = read_splits([], reading, False)
    assert found.tokens == 6 - 1 + 4
    assert found.by_record.tolist() == [9, 1]
    assert found.left_out == {"empty": 1, "not_json": 2}


SHARE = "holdout .* must be a share between 0 and 1"
NOTHING = "take it out, it would change nothing"
SOURCES = [
    ({"conversations": "c", "tags": {"role": "role"}}, "source.tags.role is not a known tag; did you mean role_tag"),
    ({"shape": "alpaca", "instruction": "q"}, "source.shape is alpaca, which reads instruction and output"),
    ({"shape": "text", "text": "t", "joined_by": ""}, "source.shape is text; finetuning reads"),
    ({"shape": "alpaca", "instruction": "q", "output": "a", "text": "t"}, "the source names text and instruction and output"),
    ({"messages": "messages", "joined_by": ""}, "joined_by is for records of the shape alpaca and preference_alpaca, and these are messages"),
    ({"instruction": "q", "response": "a"}, "or messages, or conversations, or conversation, or instruction and output."),
    ({"shape": "x/none.py:"}, "which does not name a function"),
    ({"shape": "not a name:read"}, "which does not name a function"),
    ({"shape": "x/fine.py:read", "prompt": "q"}, "take prompt out"),
    ({"prompt": "q", "response": "a", "gives": "pair"}, "gives is pair, which is for a function"),
]  # fmt: skip
STREAMS = [
    *(({"sample": share}, "sample.*(5%|[Tt]rue)") for share in (0, "0%", 0.0, "101%", "-5%", ".nan", "nan", "some", "", True, "3/2", 2)),
    *(({"holdout": share}, SHARE) for share in ("0%", 1, "some")),
    ({"holdout": "5%", "split": "val"}, "holdout takes a share of what is trained on, and split is val"),
    ({"held_out_of": "web"}, "held_out_of is not a known key"),
    ({"source": None, "local": "out/web", "sample": "5%"}, "sample is for streams with a source"),
]  # fmt: skip
SEEING = [
    ({"shape": "x/fine.py:read", "gives": "conversation"}, {}, "take images out"),
    ({"shape": "llava"}, {"field": []}, "images.field names no field"),
    ({"shape": "qwen_vl"}, {"field": "pic"}, f"those of qwen_vl are in the texts; {NOTHING}"),
]
FINETUNING = {"kind": "finetuning"}
FILTERS = {"source": {"path": "a", "messages": "m"}, "too_long": "filter"} | FINETUNING
APART = {"decoder_only_format": False}
SETTINGS = [
    *(({"target_prompts": policy}, f"target_prompts is '{policy}'; .*length>=N") for policy in ("ALL", "length>=3x", "length>=0")),
    ({"target_responses": "none"}, "must be last or all"),
    ({"target_responses": "all"} | APART, "decoder_only_format: false does not go with"),
]  # fmt: skip
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *((FINETUNING | {"source": {"path": "a", **source}}, {}, said) for source, said in SOURCES),
    *((documents("a", **more), {}, said) for more, said in STREAMS),
    *((FINETUNING | {"images": i, "source": {"path": "a"} | s}, {}, said) for s, i, said in SEEING),
    *((documents("a"), settings, said) for settings, said in SETTINGS),
    (FILTERS, APART, "does not go with decoder_only_format"),
]


def opened(folder: Path, streams: dict[str, Any], **settings: Any) -> Any:
    return open_recipe(write_recipe(folder, folder, streams=streams, **settings))


def test_one_sentence_refuses(tmp_path: Path) -> None:
    for stream, more, said in CASES:
        known = {key: value for key, value in stream.items() if value is not None}
        with pytest.raises(RecipeError, match=said) as refusal:
            opened(tmp_path, {"web": known}, **more)
        assert "\n" not in str(refusal.value), stream


def test_what_fits_is_not_refused(tmp_path: Path) -> None:
    """A document without EOS is refused under the finetuning loader alone, and `too_long: filter`
    for encoder-decoders alone; any share may be written, and a holdout has a name of its own.
    """
    plain = {"web": documents("a", layout="document", add_eos=False)}
    text, finetuning = ({"train_loader": {"name": name}} for name in ("text", "finetuning"))
    assert opened(tmp_path, plain, **text)
    assert opened(tmp_path, {"chat": FILTERS}, **finetuning)
    with pytest.raises(RecipeError, match="needs add_eos: true"):
        opened(tmp_path, plain, **finetuning)
    for share in ("0.001%", 0.00001, "1.0", 1, "99.99%"):
        assert opened(tmp_path, {"web": documents("a", sample=share)}).sourced
    streams = {"web": documents("a", holdout="5%"), "web-eval": documents("a")}
    with pytest.raises(RecipeError, match="makes a stream web-eval, and the recipe has one of"):
        opened(tmp_path, streams)
