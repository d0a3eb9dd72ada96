"""Every record becomes a row or gets a reason; packed rows are full and in order; a wrong recipe is
refused in one sentence, before sources are read.
"""

from __future__ import annotations

import pickle
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
from mdsmix.kinds import kind_of, open_recipe
from mdsmix.kinds.assemble import pack_best_fit
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.read_records import Diagnostics, RecordReader
from mdsmix.ragged import Ragged
from mdsmix.record import Document, detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.condition import parse_where
from mdsmix.shapes.image_parts import with_images
from mdsmix.shapes.preference import Preference
from mdsmix.shapes.prompt import Prompt
from mdsmix.shapes.unpaired_preference import UnpairedPreference
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import documents, write_recipe
from tests.styles import to_lists


class RefusingKind:
    """A kind that refuses texts with a `!`, and gives a row of one token, the text's length, for
    the others.
    """

    def encode(self, records: Sequence[Any]) -> Encoded:
        good = [number for number, (text, *_) in enumerate(records) if "!" not in text]
        rows = Ragged.from_rows([[len(records[number][0])] for number in good], np.uint16)
        rejected = dict.fromkeys({*range(len(records))} - {*good}, "too_long")
        return make_encoded({"tokens": rows}, [rows], good, 0, rejected=rejected)

    def prints_null(self, conversation: Any, role: str, path: tuple[str, ...]) -> bool:
        return "arguments" in path


REASON_OF_TEXT = {"c!": "too_long", None: "field_not_text", "\ud800": "lone_surrogate"}
LANGUAGES = st.sampled_from(["en", "de", None])
RECORD_TEXTS = st.sampled_from(["ab", "", *REASON_OF_TEXT])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.fixed_dictionaries({"lang": LANGUAGES, "text": RECORD_TEXTS})), st.booleans())
def test_every_record_is_a_row_or_has_its_reason(drawn: list[Any], has_condition: bool) -> None:
    """A condition leaves records out before the shape reads them."""
    records = [
        {"id": number, "text": record["text"], "in": [record]}
        for number, record in enumerate(drawn)
    ]
    where = parse_where("field('in[0].lang') == 'en'") if has_condition else None
    reader = RecordReader(SHAPES["text"], {"text": "text"}, RefusingKind(), where=where, id="id")
    encoded = reader.encode(records)
    expected_rejected = dict[int, Any]()
    expected_lengths = list[int]()
    for number, record in enumerate(drawn):
        if has_condition and record["lang"] != "en":
            expected_rejected[number] = ("where", {"id": number})
        elif record["text"] in REASON_OF_TEXT:
            expected_rejected[number] = (REASON_OF_TEXT[record["text"]], {"id": number})
        else:
            expected_lengths.append(len(record["text"]))
    rejected = {n: (reason, detail_of(reason)) for n, reason in encoded.rejected.items()}
    assert rejected == expected_rejected
    assert encoded.columns["tokens"].values.tolist() == expected_lengths


def test_a_bad_record_has_its_name_and_the_field_that_a_template_lacks() -> None:
    reader = RecordReader(SHAPES["text"], {"text": "{title} {body}"}, RefusingKind(), id="id")
    for record, detail in (
        ({"id": "a7", "title": "t"}, {"id": "a7", "missing": "body"}),
        ({"id": ["no", "name"], "title": "t", "body": 1}, {"not text": "body"}),
        ({"id": True, "title": "t", "body": "\ud800"}, {}),
    ):
        (reason,) = reader.encode([record]).rejected.values()
        assert detail_of(reason) == detail
    # A record that is a string does not count as a reason code.
    where = parse_where("a.b == 'x'")
    reader = RecordReader(SHAPES["text"], {"text": "a.b"}, RefusingKind(), where=where)
    rejected = reader.encode(["where", {"a": 1}]).rejected
    assert [*rejected.values()] == ["not_an_object", "where_missing_field"]


def test_nulls_are_counted_in_good_records_only() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"city": "Köln", "n": None}}}
    question = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b"}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    good = [question, calling, {"role": "tool", "content": "x", "tool_call_id": "c"}, answer]
    bad = [question, calling, {"role": "nobody", "content": "x"}]
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "a", "image": None}]
    with_image = {"messages": [question | {"content": parts}, answer], "image": "a.jpg"}
    records = [{"messages": good}, {"messages": bad}, with_image]
    shape = with_images(SHAPES["openai"], ())
    reader = RecordReader(shape, {"messages": "messages"}, RefusingKind())
    assert [*reader.encode(records).rejected.values()] == ["unknown_role"]
    assert reader.diagnostics.counts["nulls"] == {"messages": 1}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 40), max_size=60))
