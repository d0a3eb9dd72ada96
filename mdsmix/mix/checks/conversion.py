"""Checks of target policies, formats, documents and images: streams must be trained as they were
converted, with documents kept apart, and images by a loader and processor that can read them.

A stored sample has one token for each image.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mdsmix.encode.labels import Targets, make_targets
from mdsmix.errors import MdsmixError
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.foundry_yaml.loader_keys import is_number
from mdsmix.kinds import kind_of
from mdsmix.kinds.prove_processor import FIX_UNEQUAL, find_difference, make_stored_row
from mdsmix.messages import format_yaml_value, join_names
from mdsmix.mix.checks.columns import find_layout
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix, list_stream_names
from mdsmix.processor.card import open_processor
from mdsmix.recipe.rules import PROCESSOR_FOLDER
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import LOSS_WEIGHTS, PACKED_COLUMNS, find_id_columns, has_images
from mdsmix.storage import locate
from mdsmix.tokenizer.published import fetch_folder, localize_name, read_card

CHECKS = CheckList()

USES_SEQUENCE_ID = ("model", "attn_config", "attn_uses_sequence_id")
"""The key with which LLM-Foundry's MPT keeps documents apart in attention. Models of transformers
have no such key.
"""


@CHECKS.stream(
    "error",
    "The encoder would see one token of each pretraining sample, and the loss would mean nothing.",
    "format-pretraining",
)
@CHECKS.stream(
    "error",
    "The two formats cut and filter samples differently, so samples may have nothing to train on.",
    "format-differs",
)
def decoder_only(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams that were converted for a decoder-only model and are loaded for an
    encoder-decoder, or the reverse.
    """
    encoding = stream.encoding
    format = loader.decoder_only_format
    if encoding is None or loader.is_text or not isinstance(format, bool):
        return
    # Streams without target policies are pretraining data, which has one format.
    converted = encoding.decoder_only_format if stream.has_targets else True
    if format != converted:
        yield Finding(
            f"{{streams}}: converted with decoder_only_format: {format_yaml_value(converted)}, and "
            f"{{loader}} sets decoder_only_format: {format_yaml_value(format)}.",
            "convert again, or train in the format of the conversion. Pretraining data can also be "
            "trained with the text loader.",
            id="format-differs" if stream.has_targets else "format-pretraining",
        )


