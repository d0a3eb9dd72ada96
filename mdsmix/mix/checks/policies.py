"""Whether streams are trained under the policies that they were converted under."""

from __future__ import annotations

from mdsmix.encode.labels import Targets
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.checks.columns import shape
from mdsmix.mix.streams import Loader, Mix, StreamInMix, names
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import PACKED, layout_of
from mdsmix.training.findings import Finding, Findings, check
from mdsmix.words import spelled

USES_SEQUENCE_ID = ("model", "attn_config", "attn_uses_sequence_id")
"The key by which LLM-Foundry's MPT keeps documents apart in attention. Models of transformers have no such key."


@check(
    "error",
    "The encoder would see one token of every pretraining sample, and the loss would mean nothing.",
    "format-pretraining",
)
@check(
    "error",
    "The two formats cut and filter samples differently, so samples may be left without anything to train on.",
    "format-differs",
)
def decoder_only(loader: Loader, stream: StreamInMix) -> Findings:
    encoding, wanted = stream.encoding, loader.decoder_only_format
    # Streams without target policies are pretraining data, which has one format.
    made = encoding.decoder_only_format if encoding and stream.has_targets else True
    if encoding and not loader.is_text and isinstance(wanted, bool) and wanted != made:
        yield Finding(
            f"{{streams}}: converted under decoder_only_format: {spelled(made)}, and {{loader}} says {spelled(wanted)}.",
            "convert again, or train in the format of the conversion; pretraining data with the text loader.",
            id="format-differs" if stream.has_targets else "format-pretraining",
        )


@check(
    "error",
    "Compact columns hold a whole conversation as one prompt and its last response: other policies would train on what is not theirs.",
    "targets-compact",
)
@check(
    "error",
    "What a packed row trains was settled when it was made: the loader trains that, whatever its policies say.",
    "targets-packed",
)
@check(
    "warning",
    "Samples that only this policy could train on were dropped when converting, so they are missing.",
    "targets-wider",
)
@check(
    "error",
    "A sample that only the other policy could train on is left with nothing, and fails in mid-training (ValueError).",
    "targets-narrower",
)
def targets_differ(loader: Loader, stream: StreamInMix) -> Findings:
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
    """The id of the rule that a stream breaks by targets other than the wanted; None where the targets agree."""
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


@check(
    "note",
    "Without eos_token_id or bos_token_id the loader of mdsmix does not know where a document of a full row ends, so they attend to each other.",
    "documents-unmarked",
)
@check(
    "note",
    "Under the finetuning loader the documents of one full row share a sequence_id and attend to each other, unlike name: text with eos_token_id.",
    "documents-unseparated",
)
def documents_joined(loader: Loader, stream: StreamInMix) -> Findings:
    """Notes pretraining text in full rows, whose documents the loader cannot tell apart."""
    read = None if loader.is_text or stream.has_targets else shape(stream, loader.name)
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


@check(
    "warning",
    "The batches say where the documents of a packed row begin, and this model does not look: its attention crosses from one to the next.",
)
def documents_unmasked(mix: Mix) -> Findings:
    packed = [s for s in mix.train.streams if layout_of(s.columns) == PACKED]
    model, key = mix.yaml.at("model", "name"), ".".join(USES_SEQUENCE_ID)
    masks = model == "mpt_causal_lm" and mix.yaml.at(*USES_SEQUENCE_ID)
    if packed and model in ("mpt_causal_lm", "hf_causal_lm") and not masks:
        yield Finding(
            f"{{streams}}: packed rows, and the model is {model} without {key}.",
            f"set {key}: true of an mpt_causal_lm; of other models only a training loop of your own can mask documents "
            "(mdsmix.load.document_mask); or leave it, if that is wanted.",
            names(packed),
        )
