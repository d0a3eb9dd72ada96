"""Whether every stream's columns are what the loader reads. All of it stands in index.json.

The two loaders of LLM-Foundry read different columns, and neither looks before the batch in which the first wrong sample
comes up: with 3 % of wrong samples that is after about ten batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdsmix.kinds import kind_of
from mdsmix.mix.findings import Hit, check, does, names
from mdsmix.mix.streams import Loader, Mix, Stream

READS = {
    "text": "tokens, or text",
    "finetuning": "turns, input_ids and labels, messages, or prompt and response",
}
INTEGERS = tuple(f"ndarray:{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64))
ENCODINGS = {
    "tokens": (*INTEGERS, "ndarray", "bytes"),
    "input_ids": (*INTEGERS, "ndarray", "bytes"),
    "labels": (*INTEGERS, "ndarray", "bytes"),
    "text": ("str",),
    "turns": ("json",),
    "messages": ("json",),
    "prompt": ("str",),
    "response": ("str",),
    "completion": ("str",),
}
"What each loader can decode from a column; `ndarray:<int>` with or without a length."


def shape(stream: Stream, loader: str) -> str | None:
    """What the loader takes a sample of the stream for, by the order in which it looks; None for nothing."""
    columns = set(stream.columns)
    if loader == "text":
        return next((c for c in ("text", "tokens") if c in columns), None)
    if "turns" in columns:
        return "turns"
    if {"input_ids", "labels"} <= columns:
        return "input_ids"
    if "messages" in columns:
        return "messages"
    pair = "prompt" in columns and bool({"response", "completion"} & columns)
    return "prompt/response" if pair else None


def reads(loader: Loader, stream: Stream) -> bool:
    return loader.name not in READS or shape(stream, loader.name) is not None


@check(
    "columns-loader",
    "error",
    "Neither loader reads the other's columns, and training fails only at the batch in which such a sample comes up.",
)
def columns_loader(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        wrong = [s for s in loader.streams if s.shards and not reads(loader, s)]
        right = [s for s in mix.train.streams if s.shards and reads(loader, s)]
        if wrong:
            others = f", as {_described(right)} has it" if right else ""
            yield Hit(
                names([*wrong, *right]),
                f"{_described(wrong)} {does(wrong)} not hold what the {loader.name} loader reads "
                f"({READS[loader.name]}){others}.",
                _ways(mix, loader, wrong),
            )


def _described(streams: Sequence[Stream]) -> str:
    return ", ".join(f"{s.name} ({', '.join(sorted(s.columns))})" for s in streams)


def _ways(mix: Mix, loader: Loader, wrong: Sequence[Stream]) -> str:
    """The ways out that exist for streams of the other kind."""
    if not all(shape(s, "finetuning") or shape(s, "text") for s in wrong):
        return "convert the stream again with `mdsmix convert`, or take it out of the mix."
    other = "finetuning" if loader.is_text else "text"
    if all(shape(s, other) for s in mix.streams):
        again = f", or {_again(mix, loader.name, wrong)}" if mix.recipe else ""
        return f"set train_loader.name: {other}, which reads all of these streams{again}."
    is_plain = all(s.card and not kind_of(s.card.encoding).has_targets for s in mix.streams)
    if loader.is_text and is_plain:
        return f"{_again(mix, 'text', wrong)}."
    lacking = [s for s in mix.streams if not shape(s, "finetuning")]
    return (
        f"train both kinds with the finetuning loader: {_again(mix, 'finetuning', lacking)}; or read both kinds in a "
        "training loop of your own with mdsmix.load.build_loader."
    )


def _again(mix: Mix, loader: str, streams: Sequence[Stream]) -> str:
    """How these streams come to hold what the loader reads."""
    return mix.makers(streams, "re-encode", f" train_loader.name={loader} --reencode")


@check(
    "columns-text-and-tokens",
    "error",
    "A batch that holds both kinds cannot be put together, and fails in mid-training.",
)
def columns_text_and_tokens(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if not loader.is_text:
            continue
        texts = [s for s in loader.streams if shape(s, "text") == "text"]
        tokens = [s for s in loader.streams if shape(s, "text") == "tokens"]
        if texts and tokens:
            yield Hit(
                names([*texts, *tokens]),
                f"{', '.join(names(texts))} {does(texts, 'is', 'are')} text that the loader tokenizes, {', '.join(names(tokens))} {does(tokens, 'is', 'are')} tokens.",
                "convert the text streams to tokens with `mdsmix convert`.",
            )


@check(
    "columns-exact",
    "error",
    "The finetuning loader takes a sample for one of these shapes only when it has no other column (UnknownExampleTypeError).",
)
def columns_exact(mix: Mix) -> Iterator[Hit]:
    for loader, stream in _finetuning(mix):
        found = shape(stream, "finetuning")
        if found not in ("messages", "prompt/response"):
            continue
        count = 1 if found == "messages" else 2
        if len(stream.columns) != count:
            yield Hit(
                [stream.name],
                f"{stream.name} holds {len(stream.columns)} columns ({', '.join(sorted(stream.columns))}), and as "
                f"{found} it may hold {count} under {loader.label}.",
                "write the stream again with the columns of that shape alone, or as turns with `mdsmix convert`.",
            )


@check(
    "columns-encoding",
    "error",
    "The loader cannot decode such a column and fails at the first sample, or reads wrong ids from it.",
)
def columns_encoding(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        for column, encoding in stream.columns.items():
            base = ":".join(encoding.split(":")[:2])
            allowed = ENCODINGS.get(column)
            if (allowed and base not in allowed) or _is_square(column, encoding):
                yield Hit(
                    [stream.name],
                    f"the column {column} of {stream.name} is `{encoding}`, and the loaders read "
                    f"{'`ndarray:<int>` of one dimension' if allowed and 'bytes' in allowed else f'`{(allowed or (encoding,))[0]}`'}.",
                    "convert the stream again with `mdsmix convert`.",
                )


def _is_square(column: str, encoding: str) -> bool:
    return column in ("tokens", "input_ids", "labels") and "," in encoding


@check(
    "columns-shards",
    "error",
    "Streaming takes the shards of a stream for alike; a sample of the other columns fails when it comes up.",
)
def columns_shards(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        for number, shard in enumerate(stream.shards):
            if shard.columns != stream.columns:
                yield Hit(
                    [stream.name],
                    f"shard 0 of {stream.name} holds {dict(stream.columns)}, shard {number} ({shard.stored.basename}) holds {shard.columns}.",
                    "publish the two sets of shards as two streams; merge_index joins indexes without comparing them.",
                )
                break


@check(
    "columns-unsafe",
    "error",
    "A pickle runs code when it is read; Streaming refuses it unless allow_unsafe_types is set.",
)
def columns_unsafe(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for stream in loader.streams:
            pickled = [c for c, e in stream.columns.items() if e == "pkl"]
            if pickled and not loader.dataset.get("allow_unsafe_types"):
                yield Hit(
                    [stream.name],
                    f"{stream.name} holds pickles in {', '.join(pickled)}, and {loader.label} does not set allow_unsafe_types.",
                    "write the stream again without that column.",
                )


@check(
    "columns-raw-and-tokenized",
    "warning",
    "Text that the loader tokenizes gets the template, BOS and date of training time; nothing compares them with those of the ids.",
)
def columns_raw_and_tokenized(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if loader.is_text:
            continue
        shapes = {s.name: shape(s, "finetuning") for s in loader.streams}
        raw = [n for n, found in shapes.items() if found in ("messages", "prompt/response")]
        ready = [n for n, found in shapes.items() if found in ("turns", "input_ids")]
        if raw and ready:
            yield Hit(
                raw + ready,
                f"{', '.join(raw)} {does(raw, 'is', 'are')} text that the loader tokenizes, {', '.join(ready)} {does(ready, 'was', 'were')} tokenized before.",
                "convert the text streams too with `mdsmix convert`.",
            )


def _finetuning(mix: Mix) -> Iterator[tuple[Loader, Stream]]:
    for loader in mix.loaders:
        if not loader.is_text:
            for stream in loader.streams:
                yield loader, stream
