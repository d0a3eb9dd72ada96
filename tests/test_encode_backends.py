"""The tokens are the tokenizer's: a fast backend is used only where it gives the reference's ids; a
text with a special token is found.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastokens
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers.models import Unigram, WordLevel, WordPiece
from tokenizers.pre_tokenizers import Whitespace, WhitespaceSplit

from mdsmix.conversion import unit
from mdsmix.encode import backends
from mdsmix.encode.backends import CheckedBackend, Fastokens, Reference, Unequal, open_backend
from mdsmix.errors import RecipeError
from mdsmix.ragged import Ragged
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from tests.converting import Told, Web, documents, windows
from tests.styles import ids, lists

LIE = "this is where it lies"
LLAMA_3 = ["<|begin_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(250))]
T5 = ["</s>", "<unk>", "<pad>", *(f"<extra_id_{i}>" for i in range(100))]
TEXTS = st.lists(st.text("aABbCcDZz", max_size=4), max_size=6)
RULES = st.sampled_from(["escape", "allow", "reject"])


class Lying(Fastokens):
    """Gives one id too few for a single text."""

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        rows = super().encode(texts, match_special)
        return Ragged.from_rows(
            [rows[i][: -1 if LIE in t else None] for i, t in enumerate(texts)], "u4"
        )


@pytest.fixture(autouse=True)
def _own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(unit, "_backends", {})


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec(name=str(tokenizer_folder)))


def test_the_fast_backend_gives_the_references_ids(tokenizer: Tokenizer) -> None:
    """Special tokens are text unless they are to match; ids are uint32."""
    texts = [*backends.make_hard_strings(tokenizer), "<|im_start|>"]
    for match in (False, True):
        fast, true = (b(tokenizer).encode(texts, match) for b in (Fastokens, Reference))
        assert fast.offsets.tolist() == true.offsets.tolist()
        assert fast.values.tolist() == true.values.tolist()
        assert len(true.values) > len(texts)
        assert (true[len(texts) - 1].tolist() == [2]) == match
        assert (fast.values.dtype, true.values.dtype) == (np.uint32, np.uint32)


def test_a_vocabulary_that_skips_ids_is_fast_too(
    tokenizer_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """GPT-4o's skips 199,998; fastokens refuses such a file as it is."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "skipping")
    tree = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = tree["model"]["vocab"]
    moved = max(vocabulary, key=vocabulary.get)
    vocabulary[moved] += 3
    last = vocabulary[moved]
    words = [moved.replace("\u0120", " "), f"{moved} again, and more words"]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    skipping = open_tokenizer(TokenizerSpec(name=str(folder)))
    with pytest.raises(ValueError, match="unsupported model type"):
        fastokens.Tokenizer.from_file(skipping.path)
    backend = open_backend(skipping, "fastokens")
    texts = [*backends.make_hard_strings(skipping), *words]
    for match in (False, True):
        assert lists(backend.encode(texts, match)) == lists(
            Reference(skipping).encode(texts, match)
        )
    rows = lists(backend.encode(words, False))
    before = lists(Reference(tokenizer).encode(words, False))
    expected = [[last if number == last - 3 else number for number in row] for row in before]
    assert rows == expected
    assert any(last in row for row in rows)


def test_hard_strings_are_of_every_kind_in_which_tokenizers_differ(tokenizer: Tokenizer) -> None:
    texts = backends.make_hard_strings(tokenizer)
    whole = "\n".join(texts)
    kinds = ("\x00", "\r\n", "\t", "\u200d", "\U0010ffff", "ﬁ", "ß", "東", "한", "ع", "'ve", "0xF")
    spaces = (c for c in map(chr, range(0x110000)) if c.isspace())
    specials = (f"x{special}y" for special in tokenizer.special_tokens)
    assert [each for each in (*kinds, *spaces, *specials) if each not in whole] == []
    assert any(map(unicodedata.combining, whole))
    assert "" in texts
    assert {t[0] for t in texts if len(t) >= 500 and len({*t}) == 1} == {"a", " ", "\n", "字"}
    assert any(text.isdigit() and len(text) >= 500 for text in texts)


def test_auto_is_proved_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, proved = open_backend(tokenizer), list[str]()
    assert (type(backend), backend.label[:10]) == (CheckedBackend, "fastokens ")

    def keep(_: object, texts: list[str], __: bool, ids: object = None) -> None:
        proved.extend(texts if ids is None else ())

    monkeypatch.setattr(CheckedBackend, "check", keep)
    for _ in range(2):
        backend.encode(["a"], False)
        assert proved == 2 * backends.make_hard_strings(tokenizer)


