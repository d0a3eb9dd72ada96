"""Turns texts into token ids, by the reference tokenizer or by a faster one that is proved equal to
it.

The reference is Hugging Face `tokenizers` with the snapshot's tokenizer.json: about 3 MB/s a core.
`fastokens` gives the same ids at 170-260 MB/s a core and without a Python object per token for
byte-level BPE tokenizers, and at 25-90 MB/s for SentencePiece BPE tokenizers, which it gets in
another form (`word_form`). fastokens is young, so `auto` compares its ids with the
reference's: once on a fixed set of hard strings, then on the first 16 texts of a stream in each
process, then on 8 more whenever the number of texts has doubled. One difference, or an error of
fastokens, raises `Unequal`: the caller then encodes the whole stream with the reference.

After N texts a process has compared at least k = 16 + 8 * log2(N / 16) of them: 120 of 131,072. If
a share p of all texts gets other ids, the process does not notice that with probability (1 - p)^k:
0.2 % if one text in twenty differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from mdsmix.cache import keep_in_cache
from mdsmix.encode.backend_files import (
    WORD_FORM_VERSION,
    locate_difference,
    locate_proof,
    locate_word_form,
    may_have_word_form,
    name_fastokens,
)
from mdsmix.encode.fast_model import open_model
from mdsmix.encode.separator import TextJoiner, find_separators
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.freed_memory import release_freed_memory
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.messages import flatten_error
from mdsmix.ragged import Ragged
from mdsmix.storage import map_threads
from mdsmix.tokenizer.bpe_json import find_joined
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

if TYPE_CHECKING:
    # word_form and token_spelling take 3 ms to import. Only SentencePiece tokenizers, and marks on
    # parts of messages, need them.
    from mdsmix.encode.scan_form import ScanForm
    from mdsmix.encode.token_spelling import TokenSpans, TokenSpelling
    from mdsmix.encode.word_form import CharacterParts, FirstSpace

FIRST_COMPARED = 16
"How many of the first texts of a stream each process compares."
COMPARED_PER_DOUBLING = 8
"How many more texts each process compares whenever the number of texts has doubled."
SAMPLE_CHARACTERS = 1 << 11
"""Texts of up to 2,048 characters are compared as a whole. Of a longer text, 2,048 characters from
a random offset are encoded by both backends and compared. Comparing long texts as a whole took 6 %
of the time of a conversion of 200 MB of documents.
"""


class Backend(ABC):
    """Turns texts into token ids, without BOS and EOS, which the callers add."""

    label: str
    "Name and version of the library, such as `fastokens 0.3.5`, for the manifest."

    @abstractmethod
    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        """Return uint32 ids, one row per text.

        Args:
            texts: the texts to encode.
            match_special: True: a string such as `<|im_start|>` in a text becomes the control
                token; False: it becomes ordinary tokens.
        """

    def locate(self, texts: Sequence[str], ids: Ragged) -> TokenSpans:
        """Return the characters of each token of texts that were encoded with special tokens
        matched.

        Raises NotImplementedError if the backend is not, and has not, the reference (Hugging Face
        `tokenizers`).
        Raises Unequal if the reference is asked for a text, and gives other ids.

        Args:
            texts: the texts.
            ids: their ids.
        """
        raise NotImplementedError

    def begin(self, stream: str) -> None:  # noqa: B027
        """Prepare for the texts of a stream. A backend that compares some of its texts with the
        reference (Hugging Face `tokenizers`) starts to count the texts of the stream from 0.

        Args:
            stream: the name of the stream.
        """


class Unequal(Exception):
    """Raised if a fast backend gives other ids for `text` than the reference (Hugging Face
    `tokenizers`), or raises an error and gives none.
    """

    def __init__(self, label: str, text: str, error: str = "") -> None:
        """Keep the name and version of the fast backend, the text, and the error: its class and
        message, such as `ValueError: match limit exceeded`; "" if the backend gave other ids.
        """
        super().__init__(label, text, error)  # unchanged, since the exception is pickled
        self.label = label
        self.text = text
        self.error = error

    def __str__(self) -> str:
        if self.error:
            return f"{self.label} fails on {self.text[:80]!r} ({self.error})"
        return f"{self.label} differs from the reference on {self.text[:80]!r}"


class Reference(Backend):
    """The backend whose ids count as right: Hugging Face `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the tokenizer.json of the tokenizer's snapshot.

        Raises Unreachable if the library cannot open it.
        """
        from tokenizers import Tokenizer as Model

        self.label = f"tokenizers {package_version('tokenizers')}"
        self._path = find_joined(tokenizer.path)
        try:
            self._model = Model.from_file(self._path)
        except Exception as error:  # the library raises no other class
            raise Unreachable(
                f"{self.label} cannot open the file {self._path} of mdsmix's cache "
                f"({flatten_error(error)[:160]}): if the file is damaged, delete its folder, and "
                "the same command makes it again."
            ) from None

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        self._model.encode_special_tokens = not match_special
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return Ragged.from_rows([encoding.ids for encoding in encodings], np.uint32)

    @cached_property
    def _spelling(self) -> TokenSpelling:
        from mdsmix.encode.token_spelling import TokenSpelling

        return TokenSpelling(self._path)

    def locate(self, texts: Sequence[str], ids: Ragged) -> TokenSpans:
        spans = self._spelling.find_spans(texts, ids)
        if spans:
            return spans
        from mdsmix.encode.token_spelling import TokenSpans

        # Find the texts whose tokens do not spell them.
        parts = list[TokenSpans]()
        for number, text in enumerate(texts):
            spans = self._spelling.find_spans([text], ids.slice(number, number + 1))
            parts.append(spans or self._locate_by_encoding(text, ids[number]))
        return TokenSpans(*map(np.concatenate, zip(*parts, strict=True)))

    def _locate_by_encoding(self, text: str, ids: NDArray[Any]) -> TokenSpans:
        """Return the characters of each token of a text by encoding it again.

        Raises Unequal if it gets other ids.
        """
        model = self._model
        model.encode_special_tokens = False
        # A post-processor such as Llama 3's trims white space from the places of tokens. It changes
        # no id, since no special token is added.
        post_processor = model.post_processor
        model.post_processor = None
        try:
            encoding = model.encode(text, add_special_tokens=False)
        finally:
            model.post_processor = post_processor
        if not np.array_equal(encoding.ids, ids):
            raise Unequal(self.label, text)
        from mdsmix.encode.token_spelling import TokenSpans

        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return TokenSpans(spans[:, 0], spans[:, 1])


class Fastokens(Backend):
    """The Rust library fastokens. It returns the ids of all texts in one buffer."""

    def __init__(self, tokenizer: Tokenizer, tries_word_form: bool = True) -> None:
        """Read the tokenizer.json of the tokenizer's snapshot.

        Args:
            tokenizer: the tokenizer.
            tries_word_form: False if it is known to have no word form (word_form.py).

        Raises an error of any class if fastokens does not support the tokenizer.
        """
        self.label = name_fastokens()
        self._parts: CharacterParts | None = None
        "The additional ids of a word form; None if the tokenizer is used as it is."
        self._first_space: FirstSpace | None = None
        "What prepends a space to texts; None if the tokenizer does that itself, or not at all."
        self._scan_form: ScanForm | None = None
        "What changes texts and ids of a word form that needs it (scan_form.py)."
        self._tokenizer = tokenizer
        words = self._open_word_form(tokenizer) if tries_word_form else None
        if words:
            from mdsmix.encode.word_form import CharacterParts, FirstSpace, read_scan_form

            self._scan_form = read_scan_form(str(locate_word_form(tokenizer.hash)))
            aliases = self._scan_form.aliases if self._scan_form else []
            self._parts = CharacterParts.read(words, aliases)
            self._first_space = FirstSpace.read(words)
        self._model = words or self._open_model(find_joined(tokenizer.path))
        self._joiner = TextJoiner(find_separators(self._model))

    def _open_model(self, path: str) -> Any:
        """Return fastokens' model of a tokenizer.json."""
        try:
            return open_model(path, self)
        except ValueError:  # perhaps since the vocabulary skips ids
            from fastokens import Tokenizer as Model

            complete = fill_id_gaps(Path(path).read_bytes())
            if complete is None:
                raise
            return Model.from_json_str(complete)

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        texts = list(texts)
        if self._scan_form:
            return self._encode_scanned(texts, match_special, self._scan_form)
        return self._encode(texts, match_special)

    def _encode(self, texts: list[str], match_special: bool) -> Ragged:
        if self._first_space:
            texts = self._first_space.prepend(texts, match_special)
        rows: Ragged | None = None
        if match_special:
            rows = self._joiner.encode(texts, partial(self._encode_each, match_special=True))
        if rows is None:
            rows = self._encode_each(texts, match_special)
        return self._parts.expand(rows) if self._parts else rows

    def _encode_each(self, texts: Sequence[str], match_special: bool) -> Ragged:
        """Return the model's own ids of each text."""
        ids, offsets = self._model.encode_batch_flat(
            texts, add_special_tokens=False, split_special_tokens=not match_special
        )
        return Ragged(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64))

    def _encode_scanned(self, texts: list[str], match_special: bool, form: ScanForm) -> Ragged:
        changed, left_out = form.change(texts)
        rows = form.join_runs(self._encode(changed, match_special))
        if not left_out:
            return rows
        # Append the ids of the reference after all rows, and take these in place of their rows.
        reference_rows = self.reference.encode(
            [texts[number] for number in left_out], match_special
        )
        order = np.arange(len(texts))
        order[left_out] = len(texts) + np.arange(len(left_out))
        return Ragged.concat([rows, reference_rows]).take(order)

    @cached_property
    def reference(self) -> Backend:
        """The reference, for texts that are left to it. `open_backend` sets its own."""
        return Reference(self._tokenizer)

    def _open_word_form(self, tokenizer: Tokenizer) -> Any:
        """Return fastokens' model of the tokenizer's word form, or None if it has none."""
        path = str(locate_word_form(tokenizer.hash))
        with suppress(Exception):  # the file is missing, or damaged
            return open_model(path, self)
        return open_model(path, self) if _keep_word_form(tokenizer) else None


def _keep_word_form(tokenizer: Tokenizer) -> bool:
    """Make the tokenizer's word form and keep it in the cache. Return whether it has one.

    This takes 0.05 s for Llama 2. For Gemma 3 it takes 1 s, and 200 MB meanwhile.
    """
    if not may_have_word_form(tokenizer.path):
        return False
    from mdsmix.encode.word_form import make_word_form

    content = make_word_form(Path(find_joined(tokenizer.path)).read_bytes())
    if content is None:
        return False
    keep_in_cache(locate_word_form(tokenizer.hash), content)
    release_freed_memory()
    return True


def fill_id_gaps(content: bytes) -> str | None:
    """Return the content of a BPE tokenizer.json, with a new token for each id that its vocabulary
    skips. Return None if the model is not BPE, or if its vocabulary does not skip an id.

    fastokens 0.3.5 refuses a vocabulary that skips ids; GPT-4o's skips 199,998 and others. No text
    is ever encoded to a new token: no merge makes it, and its string begins with the character
    U+0000, which byte-level and SentencePiece vocabularies do not contain.

    Args:
        content: the bytes of the tokenizer.json.
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
    """A fast backend that encodes all texts, and is checked on some of them: their ids must be
    those of the reference (Hugging Face `tokenizers`).
    """

    def __init__(self, tokenizer: Tokenizer, fast: Backend, reference: Backend, name: str) -> None:
        """Store the arguments.

        Args:
            tokenizer: the tokenizer. Its special tokens are among the hard strings.
            fast: the backend that encodes all texts.
            reference: the backend that the ids are compared with.
            name: the recipe's tokenizer.backend: `auto` or `fastokens`.
        """
        self.fast = fast
        self.reference = reference
        self.label = fast.label
        self._name = name
        self._tokenizer = tokenizer
        self._is_proved = False
        "Whether this process or an earlier one has compared the backends on the hard strings."
        self._stream = ""
        self._texts = 0
        "Texts of the stream that were encoded."
        self._compared = 0
        "Texts of the stream that were compared."

    def begin(self, stream: str) -> None:
        """Count the texts from 0 if this is another stream than before."""
        if stream != self._stream:
            self._stream = stream
            self._texts = 0
            self._compared = 0

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        """Encode texts with the fast backend, and compare the ids of some of them with the ids of
        the reference.

        Raises Unequal if ids differ or the fast backend fails, or an error of `_prove`.
        """
        from random import Random  # 1 ms, and a run that finds nothing to do compares nothing

        self._prove()
        ids = self._encode_fast(texts, match_special)
        self._texts += len(texts)
        # `due`: how many texts of the stream should be compared by now.
        due = self._texts
        if due >= FIRST_COMPARED:
            # How often the number of texts has doubled since the first 16: 0, 1, 2 at 16, 32, 64.
            doublings = (self._texts // FIRST_COMPARED).bit_length() - 1
            due = FIRST_COMPARED + COMPARED_PER_DOUBLING * doublings
        missing = due - self._compared
        if missing == 0:  # as in most batches
            return ids
        filled = np.flatnonzero(ids.lengths).tolist()  # comparing an empty text proves nothing
        random = Random(self._texts)  # seeded, so that the choice can be repeated
        chosen = random.sample(filled, min(missing, len(filled)))
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

    def locate(self, texts: Sequence[str], ids: Ragged) -> TokenSpans:
        try:
            return self.reference.locate(texts, ids)
        except Unequal as unequal:
            raise Unequal(self.label, unequal.text) from None

    def check(self, texts: Sequence[str], match_special: bool, ids: Ragged | None = None) -> None:
        """Compare the fast backend's ids of texts with those of the reference (Hugging Face
        `tokenizers`).

        Raises Unequal if they differ or the fast backend fails.

        Args:
            texts: the texts to compare.
            match_special: whether a string such as `<|im_start|>` in a text becomes the control
                token.
            ids: the fast backend's ids of these texts; None if it has not encoded them yet.
        """
        reference_ids = self.reference.encode(texts, match_special)
        if ids is None:
            ids = self._encode_fast(texts, match_special)
        for row, text in enumerate(texts):
            if not np.array_equal(ids[row], reference_ids[row]):
                raise Unequal(self.label, text)

    def _encode_fast(self, texts: Sequence[str], match_special: bool) -> Ragged:
        """Encode texts with the fast backend.

        Raises Unequal if it fails on a text, as a regular expression may that exceeds its limits.
        """
        try:
            return self.fast.encode(texts, match_special)
        except BaseException as error:
            if not texts or not _is_failure(error):
                raise
            if len(texts) == 1:
                # If the reference fails too, that is no difference, and its error is shown.
                self.reference.encode(texts, match_special)
                reason = f"{type(error).__name__}: {flatten_error(error)[:160]}"
                raise Unequal(self.label, texts[0], reason) from None
        # Find the text. If none fails alone, these are the ids.
        return Ragged.concat([self._encode_fast([text], match_special) for text in texts])

    def _prove(self) -> None:
        """Compare both backends on the hard strings, unless this process or an earlier one has done
        that with this tokenizer and these versions: comparing takes 40 ms, which were 3 % of a
        conversion of 133 MB of pairs.

        If an id differs or the fast backend fails:
        Raises RecipeError if the recipe's backend is `fastokens`.
        Raises Unequal if the recipe's backend is `auto`.
        """
        if self._is_proved:
            return
        texts = make_hard_strings(self._tokenizer)
        file = locate_proof(self._tokenizer, self.label)
        proof = _name_proof(texts)
        with suppress(OSError):
            self._is_proved = file.read_bytes() == proof
        if self._is_proved:
            return
        try:
            for match_special in (False, True):
                self.check(texts, match_special)
        except Unequal as unequal:
            if self._name == "auto":
                raise
            raise RecipeError(
                f"tokenizer.backend is {self._name}, but {unequal}; in the recipe, set "
                "tokenizer.backend to auto."
            ) from None
        self._is_proved = True
        with suppress(Unreachable):  # a later run compares them again
            keep_in_cache(file, proof)


def _name_proof(texts: Sequence[str]) -> bytes:
    """Return the content of the file which says that both backends gave equal ids for these texts.
    It changes with the texts, and with what mdsmix does to texts and ids of the fast backend.
    """
    from mdsmix import __version__

    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    rules = f"mdsmix {__version__}, word form {WORD_FORM_VERSION}"
    return f"{rules}, hard strings {xxhash.xxh3_128_hexdigest(joined)}\n".encode()


def _is_failure(error: BaseException) -> bool:
    """Return whether a backend has failed on a text: not by lack of memory, or since the process is
    stopped. A panic in a Rust library is not an Exception.
    """
    if type(error).__name__ == "PanicException":
        return True
    return isinstance(error, Exception) and not isinstance(error, MemoryError)


def open_backend(tokenizer: Tokenizer, name: str = "auto") -> Backend:
    """Return the backend that the recipe names as tokenizer.backend.

    `auto` means fastokens if fastokens supports this tokenizer and no earlier run found a
    difference from the reference. Otherwise it means the reference.
    Raises RecipeError if the recipe names fastokens, but fastokens does not support the tokenizer.

    Args:
        tokenizer: the tokenizer.
        name: `auto`, `fastokens` or `reference`.
    """
    if name == "reference" or (name == "auto" and find_known_difference(tokenizer)):
        return Reference(tokenizer)
    # The memory that the word form takes is free again before a tokenizer is opened.
    tries_word_form = True
    if not locate_word_form(tokenizer.hash).exists():
        with suppress(Exception):  # it is raised again by Fastokens
            tries_word_form = _keep_word_form(tokenizer)
    # Both are opened at the same time, in two threads: 0.4 s instead of 0.55 s.
    reference: Backend
    openers: tuple[Callable[[Tokenizer], Any], ...] = (
        partial(_try_fastokens, tries_word_form=tries_word_form),
        _open_reference,
    )
    fast, reference = map_threads(lambda opener: opener(tokenizer), openers)
    if isinstance(fast, Fastokens):
        fast.reference = reference
        return CheckedBackend(tokenizer, fast, reference, name)
    if name == "auto":
        return reference
    raise RecipeError(
        f"tokenizer.backend is {name}, which does not support the tokenizer {tokenizer.name} "
        f"({flatten_error(fast)[:160]}); in the recipe, set tokenizer.backend to auto or reference."
    )


def _open_reference(tokenizer: Tokenizer) -> Reference:
    """Return the reference. What it took to open it is free before fastokens needs most memory:
    the peak of both is 47 MB lower for Gemma 3.
    """
    reference = Reference(tokenizer)
    release_freed_memory()
    return reference


def _try_fastokens(tokenizer: Tokenizer, tries_word_form: bool) -> Any:
    """Return the fast backend, or the error if it does not support the tokenizer."""
    try:
        return Fastokens(tokenizer, tries_word_form)
    except Exception as error:  # the crate raises many kinds of errors
        return error


def store_difference(tokenizer: Tokenizer, unequal: Unequal) -> None:
    """Store in the cache that a fast backend gives other ids than the reference (Hugging Face
    `tokenizers`), so that later runs with this tokenizer use the reference at once.

    Args:
        tokenizer: the tokenizer.
        unequal: the difference: the backend's name and version, and a text.
    """
    evidence = unequal.text.encode("utf-8", "backslashreplace")
    keep_in_cache(locate_difference(tokenizer, unequal.label), evidence)


def find_known_difference(tokenizer: Tokenizer, label: str | None = None) -> Unequal | None:
    """Return the difference that an earlier run has stored in the cache, by `store_difference`.
    Return None if no difference is known. If one is known, `auto` uses the reference.

    Args:
        tokenizer: the tokenizer.
        label: name and version of the fast backend; None: the installed one.
    """
    if label is None:
        label = name_fastokens()
    file = locate_difference(tokenizer, label)
    if not file.exists():
        return None
    text = ""
    with suppress(OSError):  # the file itself shows the difference, also if its text is damaged
        text = file.read_text("utf-8", "replace")
    return Unequal(label, text)


def make_hard_strings(tokenizer: Tokenizer) -> list[str]:
    """Return texts on which tokenizer libraries have been seen to differ, to test a fast library:
    white space, control characters, scripts, long runs of a character, special tokens.
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
