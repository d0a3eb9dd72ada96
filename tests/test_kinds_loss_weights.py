"""`loss_weights: true`: marks of messages, of characters and of parts may be weights, and rows have
them in a column of their own, for each token. The letter tokenizer has a token for each character.
"""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Labels
from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.record import detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.messages import OPENAI
from mdsmix.shards.counts import count_by_weight
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import manifest_of, mdsmix, run_ok, write_jsonl, write_recipe
from tests.styles import make_dialogue, open_chats, write_letter_tokenizer
from tests.test_kinds_spans import TEMPLATE, to_text
from tests.test_shapes_refused import ANSWER, QUESTION, span_entry

COLUMNS = {
    "turns": {"turns": "json", "loss_weights": "ndarray:float32"},
    "packed": {
        "input_ids": "ndarray:uint16",
        "loss_mask": "ndarray:uint8",
        "loss_weights": "ndarray:float32",
    },
}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_letter_tokenizer(tmp_path_factory.mktemp("letters"))


def read(record: dict[str, Any], **options: Any) -> Any:
    return OPENAI.read(record, OPENAI.own_fields, **{"loss_weights": True} | options)


def dialogue(*answers: dict[str, Any]) -> dict[str, Any]:
    """Return a record of questions "Q", each with an answer that has these keys."""
    messages = list[dict[str, Any]]()
    for answer in answers:
        messages += [{"role": "user", "content": "Q"}, {"role": "assistant"} | answer]
    return {"messages": messages}


def part(text: str, **marks: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **marks}


CASES: list[tuple[dict[str, Any], str]] = [
    # The row, and below each character the tenths of its weight.
    (dialogue({"content": "ab", "weight": 0.5}), "u:Q~a:ab.$ ......5555"),
    (dialogue({"content": "ab", "loss": True, "loss_scale": 0.3}), "u:Q~a:ab.$ ......3333"),
    (dialogue({"content": "ab", "weight": 1}), "u:Q~a:ab.$ ......XXXX"),
    (
        dialogue({"content": "ab", "loss_weight": 0.2}, {"content": "c"}),
        "u:Q~a:ab.u:Q~a:c.$ ......222......XXX",
    ),
    (
        dialogue({"content": "ab", "weight": 0}, {"content": "c", "weight": 0.7}),
        "u:Q~a:ab.u:Q~a:c.$ ...............777",
    ),
    (
        dialogue({"content": [part("a", weight=0.2), part("b"), part("c", train=False)]}),
        "u:Q~a:abc.$ ......2X.XX",
    ),
    (
        dialogue({"content": [part("a", weight=0.4), part("b")], "weight": 0.5}),
        "u:Q~a:ab.$ ......2555",
    ),
    (
        dialogue({
            "content": "abc",
            "train_detail": [{"begin_offset": 1, "end_offset": 1, "weight": 0.6}],
        }),
        "u:Q~a:abc.$ .......6.XX",
    ),
]  # fmt: skip


def encode(tokenizer: Tokenizer, records: list[dict[str, Any]], layout: str) -> Encoded:
    settings: dict[str, Any] = {"target_responses": "all", "pack": layout == "packed"}
    kind = open_chats(tokenizer, TEMPLATE, **settings)
    kind.encoding = replace(kind.encoding, columns=COLUMNS[layout])
    encoded: Encoded = kind.encode([read(record) for record in records])
    assert not encoded.rejected
    return encoded


def show(weights: Any) -> str:
    """Return a character for each weight: its tenths, X for 1, a dot for 0."""
    return "".join(".123456789X"[round(10 * float(weight))] for weight in weights)


def test_each_token_has_the_weight_of_its_marks(letters: Tokenizer) -> None:
    records = [record for record, _ in CASES]
    expected = [row.split(" ") for _, row in CASES]
    packed = encode(letters, records, "packed")
    for number, (text, weights) in enumerate(expected):
        assert to_text(packed.columns["input_ids"][number]) == text
        assert show(packed.columns["loss_weights"][number]) == weights
        mask = packed.columns["loss_mask"][number]
        assert np.array_equal(mask, packed.columns["loss_weights"][number] > 0)
    turns = encode(letters, records, "turns")
    assert turns.columns["loss_weights"].values.dtype == np.float32
    for number, (_, weights) in enumerate(expected):
        # Without the EOS, which the loader appends with the weight of the token before it.
        assert show(turns.columns["loss_weights"][number]) == weights[:-1]
    exact = packed.columns["loss_weights"][1][-1]
    assert exact == np.float32(0.3)


@pytest.mark.parametrize("layout", COLUMNS)
def test_weights_do_not_depend_on_the_records_around_them(letters: Tokenizer, layout: str) -> None:
    plain = dialogue({"content": "abc"})
    alone = encode(letters, [plain], layout)
    assert alone.totals.loss_weights == {"1": 4 + (layout == "packed")}
    together = encode(letters, [CASES[0][0], plain], layout)
    assert np.array_equal(together.columns["loss_weights"][1], alone.columns["loss_weights"][0])
    for name in alone.columns:
        assert np.array_equal(together.columns[name][1], alone.columns[name][0])