def test_what_the_fast_one_refuses_is_the_references(lettered: Tokenizer, tmp_path: Path) -> None:
    words = {"[UNK]": 0, "a": 1, "##b": 2, "b": 3}
    scored = [("[UNK]", 0.0), ("a", -1.0), ("b", -1.5)]
    none: dict[str, Any] = {"special_tokens": [], "special_ids": []}
    kinds = WordPiece(words, unk_token="[UNK]"), WordLevel(words, "[UNK]"), Unigram(scored, 0)
    for made in kinds:
        kind, model = type(made).__name__, Model(made)
        model.pre_tokenizer = Whitespace()
        model.save(path := str(tmp_path / kind))
        tokenizer = replace(lettered, name=kind, path=path, hash=kind, **none)
        backend = open_backend(tokenizer)
        assert isinstance(backend, Reference)
        assert backend.encode(["a b", ""], False).lengths.tolist() == [2, 0]
        with pytest.raises(RecipeError, match=f"does not support {kind} .* use auto or reference"):
            open_backend(tokenizer, "fastokens")


class Seeing(Reference):
    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self.seen = [*getattr(self, "seen", ()), *texts]
        return super().encode(texts, match_special)


@pytest.mark.parametrize("sizes", [[1], [16, 70], [900]])
def test_texts_are_compared_at_every_doubling(tokenizer: Tokenizer, sizes: list[int]) -> None:
    """The bound that the module states, after every batch of a stream, however it is cut; and of
    the next stream again.
    """
    backend = CheckedBackend(tokenizer, Fastokens(tokenizer), Seeing(tokenizer), "auto")
    backend.encode(["proved"], True)
    for stream in ("one", "two"):
        backend.reference = found = Seeing(tokenizer)
        backend.begin(stream)
        done, batches = 0, itertools.cycle(sizes)
        while done < 300:
            size = next(batches)
            texts = [f"{n} is {n * n}" for n in range(done, done + size)]
            backend.encode(texts, True)
            backend.begin(stream)
            done += size
            bound = 16 + 8 * math.floor(math.log2(done / 16)) if done >= 16 else done
            late = 0 if size >= 8 else 8  # a doubling asks for 8, and a batch may have fewer
            assert bound - late <= len(found.seen) <= bound
        assert found.seen[:16] == [f"{n} is {n * n}" for n in range(16)] or sizes[0] > 1
        assert len(set(found.seen)) == len(found.seen)


def test_a_difference_is_found_before_one_id_is_used(tokenizer: Tokenizer) -> None:
    """Sixteen texts of a source are compared, and by the ids that are used: right on few texts and
    wrong on many is not right.
    """

    class WrongInBatches(Reference):
        def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
            ids = super().encode(texts, match_special)
            return ids if len(texts) < 50 else Ragged(ids.values * 0 + 7, ids.offsets)

    numbers = [f"{n} is {n}" for n in range(100)]
    lies = (["", "", "", LIE], [*numbers[:10], LIE], ["." * 5000 + f"{LIE} " * 5000])
    for fast, texts in (*((Lying, each) for each in lies), (WrongInBatches, numbers)):
        with pytest.raises(Unequal, match=LIE if fast is Lying else "differs from the reference"):
            CheckedBackend(tokenizer, fast(tokenizer), Reference(tokenizer), "auto").encode(
                texts, True
            )


def test_a_lie_on_a_hard_string_is_found_and_listed_with_its_text(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "Fastokens", Lying)
    monkeypatch.setattr(backends, "make_hard_strings", lambda tokenizer: ["a", LIE])
    with pytest.raises(RecipeError, match=f"fastokens .* differs from the reference on '{LIE}'"):
        open_backend(tokenizer, "fastokens").encode(["a"], False)
    with pytest.raises(Unequal, match=LIE) as caught:
        open_backend(tokenizer).encode(["a"], False)
    backends.store_difference(tokenizer, caught.value)
    assert isinstance(open_backend(tokenizer), Reference)
    label, other = Fastokens(tokenizer).label, replace(tokenizer, hash="another")
    asked = ((tokenizer, label), (tokenizer, "fastokens 99"), (other, label))
    assert [bool(backends.find_known_difference(*each)) for each in asked] == [True, False, False]
    backends.store_difference(tokenizer, Unequal("fastokens 1", "a\ud800"))
    kept = [mark.read_text() for mark in (tmp_path / "backends").iterdir()]
    assert sorted(kept) == ["a\\ud800", LIE]