def test_each_document_is_in_one_row_and_rows_are_in_order(width: int, drawn: list[int]) -> None:
    lengths = [length for length in drawn if length <= width]
    packed = pack_best_fit(np.array(lengths, np.int64), width)
    assert sorted(packed.values.tolist()) == list(range(len(lengths)))
    rows = to_lists(packed)
    assert all(sum(lengths[number] for number in row) <= width for row in rows)
    assert all(row == sorted(row) and row for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    # The fullest row that has room, the longest documents first, of equal ones the earlier:
    # published rows are made so.
    assert to_lists(pack_best_fit(np.array([3, 3, 3]), 7)) == [[0, 1], [2]]
    assert to_lists(pack_best_fit(np.array([2, 5, 7, 2, 1]), 9)) == [[0, 2], [1, 3, 4]]


def test_a_survey_counts_an_image_as_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the loader cuts off do not count as seen. The first record has two rows."""
    rows = Ragged.from_rows([[1, 2, 3], [4, 5], [6]], np.int64)
    images = [[SimpleNamespace(tokens=5), SimpleNamespace(tokens=0)], [], []]
    encoded = make_encoded(
        {}, [rows], [0, 0, 2], 0, cut=np.array([1, 0, 0]), images=images, rejected={1: "empty"}
    )
    beginning = SimpleNamespace(records=[{}] * 4, folder=None, weight=10, bad=Counter(not_json=2))
    reader: Any = SimpleNamespace(encode=lambda records, folders: encoded, kind=None)
    monkeypatch.setattr(sources, "read_beginnings", lambda units, size: [beginning])
    (sample,) = read_splits([], reader, False)
    assert sample.tokens == 6 - 1 + 4
    assert sample.by_record.tolist() == [9, 1]
    assert sample.left_out == {"empty": 1, "not_json": 2}


SHARE = "holdout .* must be a share between 0 and 1"
SOURCES = [
    ({"conversations": "c", "tags": {"role": "role"}}, "source.tags.role is not a known tag; did you mean role_tag"),
    ({"shape": "alpaca", "instruction": "q"}, "source.shape is alpaca, which needs instruction and output"),
    ({"shape": "text", "text": "t", "joined_by": ""}, "source.shape is text; finetuning reads"),
    ({"shape": "alpaca", "instruction": "q", "output": "a", "text": "t"}, "the source names text and instruction and output"),
    ({"messages": "messages", "joined_by": ""}, "joined_by is for records of the shape alpaca and preference_alpaca and prompt_alpaca, but the records of this stream have the shape messages: remove joined_by"),
    ({"instruction": "q", "response": "a"}, "or messages, or conversations, or conversation, or instruction and output."),
    ({"shape": "x/none.py:"}, "which does not name a function"),
    ({"shape": "not a name:read"}, "which does not name a function"),
    ({"shape": "x/fine.py:read", "prompt": "q"}, "remove prompt"),
    ({"prompt": "q", "response": "a", "gives": "pair"}, "gives is pair, but source.shape is not a function"),
]  # fmt: skip
STREAMS = [
    *(({"sample": share}, "sample.*(5%|[Tt]rue)") for share in (0, "0%", 0.0, "101%", "-5%", ".nan", "nan", "some", "", True, "3/2", 2)),
    *(({"holdout": share}, SHARE) for share in ("0%", 1, "some")),
    ({"holdout": "5%", "split": "val"}, "but the split of this stream is val"),
    ({"held_out_of": "web"}, "held_out_of is not a known key"),
    ({"source": None, "local": "out/web", "sample": "5%"}, "sample is only for streams with a source"),
]  # fmt: skip
IMAGES = [
    ({"shape": "x/fine.py:read", "gives": "conversation"}, {}, "remove images"),
    ({"shape": "llava"}, {"field": []}, "images.field names no field"),
    (
        {"shape": "qwen_vl"},
        {"field": "pic"},
        "records of the shape qwen_vl have their images in the texts: remove images.field",
    ),
]
FINETUNING = {"kind": "finetuning"}
FILTERS = {"source": {"path": "a", "messages": "m"}, "too_long": "filter"} | FINETUNING
ENCODER_DECODER = {"decoder_only_format": False}
SETTINGS = [
    *(({"target_prompts": policy}, f"target_prompts is '{policy}'; .*length>=N") for policy in ("ALL", "length>=3x", "length>=0")),
    ({"target_responses": "none"}, "must be last or all"),
    ({"target_responses": "all"} | ENCODER_DECODER, "decoder_only_format: false cannot be used with"),
]  # fmt: skip
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # the stream, settings of the recipe, the words of the message
    *((FINETUNING | {"source": {"path": "a", **source}}, {}, words) for source, words in SOURCES),
    *((documents("a", **keys), {}, words) for keys, words in STREAMS),
    *(
        (FINETUNING | {"images": images, "source": {"path": "a"} | source}, {}, words)
        for source, images, words in IMAGES
    ),
    *((documents("a"), keys, words) for keys, words in SETTINGS),
    (FILTERS, ENCODER_DECODER, "cannot be used with decoder_only_format"),
]


def open_streams(folder: Path, streams: dict[str, Any], **settings: Any) -> Any:
    """Write a recipe of these streams and open it."""
    return open_recipe(write_recipe(folder, folder, streams=streams, **settings))


def test_a_wrong_recipe_is_refused_in_one_line(tmp_path: Path) -> None:
    for stream, recipe_keys, words in CASES:
        set_keys = {key: value for key, value in stream.items() if value is not None}
        with pytest.raises(RecipeError, match=words) as refusal:
            open_streams(tmp_path, {"web": set_keys}, **recipe_keys)
        assert "\n" not in str(refusal.value), stream


def test_settings_that_fit_are_accepted(tmp_path: Path) -> None:
    """A document without EOS is refused only under the finetuning loader, and `too_long: filter`
    only for encoder-decoders. Any share may be written, and a holdout has a name of its own.
    """
    without_eos = {"web": documents("a", layout="document", add_eos=False)}
    text = {"train_loader": {"name": "text"}}
    finetuning = {"train_loader": {"name": "finetuning"}}
    assert open_streams(tmp_path, without_eos, **text)
    assert open_streams(tmp_path, {"chat": FILTERS}, **finetuning)
    with pytest.raises(RecipeError, match="needs add_eos: true"):
        open_streams(tmp_path, without_eos, **finetuning)
    for share in ("0.001%", 0.00001, "1.0", 1, "99.99%"):
        assert open_streams(tmp_path, {"web": documents("a", sample=share)}).sourced
    streams = {"web": documents("a", holdout="5%"), "web-eval": documents("a")}
    with pytest.raises(
        RecipeError, match="makes a stream named web-eval, but the recipe already has a stream of"
    ):
        open_streams(tmp_path, streams)


def test_a_recipe_resolves_to_the_kind_that_its_published_stream_has(
    tmp_path: Path, lettered: Tokenizer
) -> None:
    """Whatever the shape. Workers get the encoding and resolve it again."""
    words = {
        Document: "pretraining",
        Preference: "preference",
        UnpairedPreference: "preference",
        Prompt: "prompt",
    }
    for shape in SHAPES.values():
        if shape.has_images:
            continue
        stream = {
            "kind": words.get(shape.gives, "finetuning"),
            "source": {"path": "a", "shape": shape.name},
        }
        loaders: dict[str, Any] = {
            "preference": {"name": "pairwise_preference"},
            "prompt": {"name": "prompt", "dataset": {"max_gen_len": 8}},
        }
        loader = loaders.get(stream["kind"], {"name": "finetuning"})
        if shape.gives is UnpairedPreference:
            loader = {"name": "unpaired_preference"}
        recipe = open_streams(tmp_path, {"s": stream}, train_loader=loader, max_seq_len=64)
        resolved = resolve_stream(recipe, recipe.streams["s"], lettered)
        assert type(kind_of(resolved.encoding)) is type(resolved.kind), shape.name
        received = pickle.loads(pickle.dumps(resolved))
        assert received.encoding == resolved.encoding
        assert received.shape is resolved.shape
        assert received.fields_read == resolved.fields_read
        assert type(received.kind) is type(resolved.kind)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_counts_of_parts_are_those_of_all_records(size: int) -> None:
    """Whoever has counted a part: of 106 names the first 64 are counted one by one."""
    records = [{"text": "", f"field {n * n % 211}": 1, "...": n % 3} for n in range(300)]
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    together = Diagnostics(["text"])
    apart = Diagnostics(["text"])
    for part in parts:
        together.count_unread_fields(part)
        counted = apart.for_part()
        counted.count_unread_fields(part)
        for diagnosis, counts in counted.counts.items():
            apart.add(diagnosis, counts)
    assert len(together.counts["unread"]) > 60
    assert [*together.counts["unread"].items()] == [*apart.counts["unread"].items()]


@pytest.mark.parametrize(
    ("fields_read", "unread"),
    [
        (["meta", "meta.body"], {"meta.note": 2, "other.body": 1}),
        (["meta", "meta.body", "meta.note.x"], {"other.body": 1}),
        (["meta"], {"other.body": 1}),
        (["meta", "meta[0].body", "meta.body"], {"other.body": 1}),
        (["meta.body"], {"meta": 4, "other.body": 1}),
    ],
)
def test_parts_of_a_field_that_are_not_read_are_counted(
    fields_read: list[str], unread: dict[str, int]
) -> None:
    diagnostics = Diagnostics(fields_read)
    diagnostics.count_unread_fields(
        [
            {"meta": {"body": "a", "note": 0}},
            {"meta": {"body": "a", "note": "n"}},
            {"meta": {"body": "a", "note": ""}, "other.body": "a"},
            {"meta": "text"},
            {},
            [],
        ]
    )
    assert diagnostics.counts["unread"] == unread
