"""Checks of columns and token ids: the loader must be able to read those of every stream. Columns
are listed in index.json.

The two loaders of LLM-Foundry read different columns. Neither notices a wrong sample before its
batch comes up: with 3 % of wrong samples, after about ten batches. Ids are judged by the manifest.
Without one, the first samples of the first shard are judged, which can show that a stream is wrong
but not that it is right.
"""

from __future__ import annotations

import re
from typing import get_args

import numpy as np

from mdsmix.errors import MixRefused
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER, IntType
from mdsmix.kinds.kind_table import EXTRA_LOADERS
from mdsmix.mix.epoch.stream_counts import TOKEN_COLUMNS, read_head_turns
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix, stream_names
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import IGNORED_LABEL, PACKED_COLUMNS, decode_turns, has_images

CHECKS = CheckList()

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
        ("packed", set(PACKED_COLUMNS)),
    ),
}
"""Loader -> the sample layouts that it reads, each with the columns that identify it, in the order
in which the loader tries them.
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
"Layouts of text that the finetuning loader tokenizes -> the number of columns that each must have."


def find_layout(stream: StreamInMix, loader: str) -> str | None:
    """Return the layout that the loader reads the stream's samples as: the first that fits; None if
    none fits.
    """
    extra_loader = EXTRA_LOADERS.get(loader)
    if extra_loader:
        has_columns = dict(stream.columns).items() >= extra_loader.columns.items()
        return extra_loader.name if has_columns else None
    columns = set(stream.columns)
    for name, required in SAMPLE_LAYOUTS.get(loader, ()):
        if columns >= required:
            return name
    return None


def is_plain(loader: Loader, stream: StreamInMix) -> bool:
    """Check whether the loader reads the stream as plain tokens. It then masks padding from the
    loss by the padding id.
    """
    return loader.is_text or (loader.is_mdsmix and find_layout(stream, MDSMIX_LOADER) == "tokens")


@CHECKS.stream(
    "error",
    "Neither loader reads the other's columns, and training fails only at the batch in which such a "
    "sample comes up.",
)
def columns_loader(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    is_known = loader.name in EXTRA_LOADERS or loader.name in SAMPLE_LAYOUTS
    is_read = not is_known or not stream.shards or find_layout(stream, loader.name)
    if not is_read and not has_images(stream.columns):  # images-loader reports images
        yield Finding(
            f"{{streams}}: columns {', '.join(sorted(stream.columns))}, and the {loader.name} loader "
            "reads others.",
            _fix_of_unread_columns(mix, stream),
        )


def _fix_of_unread_columns(mix: Mix, stream: StreamInMix) -> str:
    """Suggest a loader that reads all streams, or one that reads this stream, or a conversion."""
    names = (*EXTRA_LOADERS, "text", "finetuning", MDSMIX_LOADER)
    readers = [name for name in names if find_layout(stream, name)]
    if not readers:
        return "convert it to tokens with `mdsmix convert`, or take it out of the mix."
    for name in readers:
        if all(find_layout(each, name) for each in mix.streams):
            return _loader_fix(name, "which reads all of these streams")
    return _loader_fix(readers[0], "for this stream in a run of its own")


def _loader_fix(name: str, reason: str) -> str:
    return (
        f"set train_loader.name: {name}, {reason}, or convert it again for this loader with "
        "--reencode (docs/loading.md)."
    )


@CHECKS.loader(
    "warning",
    "Text that the loader tokenizes gets the template, BOS and date of training time; nothing "
    "compares them with those of the ids.",
    "columns-raw-and-tokenized",
)
@CHECKS.loader(
    "error",
    "A batch with both kinds cannot be built, and fails in mid-training.",
    "columns-text-and-tokens",
)
def text_and_tokens(mix: Mix, loader: Loader) -> Findings:
    """Find streams that the loader tokenizes next to streams of tokens."""
    texts = list[StreamInMix]()
    tokens = list[StreamInMix]()
    for stream in loader.streams:
        layout = find_layout(stream, loader.name)
        if layout in {"text", *RAW}:
            texts.append(stream)
        elif layout:
            tokens.append(stream)
    if texts and tokens:
        yield Finding(
            "{loader} must tokenize the text of {streams}, and its other streams are tokens.",
            "convert the text streams to tokens with `mdsmix convert`.",
            stream_names(texts),
            "columns-text-and-tokens" if loader.is_text else "columns-raw-and-tokenized",
        )


@CHECKS.stream(
    "error",
    "A batch has the columns of its samples: a batch of samples with different columns cannot be "
    "built, and fails in mid-training.",
)
def columns_unlike(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams with other columns than the first, for loaders that a kind of stream defines.
    Other loaders read each sample by its own columns.
    """
    first = loader.streams[0]
    name = loader.name
    are_read = name in EXTRA_LOADERS and find_layout(first, name) and find_layout(stream, name)
    if are_read and first.columns.keys() != stream.columns.keys():
        yield Finding(
            f"{first.name} has the columns {', '.join(sorted(first.columns))}, and {{streams}}: "
            f"{', '.join(sorted(stream.columns))}.",
            "name the same fields in the sources of both and convert again with --reencode, or train "
            "each in a run of its own.",
        )


