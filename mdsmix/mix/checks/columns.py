"""Whether the loader can read every stream's columns and token ids. Columns stand in index.json.

The two loaders of LLM-Foundry read different columns. Neither notices a wrong sample before the
batch in which it comes up: with 3 % of wrong samples, after about ten batches. Ids are judged by
the manifest. Without one, the first samples of the first shard are judged, which can show that a
stream is wrong but not that it is right.
"""

from __future__ import annotations

import re
from typing import get_args

import numpy as np

from mdsmix.errors import MixRefused
from mdsmix.foundry_yaml.findings import Finding, Findings, check
from mdsmix.foundry_yaml.loader_keys import EXTRA_LOADERS, MDSMIX_LOADER, IntType
from mdsmix.mix.epoch.stream_counts import TOKEN_COLUMNS, read_head_turns
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix, stream_names
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import IGNORED, PACKED, has_images, turns_of

SAMPLE_LAYOUTS: dict[str, tuple[tuple[str, set[str]], ...]] = {
    "text": (("text", {"text"}), ("tokens", {"tokens"})),
    "finetuning": (
        ("turns", {"turns"}),
        ("input_ids", {"input_ids", "labels"}),
        ("messages", {"messages"}),
        ("prompt/response", {"prompt", "response"}),
        ("prompt/response", {"prompt", "completion"}),
    ),
    MDSMIX_LOADER: (
        ("turns", {"turns"}),
        ("input_ids", {"input_ids", "labels"}),
        ("tokens", {"tokens"}),
        ("packed", set(PACKED)),
    ),
}
"""Loader -> its shapes of samples, each with the columns that identify it, in the order in which
the loader looks.
"""
IDS = r"bytes|ndarray(:u?int(8|16|32|64)(:\d+)?)?"
ENCODINGS = (
    dict.fromkeys(("tokens", "input_ids", "labels"), IDS)
    | dict.fromkeys(("text", "prompt", "response", "completion"), "str")
    | dict.fromkeys(("turns", "messages"), "json")
)
"""Column -> a pattern of the encodings that loaders can decode, such as `ndarray:<int>` with or
without a length.
"""
RAW = {"messages": 1, "prompt/response": 2}
"Shapes of text that the finetuning loader tokenizes -> the number of columns that each must have."


def find_layout(stream: StreamInMix, loader: str) -> str | None:
    """The shape that the loader takes the stream's samples for: the first that fits. None where
    none fits.
    """
    columns = set(stream.columns)
    if other := EXTRA_LOADERS.get(loader):
        return other.name if dict(stream.columns).items() >= other.columns.items() else None
    return next(
        (name for name, wanted in SAMPLE_LAYOUTS.get(loader, ()) if columns >= wanted), None
    )


def is_plain(loader: Loader, stream: StreamInMix) -> bool:
    """Whether the loader reads the stream as plain tokens, whose padding it masks from the loss by
    the padding id.
    """
    return loader.is_text or (loader.is_own and find_layout(stream, MDSMIX_LOADER) == "tokens")