def test_weights_are_counted_of_the_answers_that_are_trained(letters: Tokenizer) -> None:
    record = dialogue({"content": "ab", "weight": 0.25}, {"content": "c", "weight": 0.5})
    for responses, expected in (("all", {"0.25": 3, "0.5": 2}), ("last", {"0.5": 2})):
        kind = open_chats(letters, TEMPLATE, target_responses=responses)
        kind.encoding = replace(kind.encoding, columns=COLUMNS["turns"])
        assert kind.encode([read(record)]).totals.loss_weights == expected


def test_weights_other_than_numbers_make_a_bad_record() -> None:
    for keys in (
        {"weight": -0.5},
        {"weight": "0.5"},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": 1e-9},
        {"weight": 1e9},
        {"weight": 0.5, "loss_scale": 0.6},
        {"weight": 0, "loss_scale": 0.6},
        {"loss_scale": [0.5]},
        {"content": [part("a", weight="0.5")]},
        {"train_detail": [{"begin_offset": 0, "end_offset": 0, "weight": -1}]},
    ):
        assert read({"messages": [QUESTION, ANSWER | keys]}) == "bad_mark", keys
    assert read({"messages": [QUESTION | {"weight": 0.5}, ANSWER]}) == "trained_prompt"
    differing = [span_entry(0, 2), {"begin_offset": 2, "end_offset": 3, "weight": 0.5}]
    reason = read({"messages": [QUESTION, ANSWER | {"train_detail": differing}]})
    assert reason == "bad_span"
    assert "differ on the character at offset 2" in detail_of(reason)["why"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("keys", "with_weights", "why"),
    [
        ({"weight": Decimal("0.50")}, True, "the mark Decimal('0.50') is of the type Decimal"),
        ({"weight": "1"}, True, "the mark '1' is of the type str"),
        ({"weight": 1e9}, True, "the mark 1000000000.0 is not 0, or from 1e-06 to 1e+06"),
        ({"weight": 0.5}, False, "the mark 0.5 is neither 0 nor 1"),
        ({"weight": 0, "train": True}, False, "two marks of one message differ: 0 and 1"),
    ],
)
def test_a_bad_mark_is_explained(keys: dict[str, Any], with_weights: bool, why: str) -> None:
    record = {"messages": [QUESTION, ANSWER | keys]}
    options = {"loss_weights": True} if with_weights else {}
    reason = OPENAI.read(record, OPENAI.own_fields, **options)
    assert reason == "bad_mark"
    assert str(detail_of(reason)["why"]).startswith(why)


def test_weights_need_the_option() -> None:
    record = {"messages": [QUESTION, ANSWER | {"weight": 0.5}]}
    assert OPENAI.read(record, OPENAI.own_fields) == "bad_mark"
    sharegpt = SHAPES["sharegpt"]
    items = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0.5}]
    conversation = sharegpt.read({"conversations": items}, sharegpt.own_fields, loss_weights=True)
    assert [loss and loss.weight for loss in conversation.losses] == [None, 0.5]
    listed = {"messages": make_dialogue("a", "b", "c", "d"), "loss_mask": [0.5, 1]}
    assert [loss and loss.weight for loss in read(listed).losses] == [None, 0.5, None, None]


def test_many_weights_are_counted_by_their_first_digit() -> None:
    few = np.array([0, 0.25, 0.25, 1], np.float32)
    assert count_by_weight(few) == {"0.25": 2, "1": 1}
    many = np.linspace(0.1, 0.999, 100, dtype=np.float32)
    counts = count_by_weight(many)
    assert sum(counts.values()) == 100
    assert len(counts) == 10
    assert counts["0.2"] == 11  # 0.15 to 0.25


@pytest.mark.parametrize(
    ("settings", "stream", "words"),
    [
        ({"train_loader": {"name": "finetuning"}}, {}, "train_loader.name: mdsmix"),
        ({}, {"columns": "compact"}, "columns: compact has no place for loss weights"),
        ({"target_prompts": "all"}, {}, "target_prompts: none"),
        ({"decoder_only_format": False}, {}, "decoder_only_format: false"),
        ({}, {"loss_weights": False, "train_parts": {"reasoning": 0.2}}, "set loss_weights: true"),
        ({}, {"train_parts": {"reasoning": -1}}, "a loss weight from 0.000001"),
        ({}, {"train_parts": {"answer": "yes"}}, "train_parts.answer"),
    ],
)
def test_a_recipe_that_contradicts_weights_is_refused(
    tmp_path: Path, settings: dict[str, Any], stream: dict[str, Any], words: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [CASES[0][0]])
    source = {"path": "a.jsonl", "shape": "openai"}
    chat = {"kind": "finetuning", "loss_weights": True, "source": source} | stream
    recipe = write_recipe(tmp_path, tmp_path, streams={"chat": chat}, **settings)
    with pytest.raises(RecipeError, match=words):
        open_recipe(recipe)