@CHECKS.stream(
    "error",
    "The finetuning loader recognises these samples only if they have no other column "
    "(UnknownExampleTypeError).",
)
def columns_exact(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if loader.name != "finetuning":
        return
    layout = find_layout(stream, "finetuning")
    if layout in RAW and len(stream.columns) != RAW[layout]:
        yield Finding(
            f"{{streams}}: columns {', '.join(sorted(stream.columns))}, and {{loader}} takes no "
            f"columns in addition to {layout}.",
            f"write the stream again with only {layout}, or as turns with `mdsmix convert`.",
        )


@CHECKS.stream(
    "error",
    "The loader cannot decode such a column and fails at the first sample, or reads wrong ids from it.",
)
def columns_encoding(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if loader.name in EXTRA_LOADERS:
        return
    for column, encoding in stream.columns.items():
        if not re.fullmatch(ENCODINGS.get(column, ".*"), encoding):
            yield Finding(
                f"the column {column} of {{streams}} is `{encoding}`, which no loader can decode.",
                "convert again with `mdsmix convert`.",
            )


@CHECKS.stream(
    "error",
    "Streaming expects the same columns in all shards of a stream; a sample with others fails when "
    "it comes up.",
)
def columns_shards(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    other = [shard for shard in stream.shards if shard.columns != stream.columns]
    if other:
        yield Finding(
            f"the first shard of {{streams}} has the columns {dict(stream.columns)}, and "
            f"{other[0].stored.basename} has {other[0].columns}.",
            "publish the two sets of shards as two streams; merge_index joins indexes without "
            "comparing them.",
        )


@CHECKS.stream(
    "error",
    "A pickle runs code when it is read; Streaming refuses it unless allow_unsafe_types is set.",
)
def columns_unsafe(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    pickled = [c for c, e in stream.columns.items() if e == "pkl"]
    if pickled and not loader.dataset.get("allow_unsafe_types"):
        yield Finding(
            f"{{streams}}: pickles in {', '.join(pickled)}, and {{loader}} does not set "
            "allow_unsafe_types.",
            "write the stream again without that column.",
        )


@CHECKS.stream(
    "error",
    "LLM-Foundry's loader and that of mdsmix append labels to input_ids, so each row is trained "
    "twice, with -100 among its ids.",
)
def labels_repeated(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find rows as Hugging Face's collators want them: labels are input_ids, masked by -100."""
    if stream.trusted_manifest or find_layout(stream, loader.name) != "input_ids":
        return
    dtype = str(loader.dataset.get("token_encoding_type", "int64"))
    samples = stream.head.samples
    if samples and all(_has_masked_labels(sample, dtype) for sample in samples):
        yield Finding(
            "labels of {streams} equal its input_ids except for -100, as Hugging Face's collators want "
            "them.",
            "write the prompt as input_ids and the answer as labels, or convert the source with "
            "`mdsmix convert`.",
        )


def _has_masked_labels(sample: Sample, dtype: str) -> bool:
    """Check whether a sample's labels are its input_ids, except for positions of -100."""
    try:
        (turn,) = decode_turns(sample, dtype)
    except (MixRefused, ValueError):
        return False
    ids, labels = turn
    if not len(ids) or len(ids) != len(labels):
        return False
    return bool(((labels == ids) | (labels == IGNORED_LABEL)).all())


PLAUSIBLE_IDS = 1 << 22
"4 million, above any vocabulary in use: the limit if the run's vocabulary is unknown."
DTYPES = ("int64", "int32", "uint16", "uint8")


@CHECKS.stream(
    "error",
    "A column of bytes is read with one dtype for the whole loader (token_encoding_type); the wrong "
    "one gives meaningless ids.",
)
def tokens_dtype(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    expected = str(loader.dataset.get("token_encoding_type", "int64"))
    if expected not in get_args(IntType):
        return  # setting-value reports it
    actual = _find_dtype(stream, mix.tokenizer.vocab_size if mix.tokenizer else PLAUSIBLE_IDS)
    if not actual or actual == expected:
        return
    size = np.dtype(actual).itemsize
    # Signed and unsigned ids of 32 or 64 bits have the same bytes.
    if size < 4 or size != np.dtype(expected).itemsize:
        yield Finding(
            f"the bytes of {{streams}} are {actual}, and {{loader}} reads all bytes columns as "
            f"{expected}.",
            f"set token_encoding_type: {actual}; if streams differ in it, convert them again: "
            "ndarray columns name their dtype.",
        )


def _find_dtype(stream: StreamInMix, limit: int) -> str | None:
    """Return the widest dtype under which the first samples contain ids of a vocabulary of `limit`;
    None without columns of bytes.
    """
    columns = [name for name in TOKEN_COLUMNS if stream.columns.get(name) == "bytes"]
    if not columns:
        return None  # without reading a shard
    cells = [sample.get(column) for sample in stream.head.samples for column in columns]
    data = [cell for cell in cells if isinstance(cell, bytes)]
    for dtype in DTYPES:
        if data and all(_fits(cell, dtype, limit) for cell in data):
            return dtype
    return None


def _fits(data: bytes, dtype: str, limit: int) -> bool:
    if not data or len(data) % np.dtype(dtype).itemsize:
        return False
    ids = np.frombuffer(data, dtype)
    return 0 <= int(ids.min()) <= int(ids.max()) < limit


@CHECKS.stream(
    "error",
    "The loader passes such an id on, and the embedding fails on it; on a GPU it is a CUDA assert "
    "without a name.",
)
def id_vocabulary(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    manifest = stream.trusted_manifest
    if manifest:
        top = manifest.totals.largest_id
    else:
        ids = read_head_turns(stream, loader).ids.values
        top = int(ids.max(initial=-1))
        least = int(ids.min(initial=0))
        if least < 0:
            yield Finding(
                f"the first samples of {{streams}} contain the id {least}, and ids begin at 0.",
                "write only token ids; a token that is not trained belongs into a prompt, not into "
                "labels as -100.",
            )
    vocabularies = [
        (
            "the tokenizer",
            mix.tokenizer and mix.tokenizer.vocab_size,
            "name the tokenizer of the conversion, or convert again.",
        ),
        (
            "the model",
            mix.yaml.value_at("model", "vocab_size"),
            f"set model.vocab_size to at least {top + 1}, or convert again with the model's "
            "tokenizer.",
        ),
    ]
    for owner, size, fix in vocabularies:
        if isinstance(size, int) and top >= size:
            yield Finding(
                f"the largest id of {{streams}} is {top}, and the vocabulary of {owner} ends at "
                f"{size - 1}.",
                fix,
            )
