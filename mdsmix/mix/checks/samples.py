"""Whether the lengths of samples fit, documents are kept apart, and each sample has something to train on.

The manifest answers where there is one. Otherwise the first samples of the first shard do, which can show that a stream is wrong but
not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.encode.labels import USABLE, label
from mdsmix.kinds import kind_of
from mdsmix.mix.checks.columns import is_plain, shape
from mdsmix.mix.stream_counts import has_policies_of, head_turns, longest, row_length
from mdsmix.mix.streams import Loader, Mix, StreamInMix, names
from mdsmix.shards.counts import Totals
from mdsmix.training.findings import Finding, Findings, check
from mdsmix.words import plural


@check(
    "error",
    "The loader cuts longer samples without a word: text is lost, and a conversation whose target is cut off fails in mid-training.",
)
def rows_too_long(loader: Loader, stream: StreamInMix) -> Findings:
    top = _too_long(loader, stream)
    if top and not _is_cut_by_rule(stream, loader) and not _has_sides(stream, loader):
        yield Finding(
            f"the longest sample of {{streams}} has {top} tokens, and max_seq_len of {{loader}} is {loader.limit}.",
            f"convert again for {loader.limit} tokens, or train with max_seq_len: {top}.",
        )


@check(
    "warning",
    "The loader cuts off what is longer than a row, and nothing is ever trained on that.",
)
def rows_cut(loader: Loader, stream: StreamInMix) -> Findings:
    if loader.is_text or not _is_cut_by_rule(stream, loader):
        return
    counted, top = _counted(loader, stream), _too_long(loader, stream)
    if counted and counted.cut_rows:
        told = (
            f"{counted.cut_rows:,} of {plural(counted.samples, 'sample')} of {{streams}} are cut, by {counted.cut_tokens:,} of "
            f"{plural(counted.tokens, 'token')} ({counted.cut_tokens / counted.tokens:.1%})"
        )
    elif top and not _has_sides(stream, loader):
        told = f"the longest sample of {{streams}} has {top:,} tokens"
    else:
        return
    yield Finding(
        f"{told}, and max_seq_len of {{loader}} is {loader.max_seq_len}.",
        "convert and train with a larger max_seq_len, or split long records before converting.",
    )


def _counted(loader: Loader, stream: StreamInMix) -> Totals | None:
    """What a manifest counts, where it counts what is cut at this length."""
    manifest = stream.trusted_manifest
    is_alike = manifest and manifest.encoding.max_seq_len == loader.max_seq_len
    return manifest.totals if manifest and is_alike else None


@check(
    "warning",
    "The loader cuts an encoder's context and its target each at max_seq_len, and only both together are counted.",
)
def sides_unseen(loader: Loader, stream: StreamInMix) -> Findings:
    manifest, top = stream.trusted_manifest, _too_long(loader, stream)
    more = loader.limit - manifest.encoding.max_seq_len if manifest else -1
    # What was cut at the conversion's length is counted; where that was nothing, nothing is at a larger one.
    is_known = not more or (manifest and more > 0 and not manifest.totals.cut_rows)
    if top and _has_sides(stream, loader) and not is_known:
        yield Finding(
            f"context and target of the longest sample of {{streams}} have {top} tokens together, and max_seq_len of {{loader}} is "
            f"{loader.limit}: whether one of the two is longer was not counted for this length.",
            f"convert again for {loader.limit} tokens, which counts what is cut.",
        )


def _has_sides(stream: StreamInMix, loader: Loader) -> bool:
    """An encoder's context and its target have a row each, so their sum says nothing."""
    return (stream.encoding or loader).decoder_only_format is False


def _too_long(loader: Loader, stream: StreamInMix) -> int:
    """Tokens of the longest sample, where those are more than a row has; else 0."""
    top = longest(stream, loader) or 0
    return top if top > loader.limit else 0


def _is_cut_by_rule(stream: StreamInMix, loader: Loader) -> bool:
    """Conversations that were kept because something to train on is left of them at this length."""
    if (encoding := stream.encoding) is None:
        # LLM-Foundry's converter keeps turns by that rule too, and sample-unusable judges the first of them.
        return "turns" in stream.columns and not loader.is_text
    return kind_of(encoding).keeps_long and encoding.max_seq_len <= (loader.max_seq_len or 0)