@check(
    "error",
    "Neither loader reads the other's columns, and training fails only at the batch in which such a sample comes up.",
)
def columns_loader(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    is_known = loader.name in EXTRA_LOADERS or loader.name in SAMPLE_LAYOUTS
    is_read = not is_known or not stream.shards or find_layout(stream, loader.name)
    if not is_read and not has_images(stream.columns):  # else images-loader
        yield Finding(
            f"{{streams}}: columns {', '.join(sorted(stream.columns))}, and the {loader.name} loader reads others.",
            _way(mix, stream),
        )


def _way(mix: Mix, stream: StreamInMix) -> str:
    """The fix: a loader that reads all streams, else a loader that reads this stream alone, else a
    new conversion.
    """
    own = [
        name
        for name in (*EXTRA_LOADERS, "text", "finetuning", MDSMIX_LOADER)
        if find_layout(stream, name)
    ]
    if not own:
        return "convert it to tokens with `mdsmix convert`, or take it out of the mix."
    of_all = [name for name in own if all(find_layout(each, name) for each in mix.streams)]
    way = "which reads all of these streams" if of_all else "for this stream in a run of its own"
    return f"set train_loader.name: {(of_all or own)[0]}, {way}, or convert it again for this loader with --reencode (docs/loading.md)."


@check(
    "warning",
    "Text that the loader tokenizes gets the template, BOS and date of training time; nothing compares them with those of the ids.",
    "columns-raw-and-tokenized",
)
@check(
    "error",
    "A batch that holds both kinds cannot be put together, and fails in mid-training.",
    "columns-text-and-tokens",
)
def text_and_tokens(loader: Loader) -> Findings:
    """A finding where the loader tokenizes some streams and other streams hold tokens."""
    shapes = [(s, find_layout(s, loader.name)) for s in loader.streams]
    texts = [s for s, each in shapes if each in {"text", *RAW}]
    tokens = [s for s, each in shapes if each and s not in texts]
    if texts and tokens:
        yield Finding(
            "{loader} is to tokenize the text of {streams}, and its other streams hold tokens.",
            "convert the text streams to tokens with `mdsmix convert`.",
            stream_names(texts),
            "columns-text-and-tokens" if loader.is_text else "columns-raw-and-tokenized",
        )


@check(
    "error",
    "A batch has the columns of its samples: one of samples with other columns cannot be put together, and fails in mid-training.",
)
def columns_unlike(loader: Loader, stream: StreamInMix) -> Findings:
    """Judges loaders that a kind of stream brings. Other loaders read each sample by its own
    columns.
    """
    first, name = loader.streams[0], loader.name
    are_read = name in EXTRA_LOADERS and find_layout(first, name) and find_layout(stream, name)
    if are_read and first.columns.keys() != stream.columns.keys():
        yield Finding(
            f"{first.name} holds {', '.join(sorted(first.columns))}, and {{streams}}: {', '.join(sorted(stream.columns))}.",
            "name the same fields in the sources of both and convert again with --reencode, or train each in a run of its own.",
        )


@check(
    "error",
    "The finetuning loader takes a sample for one of these shapes only when it has no other column (UnknownExampleTypeError).",
)
def columns_exact(loader: Loader, stream: StreamInMix) -> Findings:
    found = find_layout(stream, "finetuning") if loader.name == "finetuning" else None
    if found in RAW and len(stream.columns) != RAW[found]:
        yield Finding(
            f"{{streams}}: columns {', '.join(sorted(stream.columns))}, and beside {found} {{loader}} takes no other.",
            "write the stream again with the columns of that shape alone, or as turns with `mdsmix convert`.",
        )


@check(
    "error",
    "The loader cannot decode such a column and fails at the first sample, or reads wrong ids from it.",
)
def columns_encoding(loader: Loader, stream: StreamInMix) -> Findings:
    for column, encoding in stream.columns.items() if loader.name not in EXTRA_LOADERS else ():
        if not re.fullmatch(ENCODINGS.get(column, ".*"), encoding):
            yield Finding(
                f"the column {column} of {{streams}} is `{encoding}`, which no loader reads of it.",
                "convert again with `mdsmix convert`.",
            )


@check(
    "error",
    "Streaming takes the shards of a stream for alike; a sample of the other columns fails when it comes up.",
)
def columns_shards(stream: StreamInMix) -> Findings:
    other = [shard for shard in stream.shards if shard.columns != stream.columns]
    if other:
        yield Finding(
            f"the first shard of {{streams}} holds {dict(stream.columns)}, and {other[0].stored.basename} holds {other[0].columns}.",
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
            f"pickles stand in {', '.join(pickled)} of {{streams}}, and {{loader}} does not set allow_unsafe_types.",
            "write the stream again without that column.",
        )


@check(
    "error",
    "LLM-Foundry's loader and that of mdsmix put labels after input_ids, so each row is trained twice over, with -100 among its ids.",
)
def labels_repeated(loader: Loader, stream: StreamInMix) -> Findings:
    """Find rows in the form of Hugging Face, whose labels are input_ids again, masked by -100."""
    if stream.trusted_manifest or find_layout(stream, loader.name) != "input_ids":
        return
    dtype = str(loader.dataset.get("token_encoding_type", "int64"))
    samples = stream.head.samples
    if samples and all(_has_masked_labels(sample, dtype) for sample in samples):
        yield Finding(
            "labels of {streams} equal its input_ids wherever they are not -100, as Hugging Face's collators want them.",
            "write the prompt as input_ids and the answer as labels, or convert the source with `mdsmix convert`.",
        )


def _has_masked_labels(sample: Sample, dtype: str) -> bool:
    """Return whether a sample's labels are its input_ids, but for places of -100."""
    try:
        (turn,) = turns_of(sample, dtype)
    except (MixRefused, ValueError):
        return False
    ids, labels = turn
    if not len(ids) or len(ids) != len(labels):
        return False
    return bool(((labels == ids) | (labels == IGNORED)).all())


PLAUSIBLE_IDS = 1 << 22
"4 million, above any vocabulary in use: the limit where the run's vocabulary is not known."
DTYPES = ("int64", "int32", "uint16", "uint8")


@check(
    "error",
    "A column of bytes is read with one dtype for the whole loader (token_encoding_type); the wrong one gives ids that mean nothing.",
)
def tokens_dtype(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    given = str(loader.dataset.get("token_encoding_type", "int64"))
    actual = _dtype_of_bytes(stream, mix.tokenizer.vocab_size if mix.tokenizer else PLAUSIBLE_IDS)
    if not actual or actual == given or given not in get_args(IntType):  # else setting-value
        return
    size = np.dtype(actual).itemsize
    # For 32 and 64 bits signed and unsigned ids are alike.
    if size < 4 or size != np.dtype(given).itemsize:
        yield Finding(
            f"the bytes of {{streams}} are {actual}, and {{loader}} reads all bytes columns as {given}.",
            f"set token_encoding_type: {actual}; where streams differ in it, convert them again: ndarray columns name their dtype.",
        )


def _dtype_of_bytes(stream: StreamInMix, limit: int) -> str | None:
    """The widest dtype under which the first samples hold ids of a vocabulary of `limit`; None
    without columns of bytes.
    """
    columns = [name for name in TOKEN_COLUMNS if stream.columns.get(name) == "bytes"]
    head = stream.head.samples if columns else ()  # a shard is read only if it has such columns
    samples = [s[c] for s in head for c in columns if isinstance(s.get(c), bytes)]
    return next((d for d in DTYPES if samples and all(_fits(s, d, limit) for s in samples)), None)


def _fits(data: bytes, dtype: str, limit: int) -> bool:
    if not data or len(data) % np.dtype(dtype).itemsize:
        return False
    ids = np.frombuffer(data, dtype)
    return 0 <= int(ids.min()) <= int(ids.max()) < limit


@check(
    "error",
    "The loader passes such an id on; the embedding fails on it, on a GPU with a CUDA assert that names nothing.",
)
def id_vocabulary(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if manifest := stream.trusted_manifest:
        top = manifest.totals.largest_id
    else:
        ids = read_head_turns(stream, loader).ids.values
        top = int(ids.max(initial=-1))
        least = int(ids.min(initial=0))
        if least < 0:
            yield Finding(
                f"the first samples of {{streams}} contain the id {least}, and ids begin at 0.",
                "write token ids alone; a token that is not trained belongs to a prompt, not to labels of -100.",
            )
    run, model = mix.tokenizer and mix.tokenizer.vocab_size, mix.yaml.at("model", "vocab_size")
    fixes = {
        "the tokenizer": "name the tokenizer of the conversion, or convert again.",
        "the model": f"set model.vocab_size to at least {top + 1}, or convert again with the model's tokenizer.",
    }
    for (whose, fix), limit in zip(fixes.items(), (run, model), strict=True):
        if isinstance(limit, int) and top >= limit:
            yield Finding(
                f"the largest id of {{streams}} is {top}, and the vocabulary of {whose} ends at {limit - 1}.",
                fix,
            )
