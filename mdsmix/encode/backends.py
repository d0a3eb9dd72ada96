"""Texts -> token ids, by the reference tokenizer or by a faster one that is proved equal to it; and
special tokens inside texts.

The reference is Hugging Face `tokenizers` on the snapshot's tokenizer.json: about 3 MB/s a core.
`fastokens` gives the same ids at 170-260 MB/s a core and without a Python object per token, but
only for byte-level BPE tokenizers. fastokens is young, so `auto` compares its ids with the
reference's: first on a fixed set of hard strings, then on the first 16 texts of a stream in each
process, then on 8 more whenever the number of texts has doubled. One difference raises `Unequal`:
the caller then encodes the whole stream with the reference.

After N texts a process has compared k = 16 + 8 * log2(N / 16) of them or more: 120 of 131,072. A
difference in a share p of all texts stays unnoticed in that process with probability (1 - p)^k: 0.2
% where one text in twenty differs.

A user's text that spells `<|im_start|>` must not become a control token. Nearly no text spells one,
so all texts are first encoded with special tokens matched. Where no special id comes out, the text
held none, and both ways of encoding agree. Two reductions over the ids cost 1 % of a conversion;
searching the texts cost 11 %. Only rows with a special id are encoded again as ordinary text, and
compared, since `<unk>` is a special id too. Conversations are searched instead: their template
prints special tokens of its own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import RecipeError
from mdsmix.messages import flatten_error
from mdsmix.ragged import Ragged
from mdsmix.storage import map_threads
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

FIRST, EACH = 16, 8
"A process compares the first 16 texts of a stream, and 8 more at each doubling of their number."
SAMPLE_CHARACTERS = 1 << 11
"""Texts of up to 2,048 characters are compared whole, by the ids in use. Of a longer text 2,048
characters from a random place on are encoded again and compared. With whole texts the reference
took 6 % of the time of 200 MB of documents.
"""


class Backend(ABC):
    """Texts in, flat ids out. A backend adds no BOS or EOS: the encoders do."""

    label: str
    "Name and version, as the manifest records it."

    @abstractmethod
    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        """uint32 ids, one row per text. `match_special`: `<|im_start|>` in a text becomes the
        control token, else ordinary tokens.
        """

    def begin(self, stream: str) -> None:  # noqa: B027
        """Announces the stream of the next texts; comparisons start anew with another stream."""


class Unequal(Exception):
    """A fast backend and the reference disagree on `text`."""

    def __init__(self, label: str, text: str) -> None:
        super().__init__(label, text)  # as they are, since the exception travels between processes
        self.label, self.text = label, text

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
        found = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return Ragged.from_rows([encoding.ids for encoding in found], np.uint32)


class Fastokens(Backend):
    """The Rust crate fastokens, through its flat buffers."""

    @staticmethod
    def name() -> str:
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
    """Return a BPE tokenizer.json with a token for each id that its vocabulary skips.

    fastokens 0.3.5 refuses a vocabulary that skips ids, as that of GPT-4o does (199,998 and
    others). No merge makes the added tokens, and their strings begin with the character 0, which
    byte-level and SentencePiece vocabularies do not contain, so no text gives them.

    Returns None if the model is not BPE, or skips no id.
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
    """A fast backend whose ids are compared with the reference's; `name` is the recipe's
    tokenizer.backend.
    """

    def __init__(self, tokenizer: Tokenizer, fast: Backend, reference: Backend, name: str) -> None:
        self.fast, self.reference = fast, reference
        self.label, self._name = fast.label, name
        self._unproved = make_hard_strings(tokenizer)
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
        filled = np.flatnonzero(ids.lengths).tolist()  # comparing an empty text proves nothing
        draw = Random(self._seen)
        chosen = draw.sample(filled, min(owed - self._compared, len(filled)))
        self._compared += len(chosen)
        whole = [row for row in chosen if len(texts[row]) <= SAMPLE_CHARACTERS]
        self.check([texts[row] for row in whole], match_special, ids.take(np.array(whole, int)))
        longer = (texts[row] for row in {*chosen} - {*whole})
        begins = ((text, draw.randrange(len(text) - SAMPLE_CHARACTERS + 1)) for text in longer)
        self.check([text[at : at + SAMPLE_CHARACTERS] for text, at in begins], match_special)
        return ids

    def check(self, texts: Sequence[str], match_special: bool, ids: Ragged | None = None) -> None:
        """Compares the fast backend's ids of texts with the reference's; raises Unequal. `ids`: the
        fast backend's; None: encoded here.
        """
        true = self.reference.encode(texts, match_special)
        ids = self.fast.encode(texts, match_special) if ids is None else ids
        for row, text in enumerate(texts):
            if not np.array_equal(ids[row], true[row]):
                raise Unequal(self.label, text)

    def _prove(self) -> None:
        """Compares the ids of the hard strings, once a process: 40 ms. RecipeError where the recipe
        names the backend and an id differs.
        """
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
    """The backend of the recipe's tokenizer.backend. `auto`: fastokens where it takes this
    tokenizer and is not known to differ, else the reference. RecipeError where a backend that the
    recipe names does not take the tokenizer.
    """
    if name == "reference" or (name == "auto" and find_known_difference(tokenizer)):
        return Reference(tokenizer)
    reference: Backend  # fastokens lets other threads run: both are open in its 0.4 s, not in 0.55
    fast, reference = map_threads(lambda opened: opened(tokenizer), (_try_fastokens, Reference))
    if isinstance(fast, Backend):
        return CheckedBackend(tokenizer, fast, reference, name)
    if name == "auto":
        return reference
    raise RecipeError(
        f"tokenizer.backend is {name}, which does not take {tokenizer.name} ({flatten_error(fast)[:160]}): use auto or reference."
    )


