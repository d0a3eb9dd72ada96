"""Whether the lengths of samples fit, documents are kept apart, and each sample has something to
train on.

The manifest is judged where there is one. Without one, the first samples of the first shard are
judged, which can show that a stream is wrong but not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.encode.labels import USABLE, Labels
from mdsmix.foundry_yaml.findings import Finding, Findings, check
from mdsmix.kinds import kind_of
from mdsmix.mix.checks.columns import find_layout, is_plain
from mdsmix.mix.epoch.stream_counts import fixed_row_length, has_policies_of, read_head_turns
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix, stream_names
from mdsmix.words import plural


@check(
    "warning",
    "The loader cuts an encoder's context and its target each at max_seq_len, and only both together are counted.",
    "sides-unseen",
)
@check(
    "warning",
    "The loader cuts off what is longer than a row, and nothing is ever trained on that.",
    "rows-cut",
)
@check(
    "error",
    "The loader cuts longer samples without a word: text is lost, and a conversation whose target is cut off fails in mid-training.",
    "rows-too-long",
)
def rows_long(loader: Loader, stream: StreamInMix) -> Findings:
    if found := _long(loader, stream):
        rule, told = found
        meant = "nothing, if that is wanted; else " * (rule == "rows-cut")
        yield Finding(
            f"{told}, and max_seq_len of {{loader}} is {loader.limit}.",
            f"{meant}convert and train with a larger max_seq_len, or split long records before converting.",
            id=rule,
        )


def _long(loader: Loader, stream: StreamInMix) -> tuple[str, str] | None:
    """The rule that too long samples break, and a sentence on how many or how long they are; None
    where all fit.
    """
    if manifest := stream.trusted_manifest:
        top = manifest.totals.longest
    else:
        lengths = read_head_turns(stream, loader).samples.lengths
        top = fixed_row_length(stream) or int(lengths.max(initial=0))
    is_kept = _is_kept_by_rule(loader, stream)
    if is_kept and loader.is_text:
        return None  # the text loader reads no conversation: columns-loader reports that
    has_sides = (stream.encoding or loader).decoder_only_format is False
    more = loader.limit - manifest.encoding.max_seq_len if manifest else -1
    if manifest and is_kept and not more and manifest.totals.cut_rows:
        counts = manifest.totals
        return "rows-cut", (
            f"{counts.cut_rows:,} of {plural(counts.samples, 'sample')} of {{streams}} are cut, by {counts.cut_tokens:,} of "
            f"{plural(counts.tokens, 'token')} ({counts.cut_tokens / counts.tokens:.1%})"
        )
    if manifest and manifest.totals.truncated_rows and manifest.encoding.too_long == "cut":
        counts = manifest.totals
        tokens = counts.tokens + counts.truncated_tokens
        of = plural(counts.documents or counts.samples, "sample")
        return "rows-cut", (
            f"{counts.truncated_rows:,} of {of} of {{streams}} were cut when converting, by {counts.truncated_tokens:,} of "
            f"{plural(tokens, 'token')} ({counts.truncated_tokens / tokens:.1%})"
        )
    if top <= loader.limit:
        return None
    told = f"the longest sample of {{streams}} has {top:,} tokens"
    if not has_sides:
        return "rows-cut" if is_kept else "rows-too-long", told
    # Tokens cut at the conversion's length are counted; where none were, none are cut at a larger
    # length.
    is_counted = not more or (manifest and more > 0 and not manifest.totals.cut_rows)
    return None if is_counted else ("sides-unseen", f"{told}, context and target together")


def _is_kept_by_rule(loader: Loader, stream: StreamInMix) -> bool:
    """Whether conversion kept long conversations because the loader's length leaves them something
    to train on.
    """
    if (encoding := stream.encoding) is None:
        # LLM-Foundry's converter keeps turns by the same rule, and sample-unusable judges the first
        # samples.
        return "turns" in stream.columns and not loader.is_text
    return kind_of(encoding).keeps_long and encoding.max_seq_len <= loader.limit


@check(
    "warning",
    "Every batch is padded or shorter than the model is paid for: part of each step is wasted.",
)
def rows_short(loader: Loader, stream: StreamInMix) -> Findings:
    length, limit = fixed_row_length(stream), loader.max_seq_len or 0
    if length is not None and length < limit:
        yield Finding(
            f"every sample of {{streams}} has {length} tokens, and max_seq_len of {{loader}} is {limit}.",
            f"convert again for {limit} tokens, or train with max_seq_len: {length}.",
        )


@check(
    "error",
    "The text loader cannot pad a batch of different lengths without a padding token, and fails at the first one.",
    "pad-missing",
)
@check(
    "note",
    "The text loader pads each batch to its longest sample, without an attention mask, and counts the padding as tokens.",
    "rows-uneven",
)
def rows_of_different_lengths(mix: Mix, loader: Loader) -> Findings:
    tokens = [s for s in loader.streams if loader.is_text and find_layout(s, "text") == "tokens"]
    uneven = [s for s in tokens if fixed_row_length(s) is None and not _looks_even(s, loader)]
    if not uneven and len({fixed_row_length(s) for s in tokens} - {None, 0}) > 1:
        uneven = tokens
    if uneven:
        told = "samples of {streams} have different lengths under {loader}"
        fix = "use layout: concat, or the finetuning loader with packing, whose rows are masked."
        yield Finding(f"{told}.", fix, stream_names(uneven), "rows-uneven")
        if mix.tokenizer and mix.tokenizer.pad_id is None:
            yield Finding(
                f"{told}, and the tokenizer has no padding token.",
                "add pad_token to tokenizer.kwargs, a token of its own and not EOS, or use layout: concat.",
                stream_names(uneven),
                "pad-missing",
            )


def _looks_even(stream: StreamInMix, loader: Loader) -> bool:
    """Whether samples seem to have one length though their columns do not fix it, as from
    LLM-Foundry's own converters.
    """
    if stream.encoding:
        return stream.encoding.layout == "concat"
    return len(set(read_head_turns(stream, loader).samples.lengths.tolist())) < 2


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
        if token not in read_head_turns(stream, loader).ids.values:
            yield Finding(
                f"{{loader}} sets {word}_token_id: {token}, and without that token were written: {{streams}}.",
                f"convert again with add_{word}: true, or leave {word}_token_id out.",
            )


@check(
    "error",
    "The collator fails on such a sample when it comes up, in mid-training (IndexError or ValueError).",
)
def sample_unusable(loader: Loader, stream: StreamInMix) -> Findings:
    reasons = (
        set() if loader.is_text or _was_judged(stream, loader) else {*_unusable(stream, loader)}
    )
    if reasons:
        yield Finding(
            f"of the first samples of {{streams}} some cannot be trained on under max_seq_len {loader.max_seq_len} and "
            f"{'/'.join(loader.targets)}: {', '.join(sorted(reasons))}.",
            "convert again with `mdsmix convert`, which leaves such records out and counts them.",
        )


def _was_judged(stream: StreamInMix, loader: Loader) -> bool:
    """Whether conversion judged every sample by this loader's rule, so that no shard need
    be read.
    """
    encoding, limit = stream.encoding, loader.max_seq_len or 0
    if not encoding or not stream.has_targets:
        # A prompt of one token, and one token to train on.
        return encoding is not None and limit >= 2
    return has_policies_of(encoding, loader) and encoding.max_seq_len <= limit


def _unusable(stream: StreamInMix, loader: Loader) -> Iterator[str]:
    """The reasons why some of the first samples give nothing to train on; for token ids by the
    encoder's own rule.
    """
    for column in ("prompt", "response", "completion"):
        if any(sample.get(column) == "" for sample in stream.head.samples):
            yield f"empty_{column}"
    found, targets = read_head_turns(stream, loader), loader.target_policies
    if (
        targets
        and len(found.counts)
        and find_layout(stream, "finetuning") in ("turns", "input_ids")
    ):
        yield from {*Labels(targets, found, None).verdicts()} - {USABLE}
