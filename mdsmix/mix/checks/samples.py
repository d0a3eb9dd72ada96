"""Checks of samples: their lengths must fit the loader, the documents of a row must be kept apart,
and each sample must have something to train on.

The checks read the manifest's counts. Without a manifest, they read the first samples of the first
shard. These can show that a stream is wrong, but not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mdsmix.encode.labels import USABLE, Labels
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.foundry_yaml.loader_keys import as_whole_number
from mdsmix.foundry_yaml.prompt_loader import MAX_GEN_LEN, PROMPT_LOADER
from mdsmix.kinds import kind_of
from mdsmix.messages import plural
from mdsmix.mix.checks.columns import find_layout, is_plain
from mdsmix.mix.epoch.stream_counts import find_fixed_row_length, has_policies_of, read_head_turns
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix, list_stream_names
from mdsmix.shards.manifest import Manifest

CHECKS = CheckList()
RL_CALLBACKS = frozenset({"on_policy_rl", "ppo"})
"Callbacks of ComposeRL, under which models write answers to prompts."
DEFAULT_GEN_LEN = 32
"The tokens that ComposeRL lets a model write if the YAML does not set variables.max_gen_len."


@CHECKS.stream(
    "warning",
    "The loader cuts an encoder's context and its target at max_seq_len each, and only the length "
    "of both together was counted.",
    "sides-unseen",
)
@CHECKS.stream(
    "warning",
    "The loader cuts off tokens that do not fit into a row, and never trains on them.",
    "rows-cut",
)
@CHECKS.stream(
    "warning",
    "For an encoder-decoder, LLM-Foundry's finetuning loader does not cut at max_seq_len under "
    "pad_to_longest: true: a batch is as long as its longest context or target. mdsmix cuts it.",
    "rows-uncut",
)
@CHECKS.stream(
    "error",
    "The loader silently cuts longer samples: text is lost, and a conversation whose target is cut "
    "off fails in mid-training.",
    "rows-too-long",
)
def rows_long(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams with samples that are longer than a row of the loader."""
    if loader.name == PROMPT_LOADER.name:
        return  # `prompt_cut` counts the answer too
    excess = _find_excess(loader, stream)
    if excess is None:
        return
    if _never_cuts(loader, stream) and excess.check != "rows-too-long":
        yield Finding(
            "{loader} sets pad_to_longest: true and decoder_only_format: false, and the longest "
            f"sample of {{streams}} has {_find_longest(loader, stream):,} tokens, context and "
            f"target together; max_seq_len is {loader.row_limit}.",
            "remove pad_to_longest; allow_pad_trimming: true shortens batches too, and then rows "
            "are cut.",
            id="rows-uncut",
        )
        return
    fix = "convert and train with a larger max_seq_len, or split long records before converting."
    if excess.check == "rows-cut":
        fix = f"OK if intended. Otherwise {fix}"
    yield Finding(
        f"{excess.message}, and max_seq_len of {{loader}} is {loader.row_limit}.",
        fix,
        id=excess.check,
    )


