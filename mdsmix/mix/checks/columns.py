"""Whether every stream's columns and token ids are what the loader reads. Columns stand in index.json.

The two loaders of LLM-Foundry read different columns, and neither looks before the batch in which the first wrong sample
comes up: with 3 % of wrong samples that is after about ten batches. Of ids the manifest tells where there is one; else the
first samples of the first shard do, which can show that a stream is wrong but not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mdsmix.kinds import kind_of
from mdsmix.mix.stream_counts import (
    bytes_columns,
    largest_id,
)
from mdsmix.mix.streams import Loader, Mix, StreamInMix, listed, names
from mdsmix.shards.token_ids import PACKED, has_images
from mdsmix.training.findings import Finding, check_loaders, check_streams
from mdsmix.training.loader_keys import OWN
from mdsmix.words import does

READS = {
    "text": "tokens, or text",
    "finetuning": "turns, input_ids and labels, messages, or prompt and response",
    OWN: "tokens, turns, or input_ids with labels or with starts",
}
SHAPES: dict[str, tuple[tuple[str, set[str]], ...]] = {
    "text": (("text", {"text"}), ("tokens", {"tokens"})),
    "finetuning": (
        ("turns", {"turns"}),
        ("input_ids", {"input_ids", "labels"}),
        ("messages", {"messages"}),
        ("prompt/response", {"prompt", "response"}),
        ("prompt/response", {"prompt", "completion"}),
    ),
    OWN: (
        ("turns", {"turns"}),
        ("input_ids", {"input_ids", "labels"}),
        ("tokens", {"tokens"}),
        ("packed", set(PACKED)),
    ),
}
"What a loader takes a sample for, and the columns by which it knows it, in the order in which it looks."
IDS = (*(f"ndarray:{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64)), "ndarray", "bytes")
ENCODINGS = {
    "tokens": IDS,
    "input_ids": IDS,
    "labels": IDS,
    "text": ("str",),
    "turns": ("json",),
    "messages": ("json",),
    "prompt": ("str",),
    "response": ("str",),
    "completion": ("str",),
}
"What each loader can decode from a column; `ndarray:<int>` with or without a length."
RAW = {"messages": 1, "prompt/response": 2}
"The shapes of text that the finetuning loader tokenizes, and the columns that they may have."


def shape(stream: StreamInMix, loader: str) -> str | None:
    """What the loader takes a sample of the stream for, by the order in which it looks; None for nothing."""
    columns = set(stream.columns)
    return next((name for name, wanted in SHAPES[loader] if columns >= wanted), None)


def reads(loader: Loader, stream: StreamInMix) -> bool:
    return loader.name not in READS or shape(stream, loader.name) is not None


@check_loaders(
    "error",
    "Neither loader reads the other's columns, and training fails only at the batch in which such a sample comes up.",
)
def columns_loader(mix: Mix, loader: Loader) -> Iterator[Finding]:
    foreign = [s for s in loader.streams if s.shards and not reads(loader, s)]
    wrong = [s for s in foreign if not has_images(s.columns)]  # images-loader
    right = [s for s in mix.train.streams if s.shards and reads(loader, s)]
    if wrong:
        others = f", as {_described(right)} has it" if right else ""
        yield Finding(
            f"{_described(wrong)} {does(wrong)} not hold what the {loader.name} loader reads "
            f"({READS[loader.name]}){others}.",
            _ways(mix, loader, wrong),
            names([*wrong, *right]),
        )


def _described(streams: Sequence[StreamInMix]) -> str:
    return ", ".join(f"{s.name} ({', '.join(sorted(s.columns))})" for s in streams)


def _ways(mix: Mix, loader: Loader, wrong: Sequence[StreamInMix]) -> str:
    """The ways out that exist for streams of the other kind."""
    if packed := [s for s in wrong if shape(s, OWN) == "packed"]:
        return (
            f"set train_loader.name: {OWN}, which keeps the documents of each row apart, under LLM-Foundry and in a training loop of your "
            f"own (docs/one-loader.md); or convert {listed(packed)} without pack."
        )
    if not all(shape(s, "finetuning") or shape(s, "text") for s in wrong):
        return "convert the stream again with `mdsmix convert`, or take it out of the mix."
    if loader.is_own:
        again = f"; {_again(mix, OWN, wrong)}" if mix.recipe else ""
        return f"convert the text to tokens with `mdsmix convert`, since this loader tokenizes none{again}."
    other = "finetuning" if loader.is_text else "text"
    if all(shape(s, other) for s in mix.streams):
        again = f", or {_again(mix, loader.name, wrong)}" if mix.recipe else ""
        return f"set train_loader.name: {other}, which reads all of these streams{again}."
    manifests = [s.trusted_manifest for s in mix.streams]
    is_plain = all(m and not kind_of(m.encoding).has_targets for m in manifests)
    if loader.is_text and is_plain:
        return f"{_again(mix, 'text', wrong)}."
    lacking = [s for s in mix.streams if not shape(s, "finetuning")]
    is_tokenized = all(shape(s, OWN) for s in mix.streams)
    own = "train_loader.name: mdsmix reads both kinds as they are, where mdsmix is installed beside LLM-Foundry"
    return (
        f"train both kinds with the finetuning loader: {_again(mix, 'finetuning', lacking)}"
        + (f"; or {own}, and mdsmix.load.build_loader" if is_tokenized else "; or mdsmix.load")
        + " in a training loop of your own."
    )


def _again(mix: Mix, loader: str, streams: Sequence[StreamInMix]) -> str:
    """How these streams come to hold what the loader reads."""
    return mix.makers(streams, "re-encode", f" train_loader.name={loader} --reencode")


@check_loaders(
    "error",
    "A batch that holds both kinds cannot be put together, and fails in mid-training.",
)
def columns_text_and_tokens(mix: Mix, loader: Loader) -> Iterator[Finding]:
    if not loader.is_text:
        return
    texts, tokens = (
        [s for s in loader.streams if shape(s, "text") == column] for column in ("text", "tokens")
    )
    if texts and tokens:
        yield Finding(
            f"{listed(texts)} {does(texts, 'is', 'are')} text that the loader tokenizes, {listed(tokens)} "
            f"{does(tokens, 'is', 'are')} tokens.",
            "convert the text streams to tokens with `mdsmix convert`.",
            names([*texts, *tokens]),
        )


@check_streams(
    "error",
    "The finetuning loader takes a sample for one of these shapes only when it has no other column (UnknownExampleTypeError).",
)
def columns_exact(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    found = shape(stream, "finetuning") if loader.name == "finetuning" else None
    count = RAW.get(found or "", len(stream.columns))
    if len(stream.columns) != count:
        yield Finding(
            f"{stream.name} holds {len(stream.columns)} columns ({', '.join(sorted(stream.columns))}), and as "
            f"{found} it may hold {count} under {{loader}}.",
            "write the stream again with the columns of that shape alone, or as turns with `mdsmix convert`.",
        )


@check_streams(
    "error",
    "The loader cannot decode such a column and fails at the first sample, or reads wrong ids from it.",
)
def columns_encoding(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    for column, encoding in stream.columns.items():
        allowed = ENCODINGS.get(column, (encoding,))
        is_ids = "bytes" in allowed
        base = ":".join(encoding.split(":")[:2])
        if (column in ENCODINGS and base not in allowed) or (is_ids and "," in encoding):
            wanted = "`ndarray:<int>` of one dimension" if is_ids else f"`{allowed[0]}`"
            yield Finding(
                f"the column {column} of {stream.name} is `{encoding}`, and the loaders read {wanted}.",
                "convert the stream again with `mdsmix convert`.",
            )


@check_streams(
    "error",
    "Streaming takes the shards of a stream for alike; a sample of the other columns fails when it comes up.",
)
def columns_shards(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    other = next((i for i, s in enumerate(stream.shards) if s.columns != stream.columns), None)
    if other is not None:
        shard = stream.shards[other]
        yield Finding(
            f"shard 0 of {stream.name} holds {dict(stream.columns)}, shard {other} ({shard.stored.basename}) holds {shard.columns}.",
            "publish the two sets of shards as two streams; merge_index joins indexes without comparing them.",
        )


@check_streams(
    "error",
    "A pickle runs code when it is read; Streaming refuses it unless allow_unsafe_types is set.",
)
def columns_unsafe(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    pickled = [c for c, e in stream.columns.items() if e == "pkl"]
    if pickled and not loader.dataset.get("allow_unsafe_types"):
        yield Finding(
            f"{stream.name} holds pickles in {', '.join(pickled)}, and {{loader}} does not set allow_unsafe_types.",
            "write the stream again without that column.",
        )


@check_loaders(
    "warning",
    "Text that the loader tokenizes gets the template, BOS and date of training time; nothing compares them with those of the ids.",
)
def columns_raw_and_tokenized(mix: Mix, loader: Loader) -> Iterator[Finding]:
    is_read = loader.name == "finetuning"
    known = [s for s in loader.streams if is_read and shape(s, "finetuning")]
    raw = [s for s in known if shape(s, "finetuning") in RAW]
    ready = [s for s in known if s not in raw]
    if raw and ready:
        yield Finding(
            f"{listed(raw)} {does(raw, 'is', 'are')} text that the loader tokenizes, {listed(ready)} "
            f"{does(ready, 'was', 'were')} tokenized before.",
            "convert the text streams too with `mdsmix convert`.",
            names([*raw, *ready]),
        )


PLAUSIBLE_IDS = 1 << 22
"4 million: above any vocabulary in use, where the run's own is not known."


@check_streams(
    "error",
    "A column of bytes is read with one dtype for the whole loader (token_encoding_type); the wrong one gives ids that mean nothing.",
)
def tokens_dtype(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    given = str(loader.dataset.get("token_encoding_type", "int64"))
    actual = _dtype_of_bytes(stream, mix.tokenizer.vocab_size if mix.tokenizer else PLAUSIBLE_IDS)
    if actual and not _same_bytes(given, actual):
        yield Finding(
            f"{stream.name} holds bytes of {actual}, and {{loader}} reads all bytes columns as {given}.",
            f"set token_encoding_type: {actual}; where streams differ in it, convert them again: ndarray columns name their dtype.",
        )


def _dtype_of_bytes(stream: StreamInMix, limit: int) -> str | None:
    """The widest dtype under which the first samples hold ids of a vocabulary of `limit`; None without bytes columns."""
    columns = bytes_columns(stream)
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


@check_streams(
    "error",
    "The loader passes such an id on; the embedding fails on it, on a GPU with a CUDA assert that names nothing.",
)
def id_vocabulary(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    limits = {
        "the tokenizer": mix.tokenizer.vocab_size if mix.tokenizer else None,
        "the model": mix.yaml.at("model", "vocab_size"),
    }
    top = largest_id(stream, loader)
    for whose, limit in limits.items():
        if top is not None and isinstance(limit, int) and top >= limit:
            yield Finding(
                f"{stream.name} holds the id {top}, and the vocabulary of {whose} ends at {limit - 1}.",
                "name the tokenizer that the stream was converted with, or convert it again; a model's vocab_size must cover it.",
            )
