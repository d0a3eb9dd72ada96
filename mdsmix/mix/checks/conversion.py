"""Whether streams are trained as they were converted: under the same policies, and images by a
loader and a processor that read them.

A stored sample has one token for each image.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mdsmix.encode.labels import Targets
from mdsmix.encode.pretrained import open_processor
from mdsmix.encode.published_folders import fetch_folder, name_at_hand, read_card
from mdsmix.errors import MdsmixError
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.kinds.finetuning import targets_of
from mdsmix.kinds.processor_proof import WAY_OUT, difference, row_of
from mdsmix.mix.checks.columns import find_layout
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix, stream_names
from mdsmix.recipe.rules import PROCESSOR_FOLDER
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import PACKED, has_images, layout_of
from mdsmix.storage import locate
from mdsmix.words import spelled

CHECKS = CheckList()

USES_SEQUENCE_ID = ("model", "attn_config", "attn_uses_sequence_id")
"""The key by which LLM-Foundry's MPT keeps documents apart in attention. Models of transformers
have no such key.
"""


@CHECKS.stream(
    "error",
    "The encoder would see one token of every pretraining sample, and the loss would mean nothing.",
    "format-pretraining",
)
@CHECKS.stream(
    "error",
    "The two formats cut and filter samples differently, so samples may be left without anything to train on.",
    "format-differs",
)
def decoder_only(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    encoding, wanted = stream.encoding, loader.decoder_only_format
    # Streams without target policies are pretraining data, which has one format.
    made = encoding.decoder_only_format if encoding and stream.has_targets else True
    if encoding and not loader.is_text and isinstance(wanted, bool) and wanted != made:
        yield Finding(
            f"{{streams}}: converted under decoder_only_format: {spelled(made)}, and {{loader}} says {spelled(wanted)}.",
            "convert again, or train in the format of the conversion; pretraining data with the text loader.",
            id="format-differs" if stream.has_targets else "format-pretraining",
        )


@CHECKS.stream(
    "error",
    "Compact columns hold a whole conversation as one prompt and its last response: other policies would train on what is not theirs.",
    "targets-compact",
)
@CHECKS.stream(
    "error",
    "A packed row says which of its tokens are trained, and the loader trains those, whatever its policies say.",
    "targets-packed",
)
@CHECKS.stream(
    "warning",
    "Samples that only this policy could train on were dropped when converting, so they are missing.",
    "targets-wider",
)
@CHECKS.stream(
    "error",
    "A sample that only the other policy could train on is left with nothing, and fails in mid-training (ValueError).",
    "targets-narrower",
)
def targets_differ(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    encoding, wanted = stream.encoding, loader.target_policies
    if not encoding or not wanted or loader.is_text or not stream.has_targets:
        return
    if rule := _difference(encoding, wanted):
        made = f"{encoding.target_prompts}/{encoding.target_responses}"
        yield Finding(
            f"{{streams}}: converted for the targets {made}, and {{loader}} trains {'/'.join(loader.targets)}.",
            "convert again with the targets of the run, or set target_prompts and target_responses to those of the conversion.",
            id=rule,
        )


def _difference(encoding: Encoding, wanted: Targets) -> str | None:
    """The id of the rule that a stream breaks by targets other than the wanted; None where the
    targets agree.
    """
    made = targets_of(encoding)
    # No prompt is empty, so `all` is length>=1.
    more = max(1, wanted.least_trained_prompt) - max(1, made.least_trained_prompt)
    is_same = made.target_responses == wanted.target_responses
    if not more and is_same:
        return None
    if encoding.pack or encoding.compact:
        return "targets-packed" if encoding.pack else "targets-compact"
    is_narrower = more > 0 or (not is_same and wanted.target_responses == "last")
    return "targets-narrower" if is_narrower else "targets-wider"


@CHECKS.stream(
    "note",
    "Without eos_token_id or bos_token_id the loader of mdsmix does not know where a document of a full row ends, so they attend to each other.",
    "documents-unmarked",
)
@CHECKS.stream(
    "note",
    "Under the finetuning loader the documents of one full row share a sequence_id and attend to each other, unlike name: text with eos_token_id.",
    "documents-unseparated",
)
def documents_joined(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Notes pretraining text in full rows, whose documents the loader cannot tell apart."""
    read = None if loader.is_text or stream.has_targets else find_layout(stream, loader.name)
    is_marked = any(loader.dataset.get(f"{word}_token_id") is not None for word in ("eos", "bos"))
    is_unmarked = read == "tokens" and not is_marked
    if (
        stream.encoding
        and stream.encoding.layout == "concat"
        and (read == "input_ids" or is_unmarked)
    ):
        yield Finding(
            "{streams}: pretraining text in full rows (layout: concat).",
            "nothing, if that is wanted; else train_loader.dataset.eos_token_id under name: mdsmix masks documents that end in EOS, and layout: "
            "document with packing_ratio masks all.",
            id="documents-unmarked" if is_unmarked else "documents-unseparated",
        )


