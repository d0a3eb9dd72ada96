"""Texts -> token ids, by the reference tokenizer or by a faster one that is proved equal to it; and special tokens inside texts.

The reference is Hugging Face `tokenizers` on the snapshot's tokenizer.json: about 3 MB/s a core. `fastokens` gives the
same ids at 170-260 MB/s a core and without a Python object per token, but only for byte-level BPE tokenizers, and it is
young: so `auto` compares it with the reference. Hard strings come first; then the first texts that a process encodes of a stream; then
a few whenever the number of these texts has doubled. One difference raises `Unequal`: the caller then does the whole stream with the reference.

After N texts a process has compared at least 16 + 8 * log2(N / 16) of them: 120 of 131,072. A difference in a share p of all texts
stays unnoticed in that process with probability (1 - p) to that power: 0.2 % where one text in twenty differs.

`<|im_start|>` typed by someone must not become a control token. Nearly no text holds one, so texts are encoded as if that did not matter,
and the ids tell: where no special id comes out, none was in the text, and both ways of encoding agree. Two reductions over the ids cost
1 % of a conversion; searching the texts cost 11 %. Only rows with a special id are encoded again as ordinary text, and compared: `<unk>`
is a special id too. Conversations are searched instead, since their template brings special tokens of its own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from random import Random

import numpy as np

from mdsmix.encode.pretrained import Tokenizer, cache_folder, keep_in_cache, version
from mdsmix.errors import RecipeError
from mdsmix.ragged import Ragged

FIRST, EACH = 16, 8
"Texts of a stream that a process compares at first, and of those until each doubling. Sixteen documents take 13 ms."
SAMPLE_CHARACTERS = 1 << 14
"Texts up to this length are compared whole, by the ids in use. Of a longer one only this much is encoded again and compared, or it would hold up the run."


class Backend(ABC):
    """Texts in, flat ids out. It adds no token of its own: that is the encoders' work."""

    label: str
    "Name and version, as the manifest records it."

    @abstractmethod
    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        """uint32 ids, one row per text. `match_special`: `<|im_start|>` in a text is the control token, not text."""

    def begin(self, stream: str) -> None:  # noqa: B027
        """The texts to come are of this stream."""


class Unequal(Exception):
    """A fast backend and the reference disagree on `text`."""

    def __init__(self, label: str, text: str) -> None:
        super().__init__(f"{label} differs from the reference on {text[:80]!r}")
        self.label, self.text = label, text

    def __reduce__(self) -> tuple[type[Unequal], tuple[str, str]]:
        return Unequal, (self.label, self.text)  # it travels between processes


