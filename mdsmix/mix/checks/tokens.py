"""Whether the tokens themselves fit: dtype, ids, lengths, separators, something to train on in every sample.

The manifest answers where there is one. Otherwise the first samples of the first shard do, which can show that a stream
is wrong but not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mdsmix.encode.targets import USABLE, VERDICTS, Targets, Turns, judge
from mdsmix.errors import RecipeError
from mdsmix.kinds import kind_of
from mdsmix.mix import first_samples
from mdsmix.mix.checks.columns import shape
from mdsmix.mix.findings import Hit, check
from mdsmix.mix.streams import Loader, Mix, Stream

PLAUSIBLE_IDS = 1 << 22
"4 million: above any vocabulary in use, where the run's own is not known."


@check(
    "tokens-dtype",
    "error",
    "A column of bytes is read with one dtype for the whole loader (token_encoding_type); the wrong one gives ids that mean nothing.",
)
def tokens_dtype(mix: Mix) -> Iterator[Hit]:
    limit = mix.tokenizer.vocab_size if mix.tokenizer else PLAUSIBLE_IDS
    for loader in mix.loaders:
        given = str(loader.dataset.get("token_encoding_type", "int64"))
        for stream in loader.streams:
            actual = _dtype_of_bytes(stream, limit)
            if actual and not _same_bytes(given, actual):
                yield Hit(
                    [stream.name],
                    f"{stream.name} holds bytes of {actual}, and {loader.label} reads all bytes columns as {given}.",
                    f"set token_encoding_type: {actual}; where streams differ in it, convert them again: ndarray columns name their dtype.",
                )


def _dtype_of_bytes(stream: Stream, limit: int) -> str | None:
    """The widest dtype under which the first samples hold ids of a vocabulary of `limit`; None without bytes columns."""
    columns = first_samples.bytes_columns(stream)
    if not columns:
        return None
    samples = [s[c] for s in stream.head.samples for c in columns if isinstance(s.get(c), bytes)]
    for dtype in ("int64", "int32", "uint16", "uint8"):
        if samples and all(_fits(data, dtype, limit) for data in samples):
            return dtype
    return None


def _fits(data: bytes, dtype: str, limit: int) -> bool:
    if not data or len(data) % np.dtype(dtype).itemsize:
        return False
    ids = np.frombuffer(data, dtype)
    return bool(ids.min() >= 0 and ids.max() < limit)


def _same_bytes(given: str, actual: str) -> bool:
    """Equal for every id that occurs: the sign matters only to 16 bits and fewer."""
    try:
        one, other = np.dtype(given), np.dtype(actual)
    except TypeError:
        return True  # setting-value says that the dtype is none
    return one.itemsize == other.itemsize and (one.itemsize > 2 or one.kind == other.kind)


@check(
    "id-vocabulary",
    "error",
    "The loader passes such an id on; the embedding fails on it, on a GPU with a CUDA assert that names nothing.",
)
def id_vocabulary(mix: Mix) -> Iterator[Hit]:
    vocabulary = mix.tokenizer.vocab_size if mix.tokenizer else None
    limits = {"the tokenizer": vocabulary, "the model": mix.section("model", "vocab_size")}
    for loader in mix.loaders:
        for stream in loader.streams:
            top = first_samples.largest_id(stream, loader)
            for whose, limit in limits.items():
                if top is not None and isinstance(limit, int) and top >= limit:
                    yield Hit(
                        [stream.name],
                        f"{stream.name} holds the id {top}, and the vocabulary of {whose} ends at {limit - 1}.",
                        "name the tokenizer that the stream was converted with, or convert it again; a model's vocab_size must cover it.",
                    )


@check(
    "rows-too-long",
    "error",
    "The loader cuts longer samples without a word: text is lost, and a conversation whose target is cut off fails in mid-training.",
)
def rows_too_long(mix: Mix) -> Iterator[Hit]:
    for loader, stream, top, limit in _longer(mix):
        if not _was_judged(stream, loader, limit):
            yield Hit(
                [stream.name],
                f"{stream.name} holds samples of {top} tokens, and max_seq_len of {loader.label} is {limit}.",
                f"convert the stream again for {limit} tokens, or train with max_seq_len: {top}.",
            )


@check(
    "rows-cut",
    "warning",
    "The loader cuts off the ends of longer conversations, which are then never trained on.",
)
def rows_cut(mix: Mix) -> Iterator[Hit]:
    for loader, stream, top, limit in _longer(mix):
        if _was_judged(stream, loader, limit):
            yield Hit(
                [stream.name],
                f"the longest conversation of {stream.name} has {top} tokens, and max_seq_len of {loader.label} is {limit}.",
                "train with a larger max_seq_len, or split long conversations before converting.",
            )


def _longer(mix: Mix) -> Iterator[tuple[Loader, Stream, int, int]]:
    for loader in mix.loaders:
        for stream in loader.streams:
            top, limit = first_samples.longest(stream, loader), loader.max_seq_len
            if top is not None and limit is not None and top > limit:
                yield loader, stream, top, limit


def _was_judged(stream: Stream, loader: Loader, limit: int) -> bool:
    """Conversations that were kept because something to train on is left of them at this length."""
    if stream.card is None:
        # LLM-Foundry's converter keeps turns by that rule too, and sample-unusable judges the first of them.
        return "turns" in stream.columns and not loader.is_text
    encoding = stream.card.encoding
    return kind_of(encoding).has_targets and encoding.max_seq_len <= limit


@check(
    "rows-short",
    "warning",
    "Every batch is padded or shorter than the model is paid for: part of each step is wasted.",
)
def rows_short(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for stream in loader.streams:
            length, limit = first_samples.row_length(stream), loader.max_seq_len
            if length is not None and limit is not None and length < limit:
                yield Hit(
                    [stream.name],
                    f"every sample of {stream.name} has {length} tokens, and max_seq_len of {loader.label} is {limit}.",
                    f"convert the stream again for {limit} tokens, or train with max_seq_len: {length}.",
                )


def _uneven(loader: Loader) -> list[Stream]:
    """Streams that make batches of the text loader uneven."""
    tokens = [s for s in loader.streams if shape(s, "text") == "tokens"]
    lengths = {s.name: first_samples.row_length(s) for s in tokens}
    if len(set(lengths.values())) == 1 and None not in lengths.values():
        return []
    loose = [s for s in tokens if lengths[s.name] is None and not _looks_even(s, loader)]
    return loose or ([] if len({n for n in lengths.values() if n}) < 2 else tokens)


def _looks_even(stream: Stream, loader: Loader) -> bool:
    """Every sample has one length, though the encoding does not fix it, as in Foundry's own converters."""
    if stream.card:
        return stream.card.encoding.layout == "concat"
    seen = {row.length for row in first_samples.token_samples(stream, loader)}
    return len(seen) < 2