@CHECKS.stream(
    "error",
    "Compact columns contain a conversation as one prompt and its last response: other policies "
    "would train on the wrong tokens.",
    "targets-compact",
)
@CHECKS.stream(
    "error",
    "A packed row marks which of its tokens are trained, and the loader trains those, whatever its "
    "policies are.",
    "targets-packed",
)
@CHECKS.stream(
    "error",
    "Parts of answers that are not trained (by train_parts, or by the marks of records) are stored "
    "as prompts: this policy would train them, or only the last piece of an answer.",
    "targets-parts",
)
@CHECKS.stream(
    "warning",
    "Samples that only this policy can train on were dropped when converting, so they are missing.",
    "targets-wider",
)
@CHECKS.stream(
    "error",
    "A sample that only the other policy can train on has nothing to train on, and fails in "
    "mid-training (ValueError).",
    "targets-narrower",
)
def targets_differ(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams that were converted for other targets than the loader's. Targets are the
    policies that decide which prompts and responses are used for training.
    """
    encoding = stream.encoding
    policies = loader.target_policies
    if not encoding or not policies or loader.is_text or not stream.has_targets:
        return
    manifest = stream.trusted_manifest
    has_spans = manifest is not None and manifest.totals.span_records > 0
    is_split = bool(encoding.train_parts) or has_spans
    check = _compare_targets(encoding, policies, is_split)
    if check:
        converted = f"{encoding.target_prompts}/{encoding.target_responses}"
        yield Finding(
            f"{{streams}}: converted for the targets {converted} (prompts/responses), and "
            f"{{loader}} trains {'/'.join(loader.targets)}.",
            "convert again with the targets of the run, or set target_prompts and target_responses "
            "of the loader to the targets of the conversion.",
            id=check,
        )


def _compare_targets(encoding: Encoding, policies: Targets, is_split: bool) -> str | None:
    """Return the id of the check that fails, such as `targets-wider`; None if the policies are the
    same as at the conversion.

    Args:
        encoding: how the stream was converted.
        policies: the policies of the loader.
        is_split: whether answers of the stream are split into trained and untrained pieces.
    """
    converted = make_targets(encoding)
    # No prompt is empty, so `all` is the same as length>=1.
    least_now = max(1, policies.least_trained_prompt)
    least_converted = max(1, converted.least_trained_prompt)
    is_same = converted.target_responses == policies.target_responses
    if least_now == least_converted and is_same:
        return None
    if encoding.pack:
        return "targets-packed"
    if encoding.compact:
        return "targets-compact"
    trains_fewer_responses = not is_same and policies.target_responses == "last"
    trains_prompts = policies.target_prompts != "none"
    if is_split and (trains_prompts or trains_fewer_responses):
        return "targets-parts"
    if least_now > least_converted or trains_fewer_responses:
        return "targets-narrower"
    return "targets-wider"


@CHECKS.mix(
    "note",
    "The model learns to write a part of an answer, such as its reasoning, from some streams of "
    "conversations and not from others.",
)
def parts_differ(mix: Mix) -> Findings:
    """Find streams of conversations whose `train_parts` differ: in one stream the reasoning in an
    answer is trained, for example, and in another it is not.
    """
    # Group the streams by the untrained parts of their answers.
    by_untrained = dict[str, list[StreamInMix]]()
    conversations = list[StreamInMix]()
    for stream in mix.train.streams:
        encoding = stream.encoding
        if encoding and stream.has_targets and kind_of(encoding).has_template:
            train_parts = encoding.train_parts
            untrained = [name for name, is_trained in train_parts.items() if not is_trained]
            by_untrained.setdefault(join_names(untrained) or "no part", []).append(stream)
            conversations.append(stream)
    if len(by_untrained) < 2:
        return
    groups = list[str]()
    for parts, streams in by_untrained.items():
        groups.append(f"{parts} in {join_names(list_stream_names(streams))}")
    yield Finding(
        f"{{streams}}: different parts of answers are left untrained: {'; '.join(groups)}.",
        "OK if intended, for example if only some streams have reasoning. Otherwise set the same "
        "train_parts for these streams, and convert again.",
        list_stream_names(conversations),
    )


@CHECKS.stream(
    "note",
    "Without eos_token_id or bos_token_id the loader of mdsmix cannot find the ends of documents "
    "in a full row, so documents attend to each other.",
    "documents-unmarked",
)
@CHECKS.stream(
    "note",
    "Under the finetuning loader the documents of one full row share a sequence_id and attend to "
    "each other, unlike name: text with eos_token_id.",
    "documents-unseparated",
)
def documents_joined(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find pretraining data in full rows (several documents joined to rows of max_seq_len tokens)
    whose documents the loader does not separate, so that they attend to each other.
    """
    if loader.is_text or stream.has_targets:
        return
    if stream.encoding is None or stream.encoding.layout != "concat":
        return
    # Rows in finetuning columns (`input_ids`) are never separated. Rows in the column `tokens` are
    # separated only by the id of EOS or BOS.
    layout = find_layout(stream, loader.name)
    separators = ("eos_token_id", "bos_token_id")
    is_marked = any(loader.dataset.get(key) is not None for key in separators)
    is_unmarked = layout == "tokens" and not is_marked
    if layout == "input_ids" or is_unmarked:
        yield Finding(
            "{streams}: pretraining text in full rows (layout: concat), whose documents are not "
            "kept apart.",
            "OK if intended. To keep documents apart, use name: mdsmix with dataset.eos_token_id, "
            "or layout: document with packing_ratio.",
            id="documents-unmarked" if is_unmarked else "documents-unseparated",
        )


@CHECKS.mix(
    "warning",
    "The batches mark where the documents of a packed row begin, but this model ignores that: its "
    "attention crosses from one document to the next.",
    "documents-unmasked",
)
@CHECKS.mix(
    "note",
    "The batches mark where the documents of a packed row begin, but a model of transformers that "
    "gets the whole batch ignores that: its attention crosses from one document to the next.",
    "documents-packed",
)
def documents_unmasked(mix: Mix) -> Findings:
    """Find packed rows whose model lets the documents of a row attend to each other, or may do so
    since the YAML does not name it.
    """
    packed, how = _find_packed_streams(mix.train)
    if not packed:
        return
    model = mix.yaml.value_at("model", "name")
    key = ".".join(USES_SEQUENCE_ID)
    # MPT masks documents if its key is set; models of transformers (hf_causal_lm) have no such key.
    masks_documents = model == "mpt_causal_lm" and mix.yaml.value_at(*USES_SEQUENCE_ID)
    if model in ("mpt_causal_lm", "hf_causal_lm") and not masks_documents:
        yield Finding(
            f"{{streams}}: {how}, and the model is {model} without {key}.",
            f"OK if intended. Otherwise set {key}: true for an mpt_causal_lm; for other models "
            "only a training loop of your own can mask documents (mdsmix.load.document_mask).",
            packed,
            id="documents-unmasked",
        )
    elif model is None:
        yield Finding(
            f"{{streams}}: {how}, and the YAML names no model.",
            "OK if your training loop keeps documents apart (docs/one-loader.md): with "
            "mdsmix.load.document_mask, or with position_ids, no attention_mask and "
            f"use_cache=False. In LLM-Foundry set {key}: true for an mpt_causal_lm.",
            packed,
            id="documents-packed",
        )


def _find_packed_streams(loader: Loader) -> tuple[list[str], str]:
    """Return the names of the streams that have several documents in a row, and what packs them:
    the conversion, or the loader with its packing_ratio.
    """
    if not loader.reads_turns:  # it packs nothing, and another check refuses packed streams
        return [], ""
    ratio: Any = loader.dataset.get("packing_ratio")
    if ratio == "auto" or (is_number(ratio) and ratio > 1):
        return list_stream_names(loader.streams), f"packed into rows by packing_ratio: {ratio}"
    packed = list[StreamInMix]()
    for stream in loader.streams:
        if find_id_columns(stream.columns) == PACKED_COLUMNS:
            packed.append(stream)
    return list_stream_names(packed), "the rows are packed"


@CHECKS.stream(
    "error",
    "LLM-Foundry's loaders read only the turns and silently train on one placeholder token for "
    "each image.",
)
def images_loader(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams with images under a loader that does not read images."""
    if has_images(stream.columns) and not loader.is_mdsmix:
        yield Finding(
            f"{{streams}}: the samples have images, and {{loader}} (name: {loader.name}) does not "
            "read images.",
            "set train_loader.name: mdsmix, with mdsmix installed in LLM-Foundry's environment "
            "(docs/loading.md), or read the stream with mdsmix.load in a training loop of your "
            "own; or remove the stream.",
        )


@CHECKS.stream(
    "error",
    "LLM-Foundry's loaders do not read the column of weights, and train every token with the "
    "weight 1.",
)
def weights_loader(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams with loss weights under a loader that does not read them."""
    if LOSS_WEIGHTS in stream.columns and not loader.is_mdsmix:
        yield Finding(
            f"{{streams}}: the samples have loss weights, and {{loader}} (name: {loader.name}) "
            "does not read them.",
            "set train_loader.name: mdsmix, or convert the stream again without loss_weights.",
        )


@CHECKS.mix(
    "warning",
    "The models of LLM-Foundry compute the loss themselves, and every trained token counts alike.",
)
def weights_unused(mix: Mix) -> Findings:
    """Find streams with loss weights in a YAML that names a model of LLM-Foundry."""
    weighted = [stream for stream in mix.train.streams if LOSS_WEIGHTS in stream.columns]
    model = mix.yaml.value_at("model", "name")
    if weighted and mix.train.is_mdsmix and model:
        yield Finding(
            f"{{streams}}: batches have loss weights, and the model {model} of LLM-Foundry does "
            "not use them.",
            "compute the loss in a training loop of your own, or in a model class of your own that "
            "multiplies by loss_weights (docs/loading.md).",
            list_stream_names(weighted),
        )


def find_planned_processor(stream: StreamInMix) -> str | None:
    """Return the hash of the processor that a stream with images was converted for. None if the
    stream was converted without a processor.

    Conversion counts an image's tokens by its processor, to decide which rows fit.
    """
    return stream.encoding.images.get("processor") if stream.encoding else None


class FoundProcessor(NamedTuple):
    """A processor, which turns images into tokens and pixels, that can be opened here."""

    hash: str
    folder: Path
    "The folder with its files."


def find_processor(mix: Mix, loader: Loader, stream: StreamInMix) -> FoundProcessor | None:
    """Find the processor of a stream: the processor that the loader names, otherwise the processor
    that is published next to the stream. None if it cannot be opened here.
    """
    name = loader.dataset.get("processor")
    manifest = stream.trusted_manifest
    folder: str | Path | None = None
    with suppress(MdsmixError):
        if name:
            folder = localize_name(str(name), mix.yaml.stream_urls)
        elif manifest and manifest.processor_folder:
            # The folder of the mix contains the stream's folder, which contains the split's.
            folder = fetch_folder(stream.folder.parent.parent / manifest.processor_folder)
        if not folder:
            return None
        card = read_card(locate(folder))
        if card:
            return FoundProcessor(card.hash, Path(folder))
        opened = open_processor(str(folder))
        return FoundProcessor(opened.hash, Path(opened.path))
    return None


@CHECKS.stream(
    "warning",
    "Whether a row fits max_seq_len with its images is known only when the loader reads it; a row "
    "that does not fit ends training.",
    "images-unplanned",
)
@CHECKS.stream(
    "error",
    "Rows for another processor do not fit and end training, or give a model other tokens, masks "
    "or pixels than transformers does; without a processor training ends at once.",
    "images-processor",
)
def images_planned(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams with images whose rows may not fit the loader: they were converted without a
    processor, for another processor, or for longer rows. The processor turns an image into tokens.
    """
    if not (loader.is_mdsmix and has_images(stream.columns)):
        return
    name = loader.dataset.get("processor")
    planned = find_planned_processor(stream)
    processor = find_processor(mix, loader, stream)
    hash = processor.hash if processor else None
    check = _judge_processor(loader, planned, hash)
    if check:
        converted = f"for the processor {planned}" if planned else "without a processor"
        again = mix.republish_fix(f" processor={name}" if name else "")
        yield Finding(
            f"{{streams}}: images were converted {converted}, and the processor of {{loader}} is "
            f"{name or 'not named'} ({hash or 'not found here'}).",
            "name the model's processor: in a recipe by processor at the top, in a YAML of your "
            "own by dataset.processor. Run the check where this processor can be loaded, and "
            f"{again}, which publishes the processor next to the streams.",
            id=check,
        )
    longest = loader.max_seq_len or 0
    if planned and stream.encoding and stream.encoding.max_seq_len > longest:
        yield Finding(
            f"{{streams}}: converted for rows longer than the {longest:,} tokens of {{loader}}, "
            "and rows with images are not cut.",
            f"{mix.republish_fix(f' max_seq_len={longest}')}.",
            id="images-processor",
        )
    if mix.run_tokenizer and stream.encoding and processor and processor.folder:
        rows = [make_stored_row("a row of the stream", sample) for sample in stream.head.samples]
        problem = find_difference(processor.folder, stream.encoding, mix.run_tokenizer, rows)
        if problem:
            yield Finding(f"{problem}.", f"{FIX_UNEQUAL}.", id="images-processor")


def _judge_processor(loader: Loader, planned: str | None, hash: str | None) -> str | None:
    """Return the id of the check that fails, `images-processor` or `images-unplanned`. None if the
    stream's rows fit the loader's processor.

    Args:
        planned: hash of the processor that the stream was converted for; None if it was converted
            without a processor.
        hash: hash of the loader's processor; None if it cannot be opened here.
    """
    name = loader.dataset.get("processor")
    if name:
        # A folder that `convert` published would be found next to the streams. If it is not found,
        # the streams have another processor. Of any other name that cannot be opened here it is
        # unknown which processor it is.
        is_published = PROCESSOR_FOLDER.fullmatch(os.path.basename(str(name)))
        is_known = hash or is_published
        if planned and is_known and planned != hash:
            return "images-processor"
        # Both hashes are known and equal, or one of them is unknown.
        return None if planned and hash else "images-unplanned"
    # Without a name the loader uses the processor that is published next to the streams, so all
    # streams that were converted for a processor must have the same one.
    processors = {find_planned_processor(stream) for stream in loader.streams} - {None}
    if len(processors) != 1 or planned != hash:
        return "images-processor"
    # This stream was converted for that processor, or without any.
    return None if planned else "images-unplanned"