@check(
    "warning",
    "Every batch is padded or shorter than the model is paid for: part of each step is wasted.",
)
def rows_short(loader: Loader, stream: StreamInMix) -> Findings:
    length = row_length(stream)
    if length is not None and length < (loader.max_seq_len or 0):
        yield Finding(
            f"every sample of {{streams}} has {length} tokens, and max_seq_len of {{loader}} is {loader.max_seq_len}.",
            f"convert again for {loader.max_seq_len} tokens, or train with max_seq_len: {length}.",
        )


def _uneven(loader: Loader) -> list[StreamInMix]:
    """Streams that make batches of the text loader uneven."""
    tokens = [s for s in loader.streams if loader.is_text and shape(s, "text") == "tokens"]
    loose = [s for s in tokens if row_length(s) is None and not _looks_even(s, loader)]
    return loose or (tokens if len({row_length(s) for s in tokens} - {None, 0}) > 1 else [])


def _looks_even(stream: StreamInMix, loader: Loader) -> bool:
    """Every sample has one length, though the encoding does not fix it, as in LLM-Foundry's own converters."""
    if stream.encoding:
        return stream.encoding.layout == "concat"
    return len(set(head_turns(stream, loader).samples.lengths.tolist())) < 2


@check(
    "note",
    "The text loader pads each batch to its longest sample, without an attention mask, and counts the padding as tokens.",
)
def rows_uneven(loader: Loader) -> Findings:
    if uneven := _uneven(loader):
        yield Finding(
            "samples of {streams} have different lengths under {loader}.",
            "use layout: concat, or the finetuning loader with packing, whose rows are masked.",
            names(uneven),
        )


@check(
    "error",
    "The text loader cannot pad a batch of different lengths without a padding token, and fails at the first one.",
)
def pad_missing(mix: Mix, loader: Loader) -> Findings:
    if (mix.tokenizer is not None and mix.tokenizer.pad_id is None) and (uneven := _uneven(loader)):
        yield Finding(
            "samples of {streams} have different lengths, and the tokenizer has no padding token.",
            "add pad_token to tokenizer.kwargs, a token of its own and not EOS, or use layout: concat.",
            names(uneven),
        )


@check(
    "error",
    "sequence_id is worked out from this token; where no sample holds it, all documents of a row attend to each other.",
)
def separator_absent(loader: Loader, stream: StreamInMix) -> Findings:
    for word in ("eos", "bos") if is_plain(loader, stream) else ():
        token, encoding = loader.dataset.get(f"{word}_token_id"), stream.encoding
        is_promised = encoding is not None and getattr(encoding, f"add_{word}") is not False
        if not isinstance(token, int) or is_promised or not (encoding or stream.head.samples):
            continue
        if token not in head_turns(stream, loader).ids.values:
            yield Finding(
                f"{{loader}} sets {word}_token_id: {token}, and without that token were written: {{streams}}.",
                f"convert again with add_{word}: true, or leave {word}_token_id out.",
            )


@check(
    "error",
    "The collator fails on such a sample when it comes up, in mid-training (IndexError or ValueError).",
)
def sample_unusable(loader: Loader, stream: StreamInMix) -> Findings:
    if loader.is_text or _was_judged(stream, loader):
        return
    if reasons := {*_text_reasons(stream), *_token_reasons(stream, loader)}:
        yield Finding(
            f"of the first samples of {{streams}} some cannot be trained on under max_seq_len {loader.max_seq_len} and "
            f"{'/'.join(loader.targets)}: {', '.join(sorted(reasons))}.",
            "convert again with `mdsmix convert`, which leaves such records out and counts them.",
        )


def _was_judged(stream: StreamInMix, loader: Loader) -> bool:
    """Whether every sample was judged by this loader's rule when it was encoded: its shard need not be looked at."""
    encoding, limit = stream.encoding, loader.max_seq_len or 0
    if not encoding or not stream.has_targets:
        return encoding is not None and limit >= 2  # a prompt of one token, and something behind it
    return has_policies_of(encoding, loader) and encoding.max_seq_len <= limit


def _text_reasons(stream: StreamInMix) -> Iterator[str]:
    for column in ("prompt", "response", "completion"):
        if any(sample.get(column) == "" for sample in stream.head.samples):
            yield f"empty_{column}"


def _token_reasons(stream: StreamInMix, loader: Loader) -> Iterator[str]:
    """The verdicts on token samples, by the rule that the encoder itself uses."""
    found, targets = head_turns(stream, loader), loader.target_policies
    if targets and len(found.counts) and shape(stream, "finetuning") in ("turns", "input_ids"):
        yield from {*label(targets, found, None).verdicts()} - {USABLE}
