"""Whether every stream's columns and token ids are what the loader reads. Columns stand in index.json.

The two loaders of LLM-Foundry read different columns, and neither looks before the batch in which the first wrong sample
comes up: with 3 % of wrong samples that is after about ten batches. Of ids the manifest tells where there is one; else the
first samples of the first shard do, which can show that a stream is wrong but not that it is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

import numpy as np

from mdsmix.mix.stream_counts import bytes_columns, largest_id
from mdsmix.mix.streams import Loader, Mix, StreamInMix, names, names_listed
from mdsmix.shards.token_ids import PACKED, has_images
from mdsmix.training.findings import Finding, Findings, check
from mdsmix.training.loader_keys import OTHERS, OWN, IntType

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
    if other := OTHERS.get(loader):
        return other.name if dict(stream.columns).items() >= other.columns.items() else None
    return next((name for name, wanted in SHAPES.get(loader, ()) if columns >= wanted), None)


def is_plain(loader: Loader, stream: StreamInMix) -> bool:
    """Whether it holds plain tokens, out of whose loss the loader takes padding by its id."""
    return loader.is_text or (loader.is_own and shape(stream, OWN) == "tokens")


def reads(loader: Loader, stream: StreamInMix) -> bool:
    return not _reads(loader) or shape(stream, loader.name) is not None


def _reads(loader: Loader) -> str:
    """The columns that a loader reads, in words; empty of one that is not known."""
    other = OTHERS.get(loader.name)
    return ", ".join(other.columns) if other else READS.get(loader.name, "")


@check(
    "error",
    "Neither loader reads the other's columns, and training fails only at the batch in which such a sample comes up.",
)
def columns_loader(mix: Mix, loader: Loader) -> Findings:
    wrong = [s for s in loader.streams if s.shards and not reads(loader, s)]
    if wrong := [s for s in wrong if not has_images(s.columns)]:  # else images-loader
        held = ", ".join(f"{s.name} ({', '.join(sorted(s.columns))})" for s in wrong)
        yield Finding(
            f"{held}: the {loader.name} loader reads other columns ({_reads(loader)}).",
            _ways(mix, loader, wrong),
            names(wrong),
        )


def _ways(mix: Mix, loader: Loader, wrong: Sequence[StreamInMix]) -> str:
    """The ways out that exist for streams of the other kind."""
    others = [other for other in OTHERS.values() if all(shape(s, other.name) for s in wrong)]
    if others and loader.name not in OTHERS:
        return f"train them in a run of their own, with train_loader.name: {others[0].name}, the loader of {others[0].whose}."
    if loader.name in OTHERS:
        return "take them out: this loader reads what was converted for it alone."
    if any(shape(s, OWN) == "packed" for s in wrong):
        return (
            f"set train_loader.name: {OWN}, which keeps the documents of each row apart, under LLM-Foundry and in a training loop of your "
            "own (docs/loading.md); or convert without pack."
        )
    if not all(shape(s, "finetuning") or shape(s, "text") for s in wrong):
        return "convert the stream again with `mdsmix convert`, or take it out of the mix."
    if loader.is_own:
        return "convert the text to tokens with `mdsmix convert`, since this loader tokenizes none."
    other = "finetuning" if loader.is_text else "text"
    if all(shape(s, other) for s in mix.streams):
        return f"set train_loader.name: {other}, which reads all of these streams."
    is_plain = all(s.has_targets is False for s in mix.streams)
    best = "text" if loader.is_text and is_plain else "finetuning"
    again = [s for s in mix.streams if not shape(s, best)]
    return (
        f"{mix.makers(again, 're-encode', f' train_loader.name={best} --reencode')}; or train_loader.name: {OWN}, under LLM-Foundry with "
        "mdsmix installed beside it, or mdsmix.load, which read both kinds of tokens as they are."
    )


@check(
    "error",
    "A batch that holds both kinds cannot be put together, and fails in mid-training.",
)
def columns_text_and_tokens(loader: Loader) -> Findings:
    if loader.is_text:
        yield from _two_sorts(loader, {"text"})


@check(
    "error",
    "A batch has the columns of its samples: one of samples with other columns cannot be put together, and fails in mid-training.",
)
def columns_unlike(loader: Loader) -> Findings:
    """Under a loader that a kind brings; the others read each sample by its own columns."""
    held = {s.name: sorted(s.columns) for s in loader.streams if s.shards and reads(loader, s)}
    first, *others = held or [""]
    if loader.name in OTHERS and (unlike := [name for name in others if held[name] != held[first]]):
        yield Finding(
            f"{first} holds {', '.join(held[first])}, and {unlike[0]} {', '.join(held[unlike[0]])}.",
            "name the same fields in the sources of both and convert again with --reencode, or train each in a run of its own.",
            [first, *unlike],
        )


def _two_sorts(loader: Loader, raw: set[str]) -> Findings:
    """Streams of the shapes `raw`, which the loader tokenizes, beside streams of tokens."""
    known = [s for s in loader.streams if shape(s, loader.name)]
    texts = [s for s in known if shape(s, loader.name) in raw]
    if texts and len(texts) < len(known):
        yield Finding(
            f"{{loader}} is to tokenize the text of {names_listed(texts)}, and {names_listed(s for s in known if s not in texts)} hold tokens.",
            "convert the text streams to tokens with `mdsmix convert`.",
            names(known),
        )


@check(
    "error",
    "The finetuning loader takes a sample for one of these shapes only when it has no other column (UnknownExampleTypeError).",
)
def columns_exact(loader: Loader, stream: StreamInMix) -> Findings:
    found = shape(stream, "finetuning") if loader.name == "finetuning" else None
    if found in RAW and len(stream.columns) != RAW[found]:
        yield Finding(
            f"{{streams}} holds the columns {', '.join(sorted(stream.columns))}, and as {found} it may hold no other under {{loader}}.",
            "write the stream again with the columns of that shape alone, or as turns with `mdsmix convert`.",
        )


@check(
    "error",
    "The loader cannot decode such a column and fails at the first sample, or reads wrong ids from it.",
)
def columns_encoding(loader: Loader, stream: StreamInMix) -> Findings:
    for column, encoding in stream.columns.items():
        allowed = () if loader.name in OTHERS else ENCODINGS.get(column)
        if allowed and (re.sub(r"(:[^:]+):.*", r"\1", encoding) not in allowed or "," in encoding):
            wanted = "`ndarray:<int>` of one dimension" if allowed is IDS else f"`{allowed[0]}`"
            yield Finding(
                f"the column {column} of {{streams}} is `{encoding}`, and the loaders read {wanted}.",
                "convert the stream again with `mdsmix convert`.",
            )


@check(
    "error",
    "Streaming takes the shards of a stream for alike; a sample of the other columns fails when it comes up.",
)
def columns_shards(stream: StreamInMix) -> Findings:
    other = [i for i, shard in enumerate(stream.shards) if shard.columns != stream.columns]
    for number in other[:1]:
        shard = stream.shards[number]
        yield Finding(
            f"shard 0 of {{streams}} holds {dict(stream.columns)}, shard {number} ({shard.stored.basename}) holds {shard.columns}.",
            "publish the two sets of shards as two streams; merge_index joins indexes without comparing them.",
        )


@check(
    "error",
    "A pickle runs code when it is read; Streaming refuses it unless allow_unsafe_types is set.",
)
def columns_unsafe(loader: Loader, stream: StreamInMix) -> Findings:
    pickled = [c for c, e in stream.columns.items() if e == "pkl"]
    if pickled and not loader.dataset.get("allow_unsafe_types"):
        yield Finding(
            f"{{streams}} holds pickles in {', '.join(pickled)}, and {{loader}} does not set allow_unsafe_types.",
            "write the stream again without that column.",
        )


@check(
    "warning",
    "Text that the loader tokenizes gets the template, BOS and date of training time; nothing compares them with those of the ids.",
)
def columns_raw_and_tokenized(loader: Loader) -> Findings:
    if loader.name == "finetuning":
        yield from _two_sorts(loader, set(RAW))


PLAUSIBLE_IDS = 1 << 22
"4 million: above any vocabulary in use, where the run's own is not known."
DTYPES = ("int64", "int32", "uint16", "uint8")


@check(
    "error",
    "A column of bytes is read with one dtype for the whole loader (token_encoding_type); the wrong one gives ids that mean nothing.",
)
def tokens_dtype(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    given = str(loader.dataset.get("token_encoding_type", "int64"))
    actual = _dtype_of_bytes(stream, mix.tokenizer.vocab_size if mix.tokenizer else PLAUSIBLE_IDS)
    if actual and not _same_bytes(given, actual):
        yield Finding(
            f"{{streams}} holds bytes of {actual}, and {{loader}} reads all bytes columns as {given}.",
            f"set token_encoding_type: {actual}; where streams differ in it, convert them again: ndarray columns name their dtype.",
        )


def _dtype_of_bytes(stream: StreamInMix, limit: int) -> str | None:
    """The widest dtype under which the first samples hold ids of a vocabulary of `limit`; None without columns of bytes."""
    if not (columns := bytes_columns(stream)):
        return None  # no shard is read for it
    samples = [s[c] for s in stream.head.samples for c in columns if isinstance(s.get(c), bytes)]
    fitting = (d for d in DTYPES if all(_fits(data, d, limit) for data in samples))
    return next(fitting, None) if samples else None


def _fits(data: bytes, dtype: str, limit: int) -> bool:
    if not data or len(data) % np.dtype(dtype).itemsize:
        return False
    ids = np.frombuffer(data, dtype)
    return 0 <= int(ids.min()) <= int(ids.max()) < limit


def _same_bytes(given: str, actual: str) -> bool:
    """Equal for every id that occurs: the sign matters only to 16 bits and fewer."""
    if given not in get_args(IntType):
        return True  # setting-value says that the dtype is none
    one, other = np.dtype(given), np.dtype(actual)
    return one == other or one.itemsize == other.itemsize > 2


@check(
    "error",
    "The loader passes such an id on; the embedding fails on it, on a GPU with a CUDA assert that names nothing.",
)
def id_vocabulary(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    run, model = mix.tokenizer and mix.tokenizer.vocab_size, mix.yaml.at("model", "vocab_size")
    top = largest_id(stream, loader)
    for whose, limit in (("the tokenizer", run), ("the model", model)):
        if top is not None and isinstance(limit, int) and top >= limit:
            yield Finding(
                f"{{streams}} holds the id {top}, and the vocabulary of {whose} ends at {limit - 1}.",
                "name the tokenizer that the stream was converted with, or convert it again; a model's vocab_size must cover it.",
            )
