"""A fast backend is used only if it gives the reference's ids, and texts with special tokens are
found.
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

import mdsmix
from mdsmix.conversion import unit
from mdsmix.encode import backend_files, backends
from mdsmix.encode.backends import CheckedBackend, Fastokens, Reference, Unequal, open_backend
from mdsmix.encode.special_tokens import encode_texts, make_token_search
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.ragged import Ragged
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from tests.converting import Project, RecordingWatcher, documents, set_window_size
from tests.styles import to_ids, to_lists

WRONG = "this text is encoded wrongly"
LLAMA_3 = ["<|begin_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(250))]
T5 = ["</s>", "<unk>", "<pad>", *(f"<extra_id_{i}>" for i in range(100))]
TEXTS = st.lists(st.text("aABbCcDZz", max_size=4), max_size=6)
RULES = st.sampled_from(["escape", "allow", "reject"])


class WrongOnOneText(Fastokens):
    """Gives one id too few for the text WRONG."""

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        rows = super().encode(texts, match_special)
        return Ragged.from_rows(
            [rows[i][: -1 if WRONG in t else None] for i, t in enumerate(texts)], "u4"
        )


class PanicException(BaseException):
    """Raised by PyO3 if a library in Rust panics: not an Exception."""


class RaisingModel:
    """A model of fastokens that raises an error on texts that contain WRONG."""

    def __init__(self, model: Any, error: BaseException) -> None:
        self.model = model
        self.error = error

    def encode_batch_flat(self, texts: Sequence[str], **settings: bool) -> Any:
        if any(WRONG in text for text in texts):
            raise self.error
        return self.model.encode_batch_flat(texts, **settings)


class RaisesValueError(Fastokens):
    error: BaseException = ValueError("match limit\nexceeded.")

    def __init__(self, tokenizer: Tokenizer, may_have_word_form: bool = True) -> None:
        super().__init__(tokenizer, may_have_word_form)
        self._model = RaisingModel(self._model, self.error)


class Panics(RaisesValueError):
    error = PanicException("index out of bounds")


FAULTY = {
    WrongOnOneText: "differs from the reference on '{}'",
    RaisesValueError: "fails on '{}' (ValueError: match limit exceeded)",
    Panics: "fails on '{}' (PanicException: index out of bounds)",
}
"Fast backends -> what the user reads about them, with the text."


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(unit, "_backends", {})


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec(name=str(tokenizer_folder)))


def test_the_fast_backend_gives_the_references_ids(tokenizer: Tokenizer) -> None:
    """With special tokens matched and not. Ids are uint32."""
    texts = [*backends.make_hard_strings(tokenizer), "<|im_start|>"]
    for match in (False, True):
        fast, true = (b(tokenizer).encode(texts, match) for b in (Fastokens, Reference))
        assert fast.offsets.tolist() == true.offsets.tolist()
        assert fast.values.tolist() == true.values.tolist()
        assert len(true.values) > len(texts)
        assert (true[len(texts) - 1].tolist() == [2]) == match
        assert (fast.values.dtype, true.values.dtype) == (np.uint32, np.uint32)


def test_a_vocabulary_with_skipped_ids_is_fast_too(
    tokenizer_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """GPT-4o's skips 199,998. fastokens itself refuses such a file."""
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
        assert to_lists(backend.encode(texts, match)) == to_lists(
            Reference(skipping).encode(texts, match)
        )
    rows = to_lists(backend.encode(words, False))
    before = to_lists(Reference(tokenizer).encode(words, False))
    expected = [[last if number == last - 3 else number for number in row] for row in before]
    assert rows == expected
    assert any(last in row for row in rows)


