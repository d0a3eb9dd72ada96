"""Rows of records that say which characters of an answer are trained: in every layout, the tokens
of the row stay, and exactly the tokens of those characters give a loss. The letter tokenizer has a
token for each character, so expectations are texts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.encode.encoded import Encoded
from mdsmix.shapes.messages import OPENAI
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import (
    manifest_of,
    run_ok,
    write_jsonl,
    write_recipe,
)
from tests.pictures import seeing_tokenizer, write_drawings
from tests.styles import EOS, make_dialogue, open_chats, write_letter_tokenizer
from tests.test_shapes_refused import span_entry

# A question "Q" and an answer "A" are printed as `u:Q~a:A.`.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }}~{% else %}a:{{ m.content }}."
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_letter_tokenizer(tmp_path_factory.mktemp("letters"))


def make_record(*texts: str) -> dict[str, Any]:
    """Return messages of a user and an assistant in turn. The characters in brackets are those that
    `train_detail` names; a text without brackets has none.
    """
    messages = make_dialogue(*texts)
    for message in messages:
        text = message["content"]
        message["content"] = text.replace("[", "").replace("]", "")
        if "[" in text:
            inside = False
            flags = list[bool]()
            for character in text:
                if character in "[]":
                    inside = character == "["
                else:
                    flags.append(inside)
            message["train_detail"] = [
                span_entry(position, position, flag) for position, flag in enumerate(flags)
            ]
    return {"messages": messages}


def encode(tokenizer: Tokenizer, records: Sequence[dict[str, Any]], **settings: Any) -> Encoded:
    conversations = [OPENAI.read(record, OPENAI.own_fields) for record in records]
    kind = open_chats(tokenizer, TEMPLATE, **{"target_responses": "all"} | settings)
    encoded: Encoded = kind.encode(conversations)
    return encoded


def to_text(ids: Any) -> str:
    return "".join("$" if token == EOS else chr(token) for token in ids)


def show_turns(encoded: Encoded) -> list[str]:
    """Return each sample of turns as text, with brackets around responses."""
    shown = list[str]()
    for row in encoded.columns["turns"]:
        turns = orjson.loads(row.tobytes())
        shown.append("".join(f"{to_text(t['input_ids'])}[{to_text(t['labels'])}]" for t in turns))
    return shown


def show_packed(encoded: Encoded) -> list[str]:
    """Return each document as text, with brackets around trained tokens."""
    shown = list[str]()
    for ids, mask in zip(encoded.columns["input_ids"], encoded.columns["loss_mask"], strict=True):
        pieces = [
            f"[{to_text([i])}]" if m else to_text([i]) for i, m in zip(ids, mask, strict=True)
        ]
        shown.append("".join(pieces).replace("][", ""))
    return shown


CASES = [
    (("Q", "one [two] three"), "u:Q~a:one [two] three[.]"),
    (("Q", "[one] two"), "u:Q~a:[one] two[.]"),
    (("Q", "[one]"), "u:Q~a:[one.]"),
    (("Q", "one"), "u:Q~a:[one.]"),
    (("Q", "one", "R", "a[b]c"), "u:Q~a:[one.]u:R~a:a[b]c[.]"),
    (("Q", "o[n]e", "R", "ab"), "u:Q~a:o[n]e[.]u:R~a:[ab.]"),
]


@pytest.mark.parametrize(("texts", "expected"), CASES)
def test_the_named_characters_and_the_end_are_trained(
    letters: Tokenizer, texts: tuple[str, ...], expected: str
) -> None:
    record = make_record(*texts)
    assert show_turns(encode(letters, [record])) == [expected]
    # The loader appends EOS to turns; a packed row has it.
    packed = encode(letters, [record], pack=True, columns="pair")
    assert show_packed(packed) == [expected.removesuffix("]") + "$]"]


def test_rows_do_not_depend_on_the_records_around_them(letters: Tokenizer) -> None:
    """Records without spans in one batch with others keep their rows."""
    records = [make_record(*texts) for texts, _ in CASES]
    assert show_turns(encode(letters, records)) == [expected for _, expected in CASES]
    plain = make_record("Q", "one", "R", "two")
    for settings in ({}, {"target_responses": "last"}, {"too_long": "last_turns"}):
        alone = encode(letters, [plain], **settings)
        together = encode(letters, [make_record("Q", "[one]"), plain], **settings)
        assert show_turns(together)[1:] == show_turns(alone)


def test_trained_prompts_do_not_depend_on_the_records_around_them(letters: Tokenizer) -> None:
    """A record with spans is refused under target_prompts: all, and changes no other record."""
    plain = make_record("Q", "one", "R", "two")
    settings = {"target_prompts": "all", "pack": True, "columns": "pair"}
    alone = encode(letters, [plain], **settings)
    together = encode(letters, [plain, make_record("Q", "[one]")], **settings)
    assert show_packed(together) == show_packed(alone) == ["u[:Q~a:one.u:R~a:two.$]"]


def test_last_trains_one_piece_of_the_last_answer(letters: Tokenizer) -> None:
    """LLM-Foundry trains the last response of a row, so a second piece cannot be trained."""
    records = [make_record("Q", "[a]", "R", "x[yz]"), make_record("Q", "[a]b[c]")]
    records.append(make_record("Q", "[a]b"))
    encoded = encode(letters, records, target_responses="last")
    assert [row.rpartition("[")[2] for row in show_turns(encoded)] == ["yz.]"]
    assert encoded.rejected == {1: "split_answer", 2: "split_answer"}
    compact = encode(letters, records[:1], target_responses="last", columns="pair", compact=True)
    assert to_text(compact.columns["input_ids"][0]) == "u:Q~a:a.u:R~a:x"
    assert to_text(compact.columns["labels"][0]) == "yz."


def test_what_cannot_be_trained_is_refused(letters: Tokenizer) -> None:
    record = make_record("Q", "a[b]c")
    for settings, reason in (
        ({"target_prompts": "all"}, "untrained_in_prompt"),
        ({"decoder_only_format": False, "target_responses": "last"}, "span_in_encoder"),
    ):
        assert encode(letters, [record], **settings).rejected == {0: reason}
    # No character of the only answer is trained.
    untrained = make_record("Q", "abc")
    untrained["messages"][1]["train_detail"] = [span_entry(0, 2, False)]
    assert encode(letters, [untrained]).rejected == {0: "nothing_trained"}


def test_a_shortened_conversation_keeps_the_spans_of_its_last_turns(letters: Tokenizer) -> None:
    record = make_record("Q" * 50, "[o]ne", "R", "a[b]c")
    encoded = encode(letters, [record], max_seq_len=40, too_long="last_turns")
    assert show_turns(encoded) == ["u:R~a:a[b]c[.]"]
    without_spans = make_record("Q" * 50, "[o]ne", "R", "abc")
    plain = make_record("S", "abc")
    rows = encode(letters, [plain, without_spans], max_seq_len=40, too_long="last_turns")
    assert show_turns(rows) == ["u:S~a:[abc.]", "u:R~a:[abc.]"]
    first = encode(letters, [record], max_seq_len=65, too_long="first_turns")
    assert show_turns(first) == [f"u:{'Q' * 50}~a:[o]ne[.]"]


def draw_row(rng: random.Random) -> tuple[dict[str, Any], str]:
    """Return a record of one to three answers with random spans, and its row as `show_turns` shows
    it.
    """
    texts = list[str]()
    row = ""
    for number in range(rng.randint(1, 3)):
        flags = [rng.random() < 0.5 for _ in range(rng.randint(1, 9))]
        flags[rng.randrange(len(flags))] = True  # otherwise the answer is not trained at all
        letters = zip("abcdefghi", flags, strict=False)
        answer = "".join(f"[{letter}]" if flag else letter for letter, flag in letters)
        texts += [f"Q{number}", answer]
        row += f"u:Q{number}~a:{answer}[.]"
    return make_record(*texts), row.replace("][", "")


def test_random_spans_train_exactly_their_characters(letters: Tokenizer) -> None:
    """The oracle is a flag for each character of the text, made with the record."""
    rng = random.Random(3)
    records, expected = zip(*(draw_row(rng) for _ in range(60)), strict=True)
    turns = encode(letters, records)
    assert show_turns(turns) == [*expected]
    packed = encode(letters, records, pack=True, columns="pair")
    assert show_packed(packed) == [row.removesuffix("]") + "$]" for row in expected]
    # Every trained character and the EOS of each row gives a loss.
    runs = [run for row in expected for run in re.findall(r"\[(.*?)\]", row)]
    losses = len("".join(runs)) + len(expected)
    assert turns.totals.loss_tokens == packed.totals.loss_tokens == losses
    # The other characters of the answers, each of which begins after `~a:`.
    untrained = re.sub(r"u:Q.~a:|\[.*?\]", "", "".join(expected))
    for totals in (turns.totals, packed.totals):
        assert (totals.span_records, totals.span_untrained) == (60, len(untrained))


def test_init_convert_and_inspect_name_the_spans(tmp_path: Path, tokenizer_folder: Path) -> None:
    records = [make_record("Why?", "[One] two three"), make_record("Why?", "One")]
    bad = make_record("Why?", "One")
    bad["messages"][1]["train_detail"] = [span_entry(0, 3)]  # after the end
    write_jsonl(tmp_path / "marked.jsonl", [*records * 6, bad])
    recipe = tmp_path / "recipe.yaml"
    run_ok("init", tmp_path / "marked.jsonl", "--tokenizer", tokenizer_folder, "-o", recipe)
    text = recipe.read_text()
    assert "# 6 records of these mark the characters of answers that are trained" in text
    assert text.count("target_responses: all") == 1
    output = run_ok("convert", recipe, f"local={tmp_path / 'out'}", "max_bad=1.0").out
    totals = manifest_of(tmp_path / "out/marked/train").totals
    assert totals.span_records == 6
    untrained = f"{totals.span_untrained} tokens of answers are not trained"
    assert f"in 6 records, marks train only some characters of an answer: {untrained}" in output
    assert "1 bad_span" in output
    shown = run_ok("inspect", tmp_path / "out/marked/train", "-n", "1").out
    assert "⟦One⟧ two three⟦" in shown


def test_answers_about_images_have_spans(tmp_path: Path, tokenizer_folder: Path) -> None:
    """By `train_detail` and by parts, which a stream of images reads in another way."""
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "seeing")
    drawing = write_drawings(tmp_path, 1)[0].name
    parts = [{"type": "image", "image": drawing}, {"type": "text", "text": "What?"}]
    question = {"role": "user", "content": parts}
    by_detail = make_record("Q", "[One] two three")["messages"][1]
    answer_parts = [{"type": "text", "text": "One"}, {"type": "text", "text": " two", "train": 0}]
    by_parts = {"role": "assistant", "content": answer_parts}
    records = [{"messages": [question, answer]} for answer in (by_detail, by_parts)]
    write_jsonl(tmp_path / "seen.jsonl", records)
    source = {"path": "seen.jsonl", "shape": "openai"}
    stream = {"kind": "finetuning", "images": {}, "source": source}
    recipe = write_recipe(
        tmp_path, tokenizer, max_seq_len=64, target_responses="all", streams={"seen": stream}
    )
    run_ok("convert", recipe)
    shown = run_ok("inspect", tmp_path / "out/seen/train", "-n", "2").out
    assert "⟦One⟧ two three⟦⟨<|im_end|>⟩" in shown
    assert "⟦One⟧ two⟦⟨<|im_end|>⟩" in shown