@CHECKS.stream(
    "error",
    "ComposeRL cuts off the end of a longer prompt, and with it the words that ask the model to "
    "answer. It only logs this.",
)
def prompt_cut(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams with prompts that leave less than max_gen_len tokens of max_seq_len."""
    answer = as_whole_number(loader.dataset.get(MAX_GEN_LEN))
    if loader.name != PROMPT_LOADER.name or answer is None:
        return  # key-missing reports a missing number
    longest = _find_longest(loader, stream)
    if longest + answer > loader.row_limit:
        yield Finding(
            f"the longest prompt of {{streams}} has {longest:,} tokens, and {{loader}} has "
            f"max_gen_len: {answer} and max_seq_len: {loader.row_limit}.",
            "set both in the recipe and convert again, which leaves such prompts out.",
        )


@CHECKS.mix(
    "warning",
    "ComposeRL lets the model write variables.max_gen_len tokens, or 32 if that is not set. The "
    "key of the dataset only decides which prompts have room.",
)
def max_gen_len_differs(mix: Mix) -> Findings:
    """Find a training YAML of ComposeRL with two keys that differ and should be equal:
    `variables.max_gen_len`, the tokens that the model writes at most, and `max_gen_len` of the
    dataset, the tokens for which each prompt leaves room.
    """
    if mix.train.name != PROMPT_LOADER.name:
        return
    variables = mix.yaml.value_at("variables")
    callbacks = mix.yaml.value_at("callbacks")
    has_callback = isinstance(callbacks, Mapping) and not RL_CALLBACKS.isdisjoint(callbacks)
    if not isinstance(variables, Mapping):
        if not has_callback:
            return  # a part of a YAML, or that of a loop of one's own
        variables = {}
    written = variables.get(MAX_GEN_LEN, DEFAULT_GEN_LEN)
    has_room_for = mix.train.dataset.get(MAX_GEN_LEN)
    if has_room_for is not None and written != has_room_for:
        state = f"is {written}" if MAX_GEN_LEN in variables else "is not set"
        yield Finding(
            f"variables.{MAX_GEN_LEN} {state}, and dataset.{MAX_GEN_LEN} of train_loader is "
            f"{has_room_for}.",
            f"set variables.{MAX_GEN_LEN}: {has_room_for}.",
        )


@CHECKS.loader(
    "warning",
    "KTO compares desirable completions with undesirable ones, and learns little from one label.",
)
def labels_alike(mix: Mix, loader: Loader) -> Findings:
    """Find a loader of unpaired preferences whose streams all have one label."""
    manifests = [stream.trusted_manifest for stream in loader.streams]
    counts = [manifest.totals.labels for manifest in manifests if manifest]
    if loader.unopened or not counts or len(counts) < len(manifests) or not all(counts):
        return  # the labels of a stream are unknown, or its samples have none
    for label in ("true", "false"):
        if not any(labels[label] for labels in counts):
            yield Finding(
                f"no completion of {{loader}} has the label {label}.",
                f"add completions with the label {label}, or train those of one label as "
                "finetuning data.",
            )


class Excess(NamedTuple):
    """A report of samples that are longer than a row of the loader."""

    check: str
    "The id of the check that reports them, such as `rows-cut`."
    message: str
    "How many samples are too long, or how long the longest is: the beginning of a sentence."


def _find_excess(loader: Loader, stream: StreamInMix) -> Excess | None:
    """Find samples of a stream that the loader truncates, or that conversion truncated. Return None
    if there are none.
    """
    keeps_long = _has_usable_long_samples(loader, stream)
    if keeps_long and loader.is_text:
        return None  # the text loader reads no conversation: columns-loader reports that
    manifest = stream.trusted_manifest
    cut = _find_counted_cuts(manifest, loader, keeps_long) if manifest else None
    if cut:
        return cut
    longest = _find_longest(loader, stream)
    if longest <= loader.row_limit:
        return None
    message = f"the longest sample of {{streams}} has {longest:,} tokens"
    # For an encoder-decoder, context and target are cut at max_seq_len each.
    has_sides = (stream.encoding or loader).decoder_only_format is False
    if not has_sides:
        return Excess("rows-cut" if keeps_long else "rows-too-long", message)
    if manifest:
        # Tokens that are cut at the conversion's length were counted. If none were, none are cut
        # at a larger length either.
        converted_length = manifest.encoding.max_seq_len
        is_longer = loader.row_limit > converted_length
        if loader.row_limit == converted_length or (is_longer and not manifest.totals.cut_rows):
            return None
    return Excess("sides-unseen", f"{message}, context and target together")


def _find_counted_cuts(manifest: Manifest, loader: Loader, keeps_long: bool) -> Excess | None:
    """Report the samples that the loader or the conversion truncates, as the manifest counts them;
    None if the manifest counts none.

    Args:
        keeps_long: whether conversion kept long samples whole, for the loader to truncate.
    """
    counts = manifest.totals
    if keeps_long and loader.row_limit == manifest.encoding.max_seq_len and counts.cut_rows:
        # The conversion has truncated other rows, or truncated these rows first.
        rows = counts.cut_rows + counts.truncated_rows
        cut = counts.cut_tokens + counts.truncated_tokens
        tokens = counts.tokens + counts.truncated_tokens
        return Excess(
            "rows-cut",
            f"{rows:,} of {plural(counts.samples, 'sample')} of {{streams}} are cut, by "
            f"{cut:,} of {plural(tokens, 'token')} ({cut / tokens:.1%})",
        )
    if counts.truncated_rows and manifest.encoding.too_long == "cut":
        tokens = counts.tokens + counts.truncated_tokens
        # Packed rows contain several documents, which were truncated one by one.
        samples = plural(counts.documents or counts.samples, "sample")
        return Excess(
            "rows-cut",
            f"{counts.truncated_rows:,} of {samples} of {{streams}} were cut when converting, by "
            f"{counts.truncated_tokens:,} of {plural(tokens, 'token')} "
            f"({counts.truncated_tokens / tokens:.1%})",
        )
    return None


def _never_cuts(loader: Loader, stream: StreamInMix) -> bool:
    """Check for settings under which LLM-Foundry does not cut conversations at max_seq_len. It cuts
    the columns of pairs when it reads them.
    """
    is_encoder_decoder = loader.name == "finetuning" and loader.decoder_only_format is False
    pads_to_longest = bool(loader.dataset.get("pad_to_longest"))
    return is_encoder_decoder and pads_to_longest and "turns" in stream.columns


def _find_longest(loader: Loader, stream: StreamInMix) -> int:
    """Return the length of the longest sample in tokens. Without a manifest only the first samples
    are known.
    """
    if stream.trusted_manifest:
        return stream.trusted_manifest.totals.longest
    lengths = read_head_turns(stream, loader).samples.lengths
    return find_fixed_row_length(stream) or int(lengths.max(initial=0))


def _has_usable_long_samples(loader: Loader, stream: StreamInMix) -> bool:
    """Check whether the converter of the stream kept only those conversations longer than a row
    that still have something to train on after the loader has truncated them.
    """
    encoding = stream.encoding
    if encoding is None:
        # The stream has no manifest, so LLM-Foundry's converter may have made it. That converter
        # keeps conversations by the same rule; the check sample-unusable tests the first samples.
        return "turns" in stream.columns and not loader.is_text
    return kind_of(encoding).keeps_long and encoding.max_seq_len <= loader.row_limit


@CHECKS.stream(
    "warning",
    "Every batch is padded, or shorter than the model allows: part of each step is wasted.",
)
def rows_short(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams whose rows are filled to one length, which is shorter than the loader's rows:
    rows that all have this length, and packed rows.
    """
    length = find_fixed_row_length(stream)
    problem = f"every sample of {{streams}} has {length} tokens"
    if stream.encoding and stream.encoding.pack:
        length = stream.encoding.max_seq_len
        problem = f"the rows of {{streams}} are packed for {length} tokens"
    limit = loader.max_seq_len or 0
    if length is not None and length < limit:
        yield Finding(
            f"{problem}, and max_seq_len of {{loader}} is {limit}.",
            f"convert again for {limit} tokens, or train with max_seq_len: {length}.",
        )


@CHECKS.loader(
    "error",
    "The text loader cannot pad a batch of different lengths without a padding token, and fails at "
    "the first such batch.",
    "pad-missing",
)
@CHECKS.loader(
    "note",
    "The text loader pads each batch to its longest sample, without an attention mask, and counts "
    "the padding as tokens.",
    "rows-uneven",
)
def rows_of_different_lengths(mix: Mix, loader: Loader) -> Findings:
    """Find streams of a text loader whose samples have different lengths. Without a padding token
    they also make the loader fail.
    """
    if not loader.is_text:
        return
    uneven = _find_uneven(loader)
    if not uneven:
        return
    problem = "samples of {streams} have different lengths under {loader}"
    yield Finding(
        f"{problem}.",
        "use layout: concat, or the finetuning loader with packing, which masks padding.",
        list_stream_names(uneven),
        "rows-uneven",
    )
    if mix.tokenizer and mix.tokenizer.pad_id is None:
        yield Finding(
            f"{problem}, and the tokenizer has no padding token.",
            "add a pad_token other than EOS to tokenizer.kwargs, or use layout: concat.",
            list_stream_names(uneven),
            "pad-missing",
        )


def _find_uneven(loader: Loader) -> list[StreamInMix]:
    """Return the streams of a text loader whose samples have different lengths.

    If each stream has one length, but the lengths of two streams differ, all streams are returned.
    """
    streams = [stream for stream in loader.streams if find_layout(stream, "text") == "tokens"]
    lengths = {stream.name: find_fixed_row_length(stream) for stream in streams}
    uneven = [
        stream
        for stream in streams
        if lengths[stream.name] is None and not _looks_even(stream, loader)
    ]
    if uneven:
        return uneven
    # Each stream has one length: compare the lengths of the streams. None is an unknown length.
    fixed_lengths = {length for length in lengths.values() if length}
    return streams if len(fixed_lengths) > 1 else []


def _looks_even(stream: StreamInMix, loader: Loader) -> bool:
    """Check whether all samples seem to have one length, in a stream whose columns do not tell it
    (`ndarray:int32` instead of `ndarray:int32:2048`). LLM-Foundry's own converters write such
    streams.
    """
    if stream.encoding:
        return stream.encoding.layout == "concat"
    return len(set(read_head_turns(stream, loader).samples.lengths.tolist())) < 2


@CHECKS.stream(
    "error",
    "The loader computes sequence_id from this token; without it, all documents of a row attend to "
    "each other.",
)
def separator_absent(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams without the token (EOS or BOS) that shows the loader where documents end."""
    if not is_plain(loader, stream):
        return
    encoding = stream.encoding
    for name in ("eos", "bos"):
        token = loader.dataset.get(f"{name}_token_id")
        if not isinstance(token, int):
            continue  # the loader sets no such separator
        if encoding is None and not stream.head.samples:
            continue  # nothing is known about the stream
        if encoding is not None and getattr(encoding, f"add_{name}") is not False:
            continue  # conversion added the token
        if token not in read_head_turns(stream, loader).ids.values:
            yield Finding(
                f"{{streams}}: the first samples do not contain the token {token}, which "
                f"{{loader}} sets as {name}_token_id.",
                f"convert again with add_{name}: true, or leave {name}_token_id out of the "
                "loader's dataset.",
            )


@CHECKS.stream(
    "error",
    "The collator fails on such a sample when it comes up, in mid-training (IndexError or "
    "ValueError).",
)
def sample_unusable(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams whose first samples include some with nothing to train on."""
    if loader.is_text or _was_checked_by_conversion(stream, loader):
        return
    reasons = set(_list_unusable(stream, loader))
    if reasons:
        yield Finding(
            f"some of the first samples of {{streams}} cannot be trained on under max_seq_len "
            f"{loader.max_seq_len} and the targets {'/'.join(loader.targets)}: "
            f"{', '.join(sorted(reasons))}.",
            "convert again with `mdsmix convert`, which leaves such records out and counts them.",
        )


def _was_checked_by_conversion(stream: StreamInMix, loader: Loader) -> bool:
    """Check whether conversion has checked that every sample can be trained on by this loader. No
    shard is read then.
    """
    encoding = stream.encoding
    limit = loader.max_seq_len or 0
    if encoding is None:
        return False
    if not stream.has_targets:
        return limit >= 2  # a prompt of one token, and one token to train on
    return has_policies_of(encoding, loader) and encoding.max_seq_len <= limit


def _list_unusable(stream: StreamInMix, loader: Loader) -> Iterator[str]:
    """Yield the reasons why some of the first samples have nothing to train on, such as
    `empty_response`. The encoder's own code decides this for token ids.
    """
    for column in ("prompt", "response", "completion"):
        if any(sample.get(column) == "" for sample in stream.head.samples):
            yield f"empty_{column}"
    turns = read_head_turns(stream, loader)
    targets = loader.target_policies
    has_ids = find_layout(stream, "finetuning") in ("turns", "input_ids")
    if targets and len(turns.counts) and has_ids:
        verdicts = set(Labels(targets, turns, None).judge())
        yield from verdicts - {USABLE}