def test_hard_strings_cover_every_kind_of_difference(tokenizer: Tokenizer) -> None:
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


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that backends compare without ids of a batch: the hard strings."""
    texts = list[str]()

    def keep(_: object, compared: list[str], __: bool, ids: object = None) -> None:
        texts.extend(compared if ids is None else ())

    monkeypatch.setattr(CheckedBackend, "check", keep)
    return texts


def test_auto_compares_the_hard_strings_once(
    tokenizer: Tokenizer, proved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a later process: the cache says that they were equal, for these strings, this
    tokenizer and these versions.
    """
    hard = 2 * backends.make_hard_strings(tokenizer)

    def encode(tokenizer: Tokenizer = tokenizer) -> list[str]:
        proved.clear()
        backend = open_backend(tokenizer)
        assert (type(backend), backend.label[:10]) == (CheckedBackend, "fastokens ")
        for _ in range(2):
            backend.encode(["a"], False)
        return proved

    assert encode() == hard
    assert encode() == []
    [file] = (tmp_path / "backends").glob("*.equal")
    equal = file.read_bytes()
    # What was proved has changed, or the file is damaged.
    assert encode(replace(tokenizer, hash="another")) == hard
    file.write_bytes(equal[: len(equal) // 2])
    assert encode() == hard
    assert file.read_bytes() == equal
    for module, name, value in (
        (mdsmix, "__version__", "99"),
        (backends, "WORD_FORM_VERSION", 99),
        (backends, "make_hard_strings", lambda _: ["a", "b"]),
        (backends, "name_fastokens", lambda: "fastokens 99"),
        (backend_files, "package_version", lambda _: "99"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert encode() == 2 * backends.make_hard_strings(tokenizer)
            assert encode() == []
            file.write_bytes(equal)
    assert encode() == []


def test_hard_strings_are_compared_anew_without_a_cache(
    tokenizer: Tokenizer, proved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(backend_files, "cache_folder", lambda: tmp_path / "file" / "cache")
    for _ in range(2):
        backend = CheckedBackend(tokenizer, Fastokens(tokenizer), Reference(tokenizer), "auto")
        assert to_lists(backend.encode(["a"], False)) == to_lists(
            Reference(tokenizer).encode(["a"], False)
        )
        assert proved == 2 * backends.make_hard_strings(tokenizer)
        proved.clear()


def test_the_reference_encodes_for_unsupported_tokenizers(
    lettered: Tokenizer, tmp_path: Path
) -> None:
    words = {"[UNK]": 0, "a": 1, "##b": 2, "b": 3}
    scored = [("[UNK]", 0.0), ("a", -1.0), ("b", -1.5)]
    none: dict[str, Any] = {"special_tokens": [], "special_ids": []}
    kinds = WordPiece(words, unk_token="[UNK]"), WordLevel(words, "[UNK]"), Unigram(scored, 0)
    for model_kind in kinds:
        kind, model = type(model_kind).__name__, Model(model_kind)
        model.pre_tokenizer = Whitespace()
        model.save(path := str(tmp_path / kind))
        tokenizer = replace(lettered, name=kind, path=path, hash=kind, **none)
        backend = open_backend(tokenizer)
        assert isinstance(backend, Reference)
        assert backend.encode(["a b", ""], False).lengths.tolist() == [2, 0]
        with pytest.raises(RecipeError, match=f"the tokenizer {kind} .* to auto or reference"):
            open_backend(tokenizer, "fastokens")


class RecordingReference(Reference):
    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self.seen = [*getattr(self, "seen", ()), *texts]
        return super().encode(texts, match_special)


@pytest.mark.parametrize("sizes", [[1], [16, 70], [900]])
def test_texts_are_compared_at_every_doubling(tokenizer: Tokenizer, sizes: list[int]) -> None:
    """The module's bound is met after every batch of a stream, for any sizes of batches, and again
    for the next stream.
    """
    backend = CheckedBackend(tokenizer, Fastokens(tokenizer), RecordingReference(tokenizer), "auto")
    backend.encode(["proved"], True)
    for stream in ("one", "two"):
        backend.reference = reference = RecordingReference(tokenizer)
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
            assert bound - late <= len(reference.seen) <= bound
        assert reference.seen[:16] == [f"{n} is {n * n}" for n in range(16)] or sizes[0] > 1
        assert len(set(reference.seen)) == len(reference.seen)


def test_a_difference_is_found_before_one_id_is_used(tokenizer: Tokenizer) -> None:
    """Sixteen texts of a source are compared, by the ids that are used: a backend may be right on
    few texts and wrong on many.
    """

    class WrongInBatches(Reference):
        def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
            ids = super().encode(texts, match_special)
            return ids if len(texts) < 50 else Ragged(ids.values * 0 + 7, ids.offsets)

    numbers = [f"{n} is {n}" for n in range(100)]
    lies = (["", "", "", WRONG], [*numbers[:10], WRONG], ["." * 5000 + f"{WRONG} " * 5000])
    for fast, texts in (*((WrongOnOneText, each) for each in lies), (WrongInBatches, numbers)):
        with pytest.raises(
            Unequal, match=WRONG if fast is WrongOnOneText else "differs from the reference"
        ):
            CheckedBackend(tokenizer, fast(tokenizer), Reference(tokenizer), "auto").encode(
                texts, True
            )


@pytest.mark.parametrize("fast", [RaisesValueError, Panics])
def test_an_error_on_one_text_of_a_batch_names_the_text(
    tokenizer: Tokenizer, fast: type[Fastokens]
) -> None:
    """In the texts that are encoded, and in the excerpts that are compared."""
    backend = CheckedBackend(tokenizer, fast(tokenizer), Reference(tokenizer), "auto")
    assert to_lists(backend.encode(["a", "b"], True)) == to_lists(
        Reference(tokenizer).encode(["a", "b"], True)
    )
    for encode in (backend.encode, backend.check):
        with pytest.raises(Unequal) as caught:
            encode(["a", f"{WRONG}.", "b"], True)
        sentence = FAULTY[fast].format(f"{WRONG}.")
        assert str(caught.value) == f"{backend.label} {sentence}"


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_of_the_process_is_no_difference(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(RaisesValueError, "error", error)
    backend = CheckedBackend(tokenizer, RaisesValueError(tokenizer), Reference(tokenizer), "auto")
    with pytest.raises(type(error)) as caught:
        backend.encode(["a", WRONG], True)
    assert caught.value is error


def test_an_error_of_both_backends_is_no_difference(tokenizer: Tokenizer) -> None:
    class Fails(Reference):
        def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
            if WRONG in texts:
                raise RuntimeError("the reference fails")
            return super().encode(texts, match_special)

    backend = CheckedBackend(tokenizer, RaisesValueError(tokenizer), Fails(tokenizer), "auto")
    with pytest.raises(RuntimeError, match="the reference fails"):
        backend.encode(["a", WRONG], True)


def test_a_batch_whose_texts_fail_only_together_is_encoded_one_by_one(
    tokenizer: Tokenizer,
) -> None:
    class FailsOnMany(Fastokens):
        def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
            if len(texts) > 1:
                raise ValueError("too many")
            return super().encode(texts, match_special)

    backend = CheckedBackend(tokenizer, FailsOnMany(tokenizer), Reference(tokenizer), "auto")
    texts = ["a b", "", "c"]
    assert to_lists(backend.encode(texts, True)) == to_lists(
        Reference(tokenizer).encode(texts, True)
    )


def test_a_difference_on_a_hard_string_is_found_and_stored_with_its_text(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "Fastokens", WrongOnOneText)
    monkeypatch.setattr(backends, "make_hard_strings", lambda tokenizer: ["a", WRONG])
    backend = open_backend(tokenizer, "fastokens")
    for _ in range(2):  # as in a notebook, where a second command has the same backend
        with pytest.raises(RecipeError, match=f"fastokens .* from the reference on '{WRONG}'"):
            backend.encode(["a"], False)
    with pytest.raises(Unequal, match=WRONG) as caught:
        open_backend(tokenizer).encode(["a"], False)
    assert list((tmp_path / "backends").glob("*.equal")) == []
    backends.store_difference(tokenizer, caught.value)
    assert isinstance(open_backend(tokenizer), Reference)
    label, other_tokenizer = Fastokens(tokenizer).label, replace(tokenizer, hash="another")
    questions = ((tokenizer, label), (tokenizer, "fastokens 99"), (other_tokenizer, label))
    assert [bool(backends.find_known_difference(*question)) for question in questions] == [
        True,
        False,
        False,
    ]
    backends.store_difference(tokenizer, Unequal("fastokens 1", "a\ud800"))
    stored = [mark.read_text() for mark in (tmp_path / "backends").iterdir()]
    assert sorted(stored) == ["a\\ud800", WRONG]
    # A mark whose text is damaged is still a mark.
    for mark in (tmp_path / "backends").iterdir():
        mark.write_bytes(b"\xff")
    assert isinstance(open_backend(tokenizer), Reference)


def test_a_damaged_tokenizer_of_the_cache_is_refused_in_one_sentence(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its size is that of the intact file, as after a power cut, so it is not made again."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"\0" * 100)
    with pytest.raises(Unreachable, match=r"cannot open the file .*: if the file is damaged"):
        open_backend(replace(tokenizer, path=str(file), hash="damaged"))


@pytest.fixture
def units(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Return a project with three units, and the text WRONG in the last."""
    set_window_size(monkeypatch, 700)
    for n in range(2):
        project.write_source([f"file {n} is encoded rightly"] * 8, f"{n}.jsonl")
    project.write_source([WRONG] * 20, "2.jsonl")
    return project.configure(documents("*.jsonl", layout="document"))


@pytest.mark.parametrize("fast", FAULTY)
def test_a_difference_converts_the_whole_stream_again(
    units: Project, monkeypatch: pytest.MonkeyPatch, fast: type[Fastokens]
) -> None:
    true = units.convert_into("tokenizer.backend=reference")
    monkeypatch.setattr(backends, "Fastokens", fast)
    monkeypatch.setattr(unit, "_backends", {})
    outcome = units.run(workers=2, watcher=(watcher := RecordingWatcher()))
    assert outcome.manifest.backend.startswith("tokenizers ")
    assert (outcome.done, outcome.reused) == (3, 0)
    assert units.rows == true.rows
    found = FAULTY[fast].format(WRONG)
    assert [found in sentence for sentence in watcher.messages] == [True]
    assert [found in note for note in outcome.notes] == [True]
    again = units.convert().out
    assert "up to date" in again
    assert f"on '{WRONG}', as an earlier run found; so the reference encodes" in again


def test_units_of_a_backend_that_differs_are_not_reused(
    units: Project, tokenizer: Tokenizer
) -> None:
    """Another stream, or a run that was killed before it started again, may have found the
    difference.
    """
    first = units.run().manifest
    assert first.backend.startswith("fastokens ")
    backends.store_difference(tokenizer, Unequal(first.backend, "found elsewhere"))
    unit._backends.clear()
    second = units.run()
    assert (second.manifest.backend[:11], second.reused) == ("tokenizers ", 0)
    assert second.manifest.index_hash == first.index_hash


def test_the_search_finds_every_token_anywhere_and_nothing_else() -> None:
    for tokens in (LLAMA_3, T5, ["<s>", "</s>"], ["a"]):
        specials = make_token_search(tokens)
        assert all(specials(f"{a}{token}{b}") for token in tokens for a in ("", "x<") for b in "|>")
    specials = make_token_search(LLAMA_3 + T5)
    assert not any(map(specials, ["", "<|", "<|im_start|>", "<em>", "<extra_id_x>", "</span>"]))
    assert not make_token_search([])("<s>")
    assert not make_token_search([""])("<s>")


def test_a_control_token_in_ordinary_text_is_refused(lettered: Tokenizer, tmp_path: Path) -> None:
    """For a tokenizer whose model also has </s> as a piece of text, as T5's does."""
    words, path = ["</s>", "<unk>", "a", "<", "/", "s", ">"], str(tmp_path / "tokenizer.json")
    own = {"special_tokens": ["</s>", "<unk>", "<x>"], "special_ids": [0, 1, 7]}
    tokenizer = replace(lettered, path=path, template_variables={"unk_token": "<unk>"}, **own)
    texts = ["a a", "a </s> a", "a é a", "a <x> é", "a <unk> a"]
    scored = [(word, 0.0 if word == "</s>" else -1.0) for word in words]
    for model_kind in (Unigram(scored, 1), WordLevel({w: i for i, w in enumerate(words)}, "<unk>")):
        model = Model(model_kind)
        model.pre_tokenizer = WhitespaceSplit()
        model.add_special_tokens(tokenizer.special_tokens)
        model.save(path)
        for rule, refused in (("escape", [1]), ("allow", []), ("reject", [1, 3])):
            rows, marked, refused_rows = encode_texts(Reference(tokenizer), texts, rule, tokenizer)
            assert (marked, refused_rows) == ([1, 3], refused)
            assert rows[2].tolist() == [2, 1, 2], "an unknown character is no special token"
            assert rows[4].tolist() == [2, 1, 2], "nor is the name of one"
            assert (7 in rows[3]) == (rule != "escape")


class CodePoints(backends.Backend):
    """The ids of a text are its code points. As ordinary text, upper case becomes lower case."""

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        read = str if match_special else str.lower
        return Ragged.from_rows([to_ids(read(text)) for text in texts], "u4")


@given(TEXTS, st.sets(st.sampled_from("ABCDZ"), max_size=4), RULES)
@example(["AB"], {"B"}, "reject")  # the largest id of the batch is the least special one
@example(["DZ"], {"D"}, "reject")
@example(["B\u0400", "A\u0400"], {"A"}, "reject")  # most ids are after the special one
@example(["B", "AB", "B\u0400"], {"A", "\u0400"}, "reject")  # they are between two special ones
@settings(max_examples=50, deadline=None)
def test_a_record_contains_a_special_token_if_one_of_its_ids_is_special(
    lettered: Tokenizer, texts: list[str], special: set[str], rule: str
) -> None:
    """Wherever the special ids are in the vocabulary, and whatever other ids are in the batch."""
    tokens = sorted(special)
    tokenizer = replace(lettered, special_tokens=tokens, special_ids=[*map(ord, tokens)])
    rows, marked, refused = encode_texts(CodePoints(), texts, rule, tokenizer)
    expected = [row for row, text in enumerate(texts) if special & set(text)]
    assert marked == expected
    assert refused == (expected if rule == "reject" else [])
    read = [t.lower() if rule == "escape" and special & set(t) else t for t in texts]
    assert to_lists(rows) == [*map(to_ids, read)]
