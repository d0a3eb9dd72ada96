"""The tokens are the tokenizer's: a fast backend is used only where it gives the reference's ids, and one lie ends its use."""

import itertools
import math
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mdsmix.convert import unit
from mdsmix.encode import backends
from mdsmix.encode.backends import (
    CheckedBackend,
    Fastokens,
    Reference,
    Unequal,
    hard_strings,
    known_unequal,
    open_backend,
    remember_unequal,
)
from mdsmix.encode.pretrained import Tokenizer, open_tokenizer
from mdsmix.errors import RecipeError
from mdsmix.ragged import Ragged
from mdsmix.recipe import TokenizerSpec
from tests.converting import (
    Told,
    documents,
    mdsmix,
    run_recipe,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.styles import letters

LIE = "this is where it lies"


class Lying(Fastokens):
    """Gives one id too few for a single text."""

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        rows = super().encode(texts, match_special)
        return Ragged.of([rows[i][: -1 if LIE in t else None] for i, t in enumerate(texts)], "u4")


@pytest.fixture(autouse=True)
def _own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of this test's own, and the session's tokenizers."""
    cache = tmp_path / "cache"
    cache.mkdir()
    known = Path(os.environ["MDSMIX_CACHE"]) / "tokenizers"
    known.mkdir(exist_ok=True)
    (cache / "tokenizers").symlink_to(known)
    monkeypatch.setenv("MDSMIX_CACHE", str(cache))
    monkeypatch.setattr(unit, "_backends", {})


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec(name=str(tokenizer_folder)))


@pytest.mark.parametrize("match_special", [False, True])
def test_the_fast_backend_gives_the_references_ids(
    tokenizer: Tokenizer, match_special: bool
) -> None:
    """Special tokens are text unless they are to match; ids are uint32."""
    texts = [*hard_strings(tokenizer), "<|im_start|>"]
    fast, true = (b(tokenizer).encode(texts, match_special) for b in (Fastokens, Reference))
    assert fast.offsets.tolist() == true.offsets.tolist()
    assert fast.values.tolist() == true.values.tolist()
    assert len(true.values) > len(texts)
    assert (true[len(texts) - 1].tolist() == [2]) == match_special
    assert (fast.values.dtype, true.values.dtype) == (np.uint32, np.uint32)


def test_hard_strings_are_of_every_kind_in_which_tokenizers_differ(tokenizer: Tokenizer) -> None:
    texts = hard_strings(tokenizer)
    whole = "\n".join(texts)
    assert {c for c in map(chr, range(0x110000)) if c.isspace()} <= set(whole)
    kinds = ("\x00", "\r\n", "\t", "\u200d", "\U0010ffff", "ﬁ", "ß", "東", "한", "ع", "'ve", "0xF")
    assert [kind for kind in kinds if kind not in whole] == []
    assert any(map(unicodedata.combining, whole))
    assert "" in texts
    runs = {text[0] for text in texts if len(text) >= 500 and len(set(text)) == 1}
    assert runs == {"a", " ", "\n", "字"}
    assert any(text.isdigit() and len(text) >= 500 for text in texts)
    assert all(f"x{special}y" in whole for special in tokenizer.special_tokens)


def test_auto_is_the_fast_one_where_it_is_proved_once_a_process(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, proved = open_backend(tokenizer), list[str]()
    assert isinstance(backend, CheckedBackend)
    assert backend.label.startswith("fastokens ")
    monkeypatch.setattr(
        CheckedBackend,
        "check",
        lambda _, texts, __, ids=None: proved.extend(texts if ids is None else ()),
    )
    for _ in range(2):
        backend.encode(["a"], False)
        assert proved == 2 * hard_strings(tokenizer)


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "WordLevel"])
def test_a_tokenizer_that_the_fast_one_does_not_take_is_the_references(
    tmp_path: Path, kind: str
) -> None:
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers

    words = {"[UNK]": 0, "a": 1, "##b": 2, "b": 3}
    scored = [("[UNK]", 0.0), ("a", -1.0), ("b", -1.5)]
    given = (scored, 0) if kind == "Unigram" else (words,)
    made = Model(
        getattr(models, kind)(*given, **({} if kind == "Unigram" else {"unk_token": "[UNK]"}))
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = letters(tmp_path, name=kind, hash=kind, special_tokens=[], special_ids=[])
    made.save(tokenizer.path)
    backend = open_backend(tokenizer)
    assert isinstance(backend, Reference)
    assert backend.encode(["a b", ""], False).lengths.tolist() == [2, 0]
    with pytest.raises(RecipeError, match=f"does not take {kind} .* use auto or reference"):
        open_backend(tokenizer, "fastokens")


class Seeing(Reference):
    """Keeps what it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.seen: list[str] = []

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self.seen.extend(texts)
        return super().encode(texts, match_special)


@pytest.mark.parametrize("sizes", [[1], [16, 70], [900]])
def test_texts_are_compared_densely_at_first_and_at_every_doubling(
    tokenizer: Tokenizer, sizes: list[int]
) -> None:
    """The bound that the module states, after every batch of a stream, however it is cut; and of the next stream again."""
    backend = CheckedBackend(tokenizer, Fastokens(tokenizer))
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
    """Sixteen texts of a source are compared, and by the ids that are used: right on few texts and wrong on many is not right."""

    class WrongInBatches(Reference):
        def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
            ids = super().encode(texts, match_special)
            return ids if len(texts) < 50 else Ragged(ids.values * 0 + 7, ids.offsets)

    numbers = [f"{n} is {n}" for n in range(100)]
    for fast, texts in (
        (Lying, ["", "", "", LIE]),
        (Lying, [*numbers[:10], LIE]),
        (WrongInBatches, numbers),
    ):
        with pytest.raises(Unequal, match=LIE if fast is Lying else "differs from the reference"):
            CheckedBackend(tokenizer, fast(tokenizer)).encode(texts, True)


def test_a_lie_on_a_hard_string_is_found_and_listed_with_its_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "Fastokens", Lying)
    monkeypatch.setattr(backends, "hard_strings", lambda tokenizer: ["a", LIE])
    with pytest.raises(RecipeError, match=f"fastokens .* differs from the reference on '{LIE}'"):
        open_backend(tokenizer, "fastokens").encode(["a"], False)
    with pytest.raises(Unequal, match=LIE) as caught:
        open_backend(tokenizer).encode(["a"], False)
    remember_unequal(tokenizer, caught.value)
    assert isinstance(open_backend(tokenizer), Reference)
    label = Fastokens(tokenizer).label
    assert known_unequal(tokenizer, label)
    assert not known_unequal(tokenizer, "fastokens 99"), "another version has a chance of its own"
    assert not known_unequal(replace(tokenizer, hash="another"), label)
    remember_unequal(tokenizer, Unequal("fastokens 1", "a\ud800"))
    kept = [mark.read_text() for mark in (Path(os.environ["MDSMIX_CACHE"]) / "backends").iterdir()]
    assert sorted(kept) == ["a\\ud800", LIE]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three units; the lie stands in the last."""
    windows(monkeypatch, 700)
    for n in range(2):
        write_jsonl(tmp_path / f"{n}.jsonl", [{"text": f"file {n} is told the truth of"}] * 8)
    write_jsonl(tmp_path / "2.jsonl", [{"text": LIE}] * 20)
    streams = {"web": documents(tmp_path / "*.jsonl", layout="document")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


def test_a_lie_found_while_running_redoes_the_whole_stream_with_the_reference(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(recipe, "tokenizer.backend=reference", f"local={tmp_path / 'true'}")
    monkeypatch.setattr(backends, "Fastokens", Lying)
    monkeypatch.setattr(unit, "_backends", {})
    watcher = Told()
    (outcome,) = run_recipe(recipe, workers=2, watcher=watcher)
    assert outcome.manifest.backend.startswith("tokenizers ")
    assert (outcome.done, outcome.reused) == (3, 0)
    assert token_rows(outcome.target) == token_rows(tmp_path / "true" / "web" / "train")
    assert [LIE in sentence for sentence in watcher.said] == [True]
    assert [LIE in note for note in outcome.notes] == [True]
    again = mdsmix("convert", recipe).out
    assert "up to date" in again
    assert f"on '{LIE}', as was found before; so the reference encodes" in again


def test_what_an_unequal_backend_made_before_is_not_kept(
    recipe: Path, tokenizer: Tokenizer
) -> None:
    """Another stream, or a run that was killed before it began again, may have found the difference."""
    (first,) = run_recipe(recipe)
    assert first.manifest.backend.startswith("fastokens ")
    remember_unequal(tokenizer, Unequal(first.manifest.backend, "found elsewhere"))
    unit._backends.clear()
    (second,) = run_recipe(recipe)
    assert (second.manifest.backend[:11], second.reused) == ("tokenizers ", 0)
    assert second.manifest.index_hash == first.manifest.index_hash