@CHECKS.mix(
    "warning",
    "The batches say where the documents of a packed row begin, and this model does not look: its attention crosses from one to the next.",
)
def documents_unmasked(mix: Mix) -> Findings:
    packed = [s for s in mix.train.streams if layout_of(s.columns) == PACKED]
    model, key = mix.yaml.value_at("model", "name"), ".".join(USES_SEQUENCE_ID)
    masks = model == "mpt_causal_lm" and mix.yaml.value_at(*USES_SEQUENCE_ID)
    if packed and model in ("mpt_causal_lm", "hf_causal_lm") and not masks:
        yield Finding(
            f"{{streams}}: packed rows, and the model is {model} without {key}.",
            f"set {key}: true of an mpt_causal_lm; of other models only a training loop of your own can mask documents "
            "(mdsmix.load.document_mask); or leave it, if that is wanted.",
            stream_names(packed),
        )


@CHECKS.stream(
    "error",
    "LLM-Foundry's loaders read the turns beside the images and train on one bare placeholder for each, without a word.",
)
def images_loader(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if has_images(stream.columns) and not loader.is_mdsmix:
        yield Finding(
            f"{{streams}}: images, which the {loader.name} loader of {{loader}} does not read.",
            "set train_loader.name: mdsmix, under LLM-Foundry with mdsmix installed beside it (docs/loading.md), or read it by mdsmix.load in "
            "a training loop of your own; or take the stream out.",
        )


def planned_processor(stream: StreamInMix) -> str | None:
    """The hash of the processor by whose token counts the stream's rows fit; None where none is
    known.
    """
    return stream.encoding.images.get("processor") if stream.encoding else None


def find_processor(mix: Mix, loader: Loader, stream: StreamInMix) -> tuple[str, Path] | None:
    """Hash and folder of the processor for the stream: the processor that the loader names, else
    the one published beside the stream. None where it cannot be opened here.
    """
    name, manifest = loader.dataset.get("processor"), stream.trusted_manifest
    home: str | Path | None = None
    with suppress(MdsmixError):
        if name:
            home = name_at_hand(str(name), mix.yaml.stream_urls)
        elif manifest and manifest.processor_folder:
            home = fetch_folder(stream.folder.parent.parent / manifest.processor_folder)
        if home and (card := read_card(locate(home))):
            return card.hash, Path(home)
        if home:
            opened = open_processor(str(home))
            return opened.hash, Path(opened.path)
    return None


@CHECKS.stream(
    "warning",
    "Whether every row fits max_seq_len with its images is then known only when the loader comes to one that does not, which ends training.",
    "images-unplanned",
)
@CHECKS.stream(
    "error",
    "Rows for another processor do not fit and end training; of one that is not equal a model is given other tokens, masks or pixels than "
    "transformers gives it; without one training ends at once.",
    "images-processor",
)
def images_planned(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if not (loader.is_mdsmix and has_images(stream.columns)):
        return
    name, planned = loader.dataset.get("processor"), planned_processor(stream)
    hash, folder = find_processor(mix, loader, stream) or (None, None)
    of_all = {found for each in loader.streams if (found := planned_processor(each))}
    # A processor folder that `convert` published is fetched from beside the stream, so it must lie
    # there.
    is_ours = PROCESSOR_FOLDER.fullmatch(os.path.basename(str(name)))
    is_other = bool(hash or is_ours) and planned != hash
    rule = None
    if (planned and is_other) if name else (len(of_all) != 1 or planned != hash):
        rule = "images-processor"
    elif not planned or (name and not hash):
        rule = "images-unplanned"
    if rule:
        made = f"for the processor {planned}" if planned else "without a processor"
        again = mix.republish_fix(f" processor={name}" if name else "")
        yield Finding(
            f"{{streams}}: images, converted {made}, and that of {{loader}} is {name or 'not named'} ({hash or 'not to be found here'}).",
            "name the model's processor (processor: at the top of the recipe, dataset.processor in a YAML of your own), check where it can be "
            f"loaded, and {again}, which publishes it beside the streams.",
            id=rule,
        )
    longest = loader.max_seq_len or 0
    if planned and stream.encoding and stream.encoding.max_seq_len > longest:
        yield Finding(
            f"{{streams}}: converted for rows longer than the {longest:,} tokens of {{loader}}, and what does not fit with its images is not cut.",
            f"{mix.republish_fix(f' max_seq_len={longest}')}.",
            id="images-processor",
        )
    if mix.run_tokenizer and stream.encoding and folder:
        own = [row_of("a row of the stream", sample) for sample in stream.head.samples]
        if found := difference(folder, stream.encoding, mix.run_tokenizer, own):
            yield Finding(f"{found}.", f"{WAY_OUT}.", id="images-processor")
