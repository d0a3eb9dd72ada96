"""Whether streams that were converted under a policy are trained under the same one."""

from __future__ import annotations

from mdsmix.encode.labels import Targets
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.checks.columns import shape
from mdsmix.mix.streams import Loader, Mix, StreamInMix, names
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import PACKED, layout_of
from mdsmix.training.findings import Finding, Findings, Severity, check
from mdsmix.words import spelled

USES_SEQUENCE_ID = ("model", "attn_config", "attn_uses_sequence_id")
"How a config of LLM-Foundry's MPT says that documents do not see each other; its models of transformers cannot be told."


def _converted(loader: Loader, stream: StreamInMix, has_targets: bool) -> Encoding | None:
    """How the stream was converted, if the finetuning loader reads it and policies decide what of it is trained, or do not."""
    return stream.encoding if (not loader.is_text and stream.has_targets is has_targets) else None


@check(
    "error",
    "The two formats cut and filter samples differently, so samples may be left without anything to train on.",
)
def format_differs(loader: Loader, stream: StreamInMix) -> Findings:
    encoding, wanted = _converted(loader, stream, has_targets=True), loader.decoder_only_format
    if encoding and isinstance(wanted, bool) and wanted != encoding.decoder_only_format:
        yield Finding(
            f"{{streams}}: converted under decoder_only_format: {spelled(not wanted)}, and {{loader}} says {spelled(wanted)}.",
            "convert again, or train in the format of the conversion.",
        )


@check(
    "error",
    "The encoder would see one token of every pretraining sample, and the loss would mean nothing.",
)
def format_pretraining(loader: Loader, stream: StreamInMix) -> Findings:
    if _converted(loader, stream, has_targets=False) and loader.decoder_only_format is False:
        yield Finding(
            "{streams}: pretraining data, and {loader} says decoder_only_format: false.",
            "set decoder_only_format: true, or train the stream with the text loader.",
        )


def _difference(encoding: Encoding, wanted: Targets) -> str | None:
    """The rule below that a stream breaks whose targets are not the wanted ones."""
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


def _targets(id: str, severity: Severity, why: str) -> None:
    """Registers a rule on streams that were converted for other target policies than the loader's."""

    def differ(loader: Loader, stream: StreamInMix) -> Findings:
        encoding, wanted = _converted(loader, stream, has_targets=True), loader.target_policies
        if encoding and wanted and _difference(encoding, wanted) == id:
            made = f"{encoding.target_prompts}/{encoding.target_responses}"
            yield Finding(
                f"{{streams}}: converted for the targets {made}, and {{loader}} trains {'/'.join(loader.targets)}.",
                "convert again with the targets of the run, or set target_prompts and target_responses to those of the conversion.",
            )

    check(severity, why, id=id)(differ)


_targets(
    "targets-narrower",
    "error",
    "A sample that only the other policy could train on is left with nothing, and fails in mid-training (ValueError).",
)
_targets(
    "targets-wider",
    "warning",
    "Samples that only this policy could train on were dropped when converting, so they are missing.",
)
_targets(
    "targets-packed",
    "error",
    "What a packed row trains was settled when it was made: the loader trains that, whatever its policies say.",
)
_targets(
    "targets-compact",
    "error",
    "Compact columns hold a whole conversation as one prompt and its last response: other policies would train on what is not theirs.",
)


def _joined(loader: Loader, stream: StreamInMix, shown_as: str, fix: str) -> Findings:
    """Pretraining text in full rows that the loader takes for samples of that shape."""
    encoding = _converted(loader, stream, has_targets=False)
    if encoding and encoding.layout == "concat" and shape(stream, loader.name) == shown_as:
        yield Finding(
            "{streams}: pretraining text in full rows (layout: concat).",
            f"nothing, if that is wanted; {fix} from each other.",
        )


@check(
    "note",
    "Under the finetuning loader the documents of one full row share a sequence_id and attend to each other, unlike name: text with eos_token_id.",
)
def documents_unseparated(loader: Loader, stream: StreamInMix) -> Findings:
    fix = "layout: document with packing_ratio masks documents"
    yield from _joined(loader, stream, "input_ids", fix)


@check(
    "note",
    "Without eos_token_id or bos_token_id the loader of mdsmix does not know where a document of a full row ends, so they attend to each other.",
)
def documents_unmarked(loader: Loader, stream: StreamInMix) -> Findings:
    is_marked = any(loader.dataset.get(f"{word}_token_id") is not None for word in ("eos", "bos"))
    if loader.is_own and not is_marked:
        fix = "train_loader.dataset.eos_token_id masks documents that end in EOS"
        yield from _joined(loader, stream, "tokens", fix)


@check(
    "warning",
    "The batches say where the documents of a packed row begin, and this model does not look: its attention crosses from one to the next.",
)
def documents_unmasked(mix: Mix) -> Findings:
    packed = [s for s in mix.train.streams if layout_of(s.columns) == PACKED]
    model = mix.yaml.at("model", "name")
    masks = model == "mpt_causal_lm" and mix.yaml.at(*USES_SEQUENCE_ID)
    if packed and model in ("mpt_causal_lm", "hf_causal_lm") and not masks:
        yield Finding(
            f"{{streams}}: packed rows, and the model is {model} without {'.'.join(USES_SEQUENCE_ID)}.",
            f"set {'.'.join(USES_SEQUENCE_ID)}: true of an mpt_causal_lm; of other models only a training loop of your own can mask "
            "documents (mdsmix.load.document_mask); or leave it, if that is wanted.",
            names(packed),
        )
