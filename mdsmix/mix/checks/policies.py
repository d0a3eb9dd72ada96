"""Whether streams that were converted under a policy are trained under the same one."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.encode.labels import Targets
from mdsmix.kinds import kind_of
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.checks.columns import shape
from mdsmix.mix.streams import Loader, Mix, StreamInMix, listed, names
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import PACKED, layout_of
from mdsmix.training.findings import Finding, check, check_streams
from mdsmix.training.loader_keys import OWN
from mdsmix.words import does, spelled

USES_SEQUENCE_ID = ("model", "attn_config", "attn_uses_sequence_id")
"How a config of LLM-Foundry's MPT says that documents do not see each other; its models of transformers cannot be told."


def _encoding(loader: Loader, stream: StreamInMix, has_targets: bool) -> Encoding | None:
    """How the stream was converted, if the finetuning loader reads it and policies decide what of it is trained, or do not."""
    manifest = stream.trusted_manifest
    if loader.is_text or not manifest:
        return None
    encoding = manifest.encoding
    return encoding if kind_of(encoding).has_targets is has_targets else None


@check_streams(
    "error",
    "The two formats cut and filter samples differently, so samples may be left without anything to train on.",
)
def format_differs(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    encoding = _encoding(loader, stream, has_targets=True)
    wanted = loader.dataset.get("decoder_only_format")
    if encoding and isinstance(wanted, bool) and wanted != encoding.decoder_only_format:
        yield Finding(
            f"{stream.name} was converted under decoder_only_format: {spelled(encoding.decoder_only_format)}, and "
            f"{{loader}} says {spelled(wanted)}.",
            "convert the stream again, or train it in the format that it was converted for.",
        )


@check_streams(
    "error",
    "The encoder would see one token of every pretraining sample, and the loss would mean nothing.",
)
def format_pretraining(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    is_plain = _encoding(loader, stream, has_targets=False) is not None
    if is_plain and loader.dataset.get("decoder_only_format") is False:
        yield Finding(
            f"{stream.name} is pretraining data, and {{loader}} says decoder_only_format: false.",
            "set decoder_only_format: true, or train the stream with the text loader.",
        )


@check_streams(
    "error",
    "A sample that only the other policy could train on is left with nothing, and fails in mid-training (ValueError).",
)
def targets_narrower(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    yield from _targets(loader, stream, narrower=True)


@check_streams(
    "warning",
    "Samples that only this policy could train on were dropped when converting, so they are missing.",
)
def targets_wider(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    yield from _targets(loader, stream, narrower=False)


def _targets(loader: Loader, stream: StreamInMix, narrower: bool) -> Iterator[Finding]:
    encoding = _encoding(loader, stream, has_targets=True)
    wanted = loader.target_policies
    if not encoding or not wanted:
        return
    made = targets_of(encoding)
    if encoding.pack:
        return  # targets-packed
    if loader.targets != _words(made) and _is_narrower(wanted, made) == narrower:
        yield Finding(
            f"{stream.name} was converted for the targets {'/'.join(_words(made))}, and {{loader}} trains {'/'.join(loader.targets)}.",
            "convert the stream again with the targets of the run, or set target_prompts and target_responses to the stream's.",
        )


def _words(targets: Targets) -> tuple[str, str]:
    return targets.target_prompts, targets.target_responses


def _is_narrower(wanted: Targets, made: Targets) -> bool:
    """Whether something that `made` trains is not trained by `wanted`. No prompt is empty, so `all` is length>=1."""
    prompts = max(1, wanted.least_trained_prompt) > max(1, made.least_trained_prompt)
    return prompts or (wanted.target_responses, made.target_responses) == ("last", "all")


@check_streams(
    "error",
    "What a packed row trains was settled when it was made: the loader trains that, whatever its policies say.",
)
def targets_packed(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    encoding = _encoding(loader, stream, has_targets=True)
    if encoding and encoding.pack and loader.targets != _words(targets_of(encoding)):
        yield Finding(
            f"{stream.name} was packed for the targets {'/'.join(_words(targets_of(encoding)))}, and {{loader}} says {'/'.join(loader.targets)}.",
            "convert the stream again with the targets of the run, or set target_prompts and target_responses to the stream's.",
        )


@check_streams(
    "error",
    "Compact columns hold a whole conversation as one prompt and its last response: other policies would train on what is not theirs.",
)
def targets_compact(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    encoding = _encoding(loader, stream, has_targets=True)
    if encoding and encoding.compact and loader.targets != ("none", "last"):
        yield Finding(
            f"{stream.name} was converted with columns: compact, and {{loader}} trains {'/'.join(loader.targets)}.",
            "convert the stream again with columns: turns.",
        )


@check(
    "note",
    "Under the finetuning loader the documents of one full row share a sequence_id and attend to each other, unlike name: text with eos_token_id.",
)
def documents_unseparated(mix: Mix) -> Iterator[Finding]:
    encoded = (
        (stream, _encoding(loader, stream, has_targets=False))
        for loader in mix.loaders
        for stream in loader.streams
    )
    joined = [
        stream
        for stream, encoding in encoded
        if encoding and encoding.layout == "concat" and shape(stream, "finetuning")
    ]
    if joined:
        yield Finding(
            f"{listed(joined)} {does(joined, 'is', 'are')} pretraining text in full rows (layout: concat).",
            "nothing, if that is wanted; layout: document with packing_ratio masks documents from each other.",
            names(joined),
        )


@check(
    "note",
    "Without eos_token_id or bos_token_id the loader of mdsmix does not know where a document of a full row ends, so they attend to each other.",
)
def documents_unmarked(mix: Mix) -> Iterator[Finding]:
    unmarked = [
        loader
        for loader in mix.loaders
        if loader.is_own
        and all(loader.dataset.get(f"{w}_token_id") is None for w in ("eos", "bos"))
    ]
    encoded = (
        (stream, _encoding(loader, stream, has_targets=False))
        for loader in unmarked
        for stream in loader.streams
        if shape(stream, OWN) == "tokens"
    )
    joined = [s for s, encoding in encoded if encoding and encoding.layout == "concat"]
    if joined:
        yield Finding(
            f"{listed(joined)} {does(joined, 'is', 'are')} pretraining text in full rows (layout: concat).",
            "nothing, if that is wanted; train_loader.dataset.eos_token_id masks documents that end in EOS from each other.",
            names(joined),
        )


@check(
    "warning",
    "The batches say where the documents of a packed row begin, and this model does not look: its attention crosses from one to the next.",
)
def documents_unmasked(mix: Mix) -> Iterator[Finding]:
    packed = [s for s in mix.train.streams if layout_of(s.columns) == PACKED]
    model = mix.yaml.at("model", "name")
    masks = model == "mpt_causal_lm" and mix.yaml.at(*USES_SEQUENCE_ID)
    if packed and model in ("mpt_causal_lm", "hf_causal_lm") and not masks:
        yield Finding(
            f"{listed(packed)} {does(packed, 'is', 'are')} packed, and the model is {model}"
            + (f" without {'.'.join(USES_SEQUENCE_ID)}." if model == "mpt_causal_lm" else "."),
            f"set {'.'.join(USES_SEQUENCE_ID)}: true of an mpt_causal_lm; of other models only a training loop of your own can mask "
            "documents (mdsmix.load.document_mask); or leave it, if that is wanted.",
            names(packed),
        )
