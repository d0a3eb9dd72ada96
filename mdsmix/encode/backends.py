"""Turns texts into token ids, by the reference tokenizer or by a faster one that is proved equal to
it, and finds special tokens inside texts.

The reference is Hugging Face `tokenizers` with the snapshot's tokenizer.json: about 3 MB/s a core.
`fastokens` gives the same ids at 170-260 MB/s a core and without a Python object per token, but
only for byte-level BPE tokenizers. fastokens is young, so `auto` compares its ids with the
reference's: first on a fixed set of hard strings, then on the first 16 texts of a stream in each
process, then on 8 more whenever the number of texts has doubled. One difference raises `Unequal`:
the caller then encodes the whole stream with the reference.

After N texts a process has compared k = 16 + 8 * log2(N / 16) of them or more: 120 of 131,072. A
difference in a share p of all texts goes unnoticed in that process with probability (1 - p)^k: 0.2
% if one text in twenty differs.

A user's text that contains `<|im_start|>` must not become a control token. Almost no text contains
one, so all texts are first encoded with special tokens matched. If no special id comes out, the
text contained none, and both ways of encoding agree. Two reductions over the ids cost 1 % of a
conversion; searching the texts cost 11 %. Only rows with a special id are encoded again as ordinary
text, and compared, since `<unk>` is a special id too. Conversations are searched instead, since
their template prints special tokens itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import orjson

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import RecipeError
from mdsmix.messages import flatten_error
from mdsmix.ragged import Ragged
from mdsmix.storage import map_threads
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

FIRST_COMPARED = 16
"How many of the first texts of a stream each process compares."
COMPARED_PER_DOUBLING = 8
"How many more texts it compares whenever the number of texts has doubled."
SAMPLE_CHARACTERS = 1 << 11
"""For texts of up to 2,048 characters, the ids that the stream gets are compared. Of a longer text,
2,048 characters from a random offset are encoded by both backends and compared. Comparing long
texts as a whole took 6 % of the time of 200 MB of documents.
"""


class Backend(ABC):
    """Turns texts into flat ids. A backend does not add BOS or EOS: the encoders do."""

    label: str
    "Name and version, as the manifest records it."

    @abstractmethod
    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        """Return uint32 ids, one row per text.

        Args:
            texts: the texts to encode.
            match_special: whether `<|im_start|>` in a text becomes the control token; otherwise it
                becomes ordinary tokens.
        """

    def begin(self, stream: str) -> None:  # noqa: B027
        """Prepare for the texts of a stream. A backend that compares texts with the reference
        starts to count them from 0.

        Args:
            stream: the name of the stream.
        """


class Unequal(Exception):
    """A fast backend and the reference disagree on `text`."""

    def __init__(self, label: str, text: str) -> None:
        super().__init__(label, text)  # unchanged, since the exception is pickled
        self.label = label
        self.text = text

    def __str__(self) -> str:
        return f"{self.label} differs from the reference on {self.text[:80]!r}"


class Reference(Backend):
    """Hugging Face `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer as Model

        self.label = f"tokenizers {package_version('tokenizers')}"
        self._model = Model.from_file(tokenizer.path)

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self._model.encode_special_tokens = not match_special
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return Ragged.from_rows([encoding.ids for encoding in encodings], np.uint32)


class Fastokens(Backend):
    """The Rust crate fastokens, by its flat buffers."""

    @staticmethod
    def name() -> str:
        """Return the name and the installed version, such as `fastokens 0.3.5`."""
        return f"fastokens {package_version('fastokens')}"

    def __init__(self, tokenizer: Tokenizer) -> None:
        from fastokens import Tokenizer as Model

        self.label = self.name()
        try:
            self._model = Model.from_file(tokenizer.path)
        except ValueError:
            complete = fill_id_gaps(Path(tokenizer.path).read_bytes())
            if complete is None:
                raise
            self._model = Model.from_json_str(complete)

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        ids, offsets = self._model.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=not match_special
        )
        return Ragged(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64))


def fill_id_gaps(content: bytes) -> str | None:
    """Return the content of a BPE tokenizer.json, with a new token for each id that its vocabulary
    skips. Return None if the model is not BPE, or its vocabulary skips no id.

    fastokens 0.3.5 refuses a vocabulary that skips ids, such as that of GPT-4o (199,998 and
    others). The new tokens never come out of a text: no merge makes them, and their strings begin
    with the character U+0000, which byte-level and SentencePiece vocabularies do not contain.
    """
    tree = orjson.loads(content)
    model = tree["model"]
    if model.get("type") != "BPE":
        return None
    ids = set(model["vocab"].values())
    gaps = set(range(max(ids, default=0))) - ids
    if not gaps:
        return None
    model["vocab"] |= {f"\0{number}": number for number in sorted(gaps)}
    return orjson.dumps(tree).decode()


class CheckedBackend(Backend):
    """A fast backend whose ids are compared with the reference's."""

    def __init__(self, tokenizer: Tokenizer, fast: Backend, reference: Backend, name: str) -> None:
        """Keep the backends, and make the hard strings on which they are compared first.

        Args:
            tokenizer: its special tokens are among the hard strings.
            fast: the backend whose ids are used.
            reference: the backend whose ids are right.
            name: the recipe's tokenizer.backend, for a message.
        """
        self.fast = fast
        self.reference = reference
        self.label = fast.label
        self._name = name
        self._unproved = make_hard_strings(tokenizer)
        self._stream = ""
        self._texts = 0
        self._compared = 0

    def begin(self, stream: str) -> None:
        if stream != self._stream:
            self._stream = stream
            self._texts = 0
            self._compared = 0

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self._prove()
        ids = self.fast.encode(texts, match_special)
        self._texts += len(texts)
        # How many texts of the stream are to be compared by now.
        due = self._texts
        if due >= FIRST_COMPARED:
            doublings = (self._texts // FIRST_COMPARED).bit_length() - 1
            due = FIRST_COMPARED + COMPARED_PER_DOUBLING * doublings
        filled = np.flatnonzero(ids.lengths).tolist()  # comparing an empty text proves nothing
        random = Random(self._texts)  # seeded, so that the choice can be repeated
        chosen = random.sample(filled, min(due - self._compared, len(filled)))
        self._compared += len(chosen)
        # Short texts are compared as a whole, long ones by an excerpt.
        short = [row for row in chosen if len(texts[row]) <= SAMPLE_CHARACTERS]
        self.check([texts[row] for row in short], match_special, ids.take(np.array(short, int)))
        excerpts = list[str]()
        for row in {*chosen} - {*short}:
            start = random.randrange(len(texts[row]) - SAMPLE_CHARACTERS + 1)
            excerpts.append(texts[row][start : start + SAMPLE_CHARACTERS])
        self.check(excerpts, match_special)
        return ids

    def check(self, texts: Sequence[str], match_special: bool, ids: Ragged | None = None) -> None:
        """Compare the fast backend's ids of texts with the reference's.

        Raises Unequal if they differ.

        Args:
            texts: the texts to compare.
            match_special: as in `encode`.
            ids: the fast backend's ids of these texts; None: the texts are encoded here.
        """
        reference_ids = self.reference.encode(texts, match_special)
        if ids is None:
            ids = self.fast.encode(texts, match_special)
        for row, text in enumerate(texts):
            if not np.array_equal(ids[row], reference_ids[row]):
                raise Unequal(self.label, text)

    def _prove(self) -> None:
        """Compare both backends on the hard strings, at the first call only. Takes 40 ms.

        Raises RecipeError if an id differs and the recipe names the backend, Unequal if the backend
        is `auto`.
        """
        texts = self._unproved
        self._unproved = []  # so later calls compare nothing
        if not texts:
            return
        try:
            for match_special in (False, True):
                self.check(texts, match_special)
        except Unequal as unequal:
            if self._name == "auto":
                raise
            raise RecipeError(
                f"tokenizer.backend is {self._name}, but {unequal}: use auto."
            ) from None


def open_backend(tokenizer: Tokenizer, name: str = "auto") -> Backend:
    """Return the backend that the recipe names as tokenizer.backend.

    `auto` is fastokens if it supports this tokenizer and no earlier run found a difference from the
    reference. Otherwise it is the reference.
    Raises RecipeError if the recipe names a backend that does not support the tokenizer.
    """
    if name == "reference" or (name == "auto" and find_known_difference(tokenizer)):
        return Reference(tokenizer)
    reference: Backend
    # Both are opened at the same time, which takes 0.4 s (one after the other 0.55 s), since
    # fastokens lets other threads run.
    fast, reference = map_threads(lambda opener: opener(tokenizer), (_try_fastokens, Reference))
    if isinstance(fast, Backend):
        return CheckedBackend(tokenizer, fast, reference, name)
    if name == "auto":
        return reference
    raise RecipeError(
        f"tokenizer.backend is {name}, which does not support {tokenizer.name} "
        f"({flatten_error(fast)[:160]}): use auto or reference."
    )


def _try_fastokens(tokenizer: Tokenizer) -> Any:
    """Return the fast backend, or the error if it does not support the tokenizer."""
    try:
        return Fastokens(tokenizer)
    except Exception as error:  # the crate raises many kinds of errors
        return error


def store_difference(tokenizer: Tokenizer, unequal: Unequal) -> None:
    """Store the text on which a backend and the reference differ in the cache, for later runs with
    this tokenizer.
    """
    evidence = unequal.text.encode("utf-8", "backslashreplace")
    keep_in_cache(_difference_file(tokenizer, unequal.label), evidence)


def find_known_difference(tokenizer: Tokenizer, label: str | None = None) -> Unequal | None:
    """Return the difference that an earlier run stored in the cache for this tokenizer and a
    version of the fast backend; None if no difference is known. After one, `auto` uses the
    reference.

    Args:
        label: name and version of the fast backend; None: the installed one.
    """
    label = label or Fastokens.name()
    file = _difference_file(tokenizer, label)
    return Unequal(label, file.read_text("utf-8")) if file.exists() else None


def _difference_file(tokenizer: Tokenizer, label: str) -> Path:
    """Return the cache file for a difference. Its name contains the versions of both libraries.

    Args:
        tokenizer: the tokenizer.
        label: name and version of the fast backend.
    """
    compared = f"{label}-tokenizers-{package_version('tokenizers')}".replace(" ", "-")
    return cache_folder() / "backends" / f"{tokenizer.hash}-{compared}.unequal"


def make_hard_strings(tokenizer: Tokenizer) -> list[str]:
    """Return texts on which tokenizer libraries have been seen to differ: white space, control
    characters, scripts, long runs, special tokens.
    """
    spaces = [character for character in map(chr, range(0x3001)) if character.isspace()]
    spaces += ["\u200b", "\ufeff"]
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


def make_token_search(tokens: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that returns whether a text contains one of the tokens. Empty tokens are
    ignored.

    Tokens are grouped by their first two characters. A text is searched once per group, for the
    prefix that all tokens of the group share: one search for "<|" covers the 256 special tokens of
    Llama 3. The tokens themselves are searched only if the text contains the prefix. Any occurrence
    counts, even if a tokenizer with `single_word` tokens would not match it. A token that only the
    tokenizer's normalizer makes (by lower case, say) is not found.
    """
    known = sorted({*tokens} - {""})
    groups = [[*group] for _, group in groupby(known, lambda token: token[:2])]
    by_prefix = {os.path.commonprefix(group): group for group in groups}  # noqa: RUF071  (of strings)
    return lambda text: any(
        token in text for prefix in by_prefix if prefix in text for token in by_prefix[prefix]
    )


class EncodedTexts(NamedTuple):
    """The ids of texts, one row per text, and the rows that contain a special token."""

    ids: Ragged
    marked: list[int]
    "Rows whose text contains a special token."
    refused: list[int]
    "The rows among `marked` that the recipe's special_tokens_in_text refuses."


def encode_texts(
    backend: Backend, texts: Sequence[str], rule: str, tokenizer: Tokenizer
) -> EncodedTexts:
    """Encode texts and find the special tokens in them.

    A row contains a special token if its ids differ when the text is encoded as ordinary text, or
    if even the ordinary ids contain the control token. `escape` gives the ordinary ids, and refuses
    rows that still contain the control token. `allow` and `reject` give the special ids; `reject`
    refuses all these rows.

    Args:
        rule: the recipe's special_tokens_in_text: escape, allow or reject.
    """
    rows = backend.encode(texts, match_special=True)
    # Only rows with a special id can contain a special token; few do.
    suspects = _find_rows_with(rows, tokenizer.special_ids)
    if not suspects:
        return EncodedTexts(rows, [], [])
    suspect_texts = [texts[row] for row in suspects]
    plain = backend.encode(suspect_texts, match_special=False)
    stuck = [suspects[i] for i in _find_stuck_rows(plain, suspect_texts, tokenizer)]
    changed = [row for i, row in enumerate(suspects) if not np.array_equal(plain[i], rows[row])]
    marked = sorted({*stuck, *changed})
    refused = {"escape": stuck, "allow": [], "reject": marked}[rule]
    if rule != "escape":
        return EncodedTexts(rows, marked, refused)
    # Replace the suspects' rows by their ordinary ids, which are appended after all rows.
    order = np.arange(len(texts))
    order[suspects] = len(texts) + np.arange(len(suspects))
    return EncodedTexts(Ragged.concat([rows, plain]).take(order), marked, refused)


def _find_stuck_rows(plain: Ragged, texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the rows that contain a control token although their texts were encoded as ordinary
    text. This happens because vocabularies of Unigram and WordLevel models contain `</s>` like any
    word. The unknown token does not count, since any text may give it.

    Args:
        plain: the ids of the texts, encoded as ordinary text.
        texts: the texts.
        tokenizer: its special tokens are searched.
    """
    unknown = tokenizer.template_variables.get("unk_token")
    tokens = zip(tokenizer.special_ids, tokenizer.special_tokens, strict=True)
    names = {id: name for id, name in tokens if name != unknown}
    stuck = list[int]()
    for row in _find_rows_with(plain, sorted(names)):
        control_ids = {*plain[row]} & {*names}
        if any(names[id] in texts[row] for id in control_ids):
            stuck.append(row)
    return stuck


def _find_rows_with(rows: Ragged, ids: Sequence[int]) -> list[int]:
    """Return the rows that contain one of the ids.

    Each token is looked up in a table of flags, which takes 1.5 ms for 2 M tokens. Comparing each
    token with the least and the largest id took 16 ms, a sixth of a conversion, for vocabularies
    with special tokens at both ends, such as Phi-3's.
    """
    values = rows.values
    if not ids or not len(values) or values.max() < min(ids) or values.min() > max(ids):
        return []
    is_searched = np.zeros(max(max(ids), int(values.max())) + 1, bool)
    is_searched[ids] = True
    hits = np.flatnonzero(is_searched.take(values))  # positions in `values`, then their rows
    return [int(row) for row in np.unique(np.searchsorted(rows.offsets, hits, "right") - 1)]