def _try_fastokens(tokenizer: Tokenizer) -> Any:
    """The fast backend, or why it does not take the tokenizer: the crate raises many kinds."""
    try:
        return Fastokens(tokenizer)
    except Exception as error:
        return error


def store_difference(tokenizer: Tokenizer, unequal: Unequal) -> None:
    """Writes the tokenizer, the backend's version and the text on which they differ into the cache
    folder, for later runs.
    """
    evidence = unequal.text.encode("utf-8", "backslashreplace")
    keep_in_cache(_difference_file(tokenizer, unequal.label), evidence)


def find_known_difference(tokenizer: Tokenizer, label: str | None = None) -> Unequal | None:
    """The difference that the cache folder records for this tokenizer and version of the fast
    backend; None where it records none. Where there is one, `auto` takes the reference.
    """
    label = label or Fastokens.name()
    mark = _difference_file(tokenizer, label)
    return Unequal(label, mark.read_text("utf-8")) if mark.exists() else None


def _difference_file(tokenizer: Tokenizer, label: str) -> Path:
    compared = f"{label}-tokenizers-{package_version('tokenizers')}".replace(" ", "-")
    return cache_folder() / "backends" / f"{tokenizer.hash}-{compared}.unequal"


def make_hard_strings(tokenizer: Tokenizer) -> list[str]:
    """Texts on which tokenizer libraries have been seen to differ: white space, control characters,
    scripts, long runs, special tokens.
    """
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


def make_token_search(tokens: Iterable[str]) -> Callable[[str], bool]:
    """A function that tells whether a text holds one of the tokens. Empty tokens are ignored.

    Tokens are grouped by their first two characters. A text is searched once per group, for the
    prefix that the group's tokens share: one search for "<|" stands for the 256 special tokens of
    Llama 3. Any occurrence counts, also where a tokenizer with `single_word` tokens would not
    match. A token that only the tokenizer's normalizer makes (by lower case, say) is not seen.
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
    """The ids of the texts, the rows that hold a special token, and those of them that `rule`
    (special_tokens_in_text) refuses.

    A row holds a special token where its ids differ once the text is encoded as ordinary text, or
    where the ordinary ids still have the control token. `escape` gives the ordinary ids, and
    refuses rows with the control token still in them. `allow` and `reject` give the special ids;
    `reject` refuses all these rows.
    """
    rows = backend.encode(texts, match_special=True)
    suspects = _find_rows_with(rows, tokenizer.special_ids)
    if not suspects:
        return rows, [], []
    ordinary = [texts[row] for row in suspects]
    plain = backend.encode(ordinary, match_special=False)
    stuck = [suspects[i] for i in _find_stuck_rows(plain, ordinary, tokenizer)]
    others = (row for i, row in enumerate(suspects) if not np.array_equal(plain[i], rows[row]))
    marked = sorted({*stuck, *others})
    refused = {"escape": stuck, "allow": [], "reject": marked}[rule]
    if rule != "escape":
        return rows, marked, refused
    order = np.arange(len(texts))
    order[suspects] = len(texts) + np.arange(len(suspects))
    return Ragged.concat([rows, plain]).take(order), marked, refused


def _find_stuck_rows(plain: Ragged, texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The rows that hold a control token although their texts were encoded as ordinary text:
    vocabularies of Unigram and WordLevel models hold `</s>` like any word. The unknown token does
    not count, since any text may give it.
    """
    unknown = tokenizer.template_variables.get("unk_token")
    pairs = zip(tokenizer.special_ids, tokenizer.special_tokens, strict=True)
    names = {i: name for i, name in pairs if name != unknown}
    rows = _find_rows_with(plain, sorted(names))
    return [row for row in rows if any(names[i] in texts[row] for i in {*plain[row]} & {*names})]


def _find_rows_with(rows: Ragged, ids: Sequence[int]) -> list[int]:
    """The rows that hold one of the ids.

    One lookup in a table of flags per token: 1.5 ms for 2 M tokens. Comparing each token with the
    least and the largest id took 16 ms, a sixth of a conversion, where special tokens stand at both
    ends of the vocabulary, as Phi-3's do.
    """
    values = rows.values
    if not ids or not len(values) or values.max() < min(ids) or values.min() > max(ids):
        return []
    is_wanted = np.zeros(max(max(ids), int(values.max())) + 1, bool)
    is_wanted[ids] = True
    hits = np.flatnonzero(is_wanted.take(values))
    return [int(row) for row in np.unique(np.searchsorted(rows.offsets, hits, "right") - 1)]