@pytest.fixture
def units(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """Three units; the lie stands in the last."""
    windows(monkeypatch, 700)
    for n in range(2):
        web.holds([f"file {n} is told the truth of"] * 8, f"{n}.jsonl")
    web.holds([LIE] * 20, "2.jsonl")
    return web.says(documents("*.jsonl", layout="document"))


def test_a_lie_redoes_the_whole_stream(units: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    true = units.anew("tokenizer.backend=reference")
    monkeypatch.setattr(backends, "Fastokens", Lying)
    monkeypatch.setattr(unit, "_backends", {})
    outcome = units.run(workers=2, watcher=(watcher := Told()))
    assert outcome.manifest.backend.startswith("tokenizers ")
    assert (outcome.done, outcome.reused) == (3, 0)
    assert units.rows == true.rows
    assert [LIE in sentence for sentence in watcher.messages] == [True]
    assert [LIE in note for note in outcome.notes] == [True]
    again = units.convert().out
    assert "up to date" in again
    assert f"on '{LIE}', as an earlier run found; so the reference encodes" in again


def test_what_an_unequal_backend_made_before_is_not_kept(units: Web, tokenizer: Tokenizer) -> None:
    """Another stream, or a run that was killed before it began again, may have found the
    difference.
    """
    first = units.run().manifest
    assert first.backend.startswith("fastokens ")
    backends.store_difference(tokenizer, Unequal(first.backend, "found elsewhere"))
    unit._backends.clear()
    second = units.run()
    assert (second.manifest.backend[:11], second.reused) == ("tokenizers ", 0)
    assert second.manifest.index_hash == first.index_hash


def test_every_token_is_found_wherever_it_stands_and_nothing_else() -> None:
    for tokens in (LLAMA_3, T5, ["<s>", "</s>"], ["a"]):
        specials = backends.make_token_search(tokens)
        assert all(specials(f"{a}{token}{b}") for token in tokens for a in ("", "x<") for b in "|>")
    specials = backends.make_token_search(LLAMA_3 + T5)
    assert not any(map(specials, ["", "<|", "<|im_start|>", "<em>", "<extra_id_x>", "</span>"]))
    assert not backends.make_token_search([])("<s>")
    assert not backends.make_token_search([""])("<s>")


def test_a_control_token_of_ordinary_text_is_refused(lettered: Tokenizer, tmp_path: Path) -> None:
    """Of a tokenizer whose model knows </s> as a piece of text too, as T5's does."""
    words, path = ["</s>", "<unk>", "a", "<", "/", "s", ">"], str(tmp_path / "tokenizer.json")
    own = {"special_tokens": ["</s>", "<unk>", "<x>"], "special_ids": [0, 1, 7]}
    tokenizer = replace(lettered, path=path, template_variables={"unk_token": "<unk>"}, **own)
    texts = ["a a", "a </s> a", "a é a", "a <x> é", "a <unk> a"]
    scored = [(word, 0.0 if word == "</s>" else -1.0) for word in words]
    for made in (Unigram(scored, 1), WordLevel({w: i for i, w in enumerate(words)}, "<unk>")):
        model = Model(made)
        model.pre_tokenizer = WhitespaceSplit()
        model.add_special_tokens(tokenizer.special_tokens)
        model.save(path)
        for rule, refused in (("escape", [1]), ("allow", []), ("reject", [1, 3])):
            rows, marked, out = backends.encode_texts(Reference(tokenizer), texts, rule, tokenizer)
            assert (marked, out) == ([1, 3], refused)
            assert rows[2].tolist() == [2, 1, 2], "an unknown character is no special token"
            assert rows[4].tolist() == [2, 1, 2], "nor is the name of one"
            assert (7 in rows[3]) == (rule != "escape")


class Codes(backends.Backend):
    """The ids of a text are the codes of its characters; as ordinary text an upper-case one is
    lower case.
    """

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        read = str if match_special else str.lower
        return Ragged.from_rows([ids(read(text)) for text in texts], "u4")


@given(TEXTS, st.sets(st.sampled_from("ABCDZ"), max_size=4), RULES)
@example(["AB"], {"B"}, "reject")  # the largest id of the batch is the least special one
@example(["DZ"], {"D"}, "reject")
@settings(max_examples=50, deadline=None)
def test_a_record_holds_a_special_token_where_one_of_its_ids_is_special(
    lettered: Tokenizer, texts: list[str], special: set[str], rule: str
) -> None:
    """Wherever the special ids stand in the vocabulary, and whatever ids stand beside them in a
    batch.
    """
    tokens = sorted(special)
    tokenizer = replace(lettered, special_tokens=tokens, special_ids=[*map(ord, tokens)])
    rows, marked, refused = backends.encode_texts(Codes(), texts, rule, tokenizer)
    expected = [row for row, text in enumerate(texts) if special & set(text)]
    assert marked == expected
    assert refused == (expected if rule == "reject" else [])
    read = [t.lower() if rule == "escape" and special & set(t) else t for t in texts]
    assert lists(rows) == [*map(ids, read)]