def test_parts_have_weights_of_the_recipe(letters: Tokenizer) -> None:
    """They are multiplied with the weights of the record."""
    record = dialogue({"content": "<think>b</think>cd", "weight": 0.5})
    parts = {"reasoning": 0.4, "calls": True, "answer": True}
    kind = open_chats(letters, TEMPLATE, target_responses="all", pack=True, train_parts=parts)
    kind.encoding = replace(kind.encoding, columns=COLUMNS["packed"])
    encoded = kind.encode([read(record)])
    assert to_text(encoded.columns["input_ids"][0]) == "u:Q~a:<think>b</think>cd.$"
    assert show(encoded.columns["loss_weights"][0]) == "." * 6 + "2" * 16 + "5555"


def test_one_and_zero_are_true_and_false_in_the_recipe(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Streams are not converted again because of how a part is written."""
    write_jsonl(tmp_path / "a.jsonl", [dialogue({"content": "<think>b</think>cd"})])
    source = {"path": "a.jsonl", "shape": "openai"}
    manifests = []
    for name, parts in (("true", {"reasoning": False}), ("one", {"reasoning": 0, "answer": 1})):
        chat = {"kind": "finetuning", "train_parts": parts, "source": source}
        recipe = write_recipe(
            tmp_path, tokenizer_folder, streams={name: chat}, target_responses="all", max_seq_len=64
        )
        run_ok("convert", recipe)
        manifests.append(manifest_of(tmp_path / f"out/{name}/train"))
    first, second = manifests
    assert first.encoding == second.encoding
    assert [part.key for part in first.parts] == [part.key for part in second.parts]


def test_from_init_to_an_export(tmp_path: Path, tokenizer_folder: Path) -> None:
    answers = [{"content": "Yes, this one.", "weight": 0.25}, {"content": "Sure.", "weight": 1}]
    write_jsonl(tmp_path / "w.jsonl", [dialogue(*answers)] * 4)
    recipe = tmp_path / "recipe.yaml"
    run_ok("init", tmp_path / "w.jsonl", "--tokenizer", tokenizer_folder, "-o", recipe)
    assert "loss_weights: true" in recipe.read_text()
    assert "have loss weights, which only mdsmix.load" in recipe.read_text()
    assert "mark the characters of answers" not in recipe.read_text()
    overrides = (f"local={tmp_path / 'out'}", "target_responses=all")
    output = run_ok("convert", recipe, *overrides).out
    totals = manifest_of(tmp_path / "out/w/train").totals
    assert {*totals.loss_weights} == {"0.25", "1"}
    assert (
        f"loss weights of trained tokens: 0.25 ({totals.loss_weights['0.25']} tokens), 1 ("
        in output
    )
    shown = run_ok("inspect", tmp_path / "out/w/train", "-n", "1").out
    assert "⟦Yes, this one.⟨<|im_end|>⟩\n⟧×0.25" in shown
    assert "Sure.⟨<|im_end|>⟩\n⟧⟦" in shown
    tree = json.loads(run_ok("inspect", tmp_path / "out/w/train", "-n", "1", "--json").out)
    (sample,) = [shown["sample"] for shown in tree["shown"]]
    assert [s.get("weight") for s in sample if s["trained"]] == [0.25, None, None]

    # Only mdsmix's loader reads them.
    yaml = tmp_path / "train.yaml"
    run_ok("render-yaml", recipe, *overrides, "-o", yaml)
    assert "name: mdsmix" in yaml.read_text()
    yaml.write_text(yaml.read_text().replace("name: mdsmix", "name: finetuning"))
    answer = mdsmix("check", yaml)
    assert answer.code == 3
    assert "weights-loader" in answer.out

    # Parquet has them, other formats refuse.
    run_ok("export", tmp_path / "out/w/train", "--to", "parquet", "-o", tmp_path / "parquet")
    (file,) = (tmp_path / "parquet").rglob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        weights = np.array(row["loss_weights"])
        assert np.array_equal(weights > 0, np.array(row["labels"]) != -100)
        assert {*weights[weights > 0].tolist()} == {0.25, 1.0}
    refused = mdsmix("export", tmp_path / "out/w/train", "--to", "litdata", "-o", tmp_path / "x")
    assert refused.code != 0
    assert "has loss weights, which this format does not contain" in refused.err


def test_an_export_of_turns_weighs_as_the_loader_does(letters: Tokenizer) -> None:
    """Rows that a stream of turns stores, with their EOS, are those of a packed stream."""
    records = [record for record, _ in CASES]
    kind = open_chats(letters, TEMPLATE, target_responses="all")
    kind.encoding = replace(kind.encoding, columns=COLUMNS["turns"])
    rows = kind.renderer.render([read(record) for record in records])
    labels = Labels(kind.targets, rows.turns, letters.eos_id)
    finished = labels.finish_rows()
    assert finished.weights is not None
    packed = encode(letters, records, "packed")
    assert np.array_equal(finished.weights, packed.columns["loss_weights"].values)