@check(
    "rows-uneven",
    "note",
    "The text loader pads each batch to its longest sample, without an attention mask, and counts the padding as tokens.",
)
def rows_uneven(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if loader.is_text and (uneven := _uneven(loader)):
            yield Hit(
                [s.name for s in uneven],
                f"samples of {', '.join(s.name for s in uneven)} have different lengths under {loader.label}.",
                "use layout: concat, or the finetuning loader with packing, whose rows are masked.",
            )


@check(
    "pad-missing",
    "error",
    "The text loader cannot pad a batch of different lengths without a padding token, and fails at the first one.",
)
def pad_missing(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        lacks = mix.tokenizer is not None and mix.tokenizer.pad_id is None
        if lacks and loader.is_text and (uneven := _uneven(loader)):
            yield Hit(
                [s.name for s in uneven],
                f"samples of {', '.join(s.name for s in uneven)} have different lengths, and the tokenizer has no padding token.",
                "add pad_token to tokenizer.kwargs, a token of its own and not EOS, or use layout: concat.",
            )


@check(
    "separator-absent",
    "error",
    "sequence_id is worked out from this token; where no sample holds it, all documents of a row attend to each other.",
)
def separator_absent(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for word in ("eos", "bos"):
            token = loader.dataset.get(f"{word}_token_id")
            for stream in loader.streams if loader.is_text and isinstance(token, int) else ():
                if _lacks(stream, loader, word, int(token or 0)):
                    yield Hit(
                        [stream.name],
                        f"{loader.label} sets {word}_token_id: {token}, and {stream.name} was written without that token.",
                        f"convert the stream again with add_{word}: true, or leave {word}_token_id out.",
                    )


def _lacks(stream: Stream, loader: Loader, word: str, token: int) -> bool:
    if stream.card:
        return getattr(stream.card.encoding, f"add_{word}") is False and not _seen(
            stream, loader, token
        )
    return bool(stream.head.samples) and not _seen(stream, loader, token)


def _seen(stream: Stream, loader: Loader, token: int) -> bool:
    return any((row.ids == token).any() for row in first_samples.token_samples(stream, loader))


@check(
    "sample-unusable",
    "error",
    "The collator fails on such a sample when it comes up, in mid-training (IndexError or ValueError).",
)
def sample_unusable(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for stream in () if loader.is_text else loader.streams:
            if _was_judged_so(stream, loader):
                continue
            reasons = {*_text_reasons(stream), *_token_reasons(stream, loader)}
            if reasons:
                yield Hit(
                    [stream.name],
                    f"the first samples of {stream.name} hold some that cannot be trained on under max_seq_len "
                    f"{loader.max_seq_len} and {'/'.join(loader.targets)}: {', '.join(sorted(reasons))}.",
                    "convert the stream again with `mdsmix convert`, which leaves such records out and counts them.",
                )


def _was_judged_so(stream: Stream, loader: Loader) -> bool:
    """Whether every sample was judged by this loader's rule when it was encoded: its shard need not be looked at."""
    if stream.card is None:
        return False
    encoding, limit = stream.card.encoding, loader.max_seq_len or 0
    if encoding.kind == "pretraining":
        return limit >= 2  # a prompt of one token, and something behind it
    is_full = loader.dataset.get("decoder_only_format") is not False
    rules = (encoding.target_prompts, encoding.target_responses), encoding.decoder_only_format
    return encoding.max_seq_len <= limit and rules == (loader.targets, is_full)


def _text_reasons(stream: Stream) -> Iterator[str]:
    for sample in stream.head.samples:
        for column in ("prompt", "response", "completion"):
            if sample.get(column) == "":
                yield f"empty_{column}"


def _token_reasons(stream: Stream, loader: Loader) -> Iterator[str]:
    """The verdicts on token samples, by the rule that the encoder itself uses."""
    found = first_samples.token_samples(stream, loader)
    try:
        targets = Targets(
            max_seq_len=loader.max_seq_len or 1 << 30,
            target_prompts=loader.targets[0],
            target_responses=loader.targets[1],
            decoder_only_format=loader.dataset.get("decoder_only_format") is not False,
        )
    except RecipeError:
        return  # targets-invalid says so
    if found and shape(stream, "finetuning") in ("turns", "input_ids"):
        for verdict in judge(targets, _turns(found)):
            if verdict != USABLE:
                yield VERDICTS[int(verdict)]


def _turns(found: list[first_samples.TokenSample]) -> Turns:
    lengths = np.array([[len(p), len(r)] for row in found for p, r in row.turns], np.int64)
    offsets = np.cumsum([0, *(len(row.turns) for row in found)])
    return Turns(lengths[:, 0], lengths[:, 1], offsets)