class Reference(Backend):
    """Hugging Face `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer as Model

        self.label = f"tokenizers {version('tokenizers')}"
        self._model = Model.from_file(tokenizer.path)

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self._model.encode_special_tokens = not match_special
        found = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return Ragged.of([encoding.ids for encoding in found], np.uint32)


class Fastokens(Backend):
    """The Rust crate fastokens, through its flat buffers."""

    @staticmethod
    def name() -> str:
        return f"fastokens {version('fastokens')}"

    def __init__(self, tokenizer: Tokenizer) -> None:
        from fastokens import Tokenizer as Model

        self.label = self.name()
        self._model = Model.from_file(tokenizer.path)

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        ids, offsets = self._model.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=not match_special
        )
        return Ragged(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64))


class CheckedBackend(Backend):
    """A fast backend whose ids are compared with the reference's; `name` is the recipe's tokenizer.backend."""

    def __init__(self, tokenizer: Tokenizer, fast: Backend, name: str = "auto") -> None:
        self.fast, self.reference = fast, Reference(tokenizer)
        self.label, self._name = fast.label, name
        self._unproved = hard_strings(tokenizer)
        self._stream, self._seen, self._compared = "", 0, 0

    def begin(self, stream: str) -> None:
        if stream != self._stream:
            self._stream, self._seen, self._compared = stream, 0, 0

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self._prove()
        ids = self.fast.encode(texts, match_special)
        self._seen += len(texts)
        owed = self._seen
        if owed >= FIRST:
            owed = FIRST + EACH * ((self._seen // FIRST).bit_length() - 1)
        filled = np.flatnonzero(ids.lengths).tolist()  # to compare an empty text proves nothing
        chosen = Random(self._seen).sample(filled, min(owed - self._compared, len(filled)))
        self._compared += len(chosen)
        whole = [row for row in chosen if len(texts[row]) <= SAMPLE_CHARACTERS]
        self.check([texts[row] for row in whole], match_special, ids.take(np.array(whole, int)))
        self.check([texts[row][:SAMPLE_CHARACTERS] for row in {*chosen} - {*whole}], match_special)
        return ids

    def check(self, texts: Sequence[str], match_special: bool, ids: Ragged | None = None) -> None:
        """Compares the ids of texts with the reference's. `ids`: the fast backend's; where None they are encoded here."""
        true = self.reference.encode(texts, match_special)
        ids = self.fast.encode(texts, match_special) if ids is None else ids
        for row, text in enumerate(texts):
            if not np.array_equal(ids[row], true[row]):
                raise Unequal(self.label, text)

    def _prove(self) -> None:
        """Compares the hard strings, once a process: 40 ms."""
        texts, self._unproved = self._unproved, []
        try:
            for match_special in (False, True) if texts else ():
                self.check(texts, match_special)
        except Unequal as unequal:
            if self._name == "auto":
                raise
            raise RecipeError(
                f"tokenizer.backend is {self._name}, but {unequal}: use auto."
            ) from None


def open_backend(tokenizer: Tokenizer, name: str = "auto") -> Backend:
    """`auto` is the fast backend where it takes this tokenizer and is proved equal, else the reference."""
    if name == "reference" or (name == "auto" and known_unequal(tokenizer)):
        return Reference(tokenizer)
    try:
        fast = Fastokens(tokenizer)
    except Exception as error:  # the crate raises many kinds for what it does not know
        if name == "auto":
            return Reference(tokenizer)
        why = " ".join(str(error).split())[:160].rstrip(".")
        raise RecipeError(
            f"tokenizer.backend is {name}, which does not take {tokenizer.name} ({why}): use auto or reference."
        ) from None
    return CheckedBackend(tokenizer, fast, name)


def remember_unequal(tokenizer: Tokenizer, unequal: Unequal) -> None:
    """Puts this tokenizer and backend version on the list that lasts; the string is kept as the evidence."""
    evidence = unequal.text.encode("utf-8", "backslashreplace")
    keep_in_cache(_mark(tokenizer, unequal.label), evidence)


def known_unequal(tokenizer: Tokenizer, label: str | None = None) -> Unequal | None:
    """The difference for which `auto` is the reference, of this version of the fast backend; None where the list holds none."""
    label = label or Fastokens.name()
    mark = _mark(tokenizer, label)
    return Unequal(label, mark.read_text("utf-8")) if mark.exists() else None


def _mark(tokenizer: Tokenizer, label: str) -> Path:
    compared = f"{label}-tokenizers-{version('tokenizers')}".replace(" ", "-")
    return cache_folder() / "backends" / f"{tokenizer.hash}-{compared}.unequal"


def hard_strings(tokenizer: Tokenizer) -> list[str]:
    """Texts on which tokenizers have been seen to differ."""
    spaces = [c for c in map(chr, range(0x3001)) if c.isspace()] + ["\u200b", "\ufeff"]
    runs = ["a" * 5000, " " * 3000, "\n" * 1000, "ab " * 1000, "1234567890" * 200, "!?" * 500]
    specials = tokenizer.special_tokens[:64]
    return [
        *("", " ", "\x00", "a\x00b", "\r\n\r\n x\r\n", "line\r\rline\n\n\n", "\t\tx = 1\n    y\n"),
        *(f"a{s}b{s}{s}c {s} d" for s in spaces),
        "".join(spaces),
        "e\u0301 o\u0308 \u0915\u094d\u0937 \u1100\u1161\u11a8 ﬁ Å Å ½ ² ｆｕｌｌ ÀÉ ß ẞ İı Σς",
        "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ \U0010ffff\ue000\ufffd",
        "東京都に行く。日本語、中文，한국어 العربية עברית हिन्दी ไทย",
        "don't I'LL we've 'tis it''s 3.14159e-10 0xFFFF 1,000,000 ①②",
        "camelCaseHTTPServer_snake-kebab",
        *(*runs, "字" * 500),
        *(f"{s} x{s}y {s}{s}\n{s}" for s in specials),
        *(s[:-1] for s in specials),
        " ".join(specials),
    ]


def special_search(tokens: Iterable[str]) -> Callable[[str], bool]:
    """What tells whether a text holds one of the tokens; an empty string is none.

    Tokens are grouped by their first two characters, and a text is searched once per group for what the group's tokens
    begin with (the 256 special tokens of Llama 3 are the one search for "<|"). A search answers yes for any
    occurrence, also where a tokenizer with `single_word` tokens would not match; it does not see a token that comes
    into being only through the tokenizer's normalizer (upper case made lower case, say).
    """
    known = sorted({*tokens} - {""})
    groups = [[*group] for _, group in groupby(known, lambda token: token[:2])]
    starts = {os.path.commonprefix(group): group for group in groups}  # noqa: RUF071  (of strings)
    return lambda text: any(
        token in text for start in starts if start in text for token in starts[start]
    )


def encode_texts(
    backend: Backend, texts: Sequence[str], rule: str, tokenizer: Tokenizer
) -> tuple[Ragged, list[int], list[int]]:
    """The ids of the texts, which rows hold a special token, and which of these `rule` (special_tokens_in_text) refuses.

    Those hold one that encode otherwise as ordinary text, or hold its control token even then. Under `escape` they are
    ordinary text and the latter are refused; under `allow` and `reject` they hold the special ids.
    """
    rows = backend.encode(texts, match_special=True)
    suspects = _rows_with(rows, tokenizer.special_ids)
    if not suspects:
        return rows, [], []
    ordinary = [texts[row] for row in suspects]
    plain = backend.encode(ordinary, match_special=False)
    stuck = [suspects[i] for i in _stuck(plain, ordinary, tokenizer)]
    others = (row for i, row in enumerate(suspects) if not np.array_equal(plain[i], rows[row]))
    marked = sorted({*stuck, *others})
    refused = {"escape": stuck, "allow": [], "reject": marked}[rule]
    if rule != "escape":
        return rows, marked, refused
    order = np.arange(len(texts))
    order[suspects] = len(texts) + np.arange(len(suspects))
    return Ragged.concat([rows, plain]).take(order), marked, refused


def _stuck(plain: Ragged, texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The rows that hold a control token although their texts were encoded as ordinary ones: the vocabularies of Unigram
    and WordLevel models hold its string like any word. The unknown token is none: any text may hold it."""
    unknown = tokenizer.template_variables.get("unk_token")
    pairs = zip(tokenizer.special_ids, tokenizer.special_tokens, strict=True)
    names = {i: name for i, name in pairs if name != unknown}
    rows = _rows_with(plain, sorted(names))
    return [row for row in rows if any(names[i] in texts[row] for i in {*plain[row]} & {*names})]


def _rows_with(rows: Ragged, ids: Sequence[int]) -> list[int]:
    """The rows that hold one of the ids.

    A table of all ids is asked: 1.5 ms for 2 M tokens. Comparing with the least and the largest id first took 16 ms where special tokens
    stand at both ends of the vocabulary, as those of Phi-3 do: a sixth of a conversion.
    """
    values = rows.values
    if not ids or not len(values) or values.max() < min(ids) or values.min() > max(ids):
        return []
    is_wanted = np.zeros(max(max(ids), int(values.max())) + 1, bool)
    is_wanted[ids] = True
    hits = np.flatnonzero(is_wanted.take(values))
    return [int(row) for row in np.unique(np.searchsorted(rows.offsets, hits, "right") - 1)]
