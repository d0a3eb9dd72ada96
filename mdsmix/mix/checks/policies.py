"""Whether streams that were converted under a policy are trained under the same one."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.encode.targets import Targets
from mdsmix.errors import RecipeError
from mdsmix.kinds import kind_of
from mdsmix.mix.checks.columns import shape
from mdsmix.mix.findings import Hit, check, does, names, spelled
from mdsmix.mix.streams import Loader, Mix, Stream
from mdsmix.shards.manifest import Encoding

WIDTH = {"none": 0, "length": 1, "all": 2, "last": 0}


def _encodings(mix: Mix, has_targets: bool) -> Iterator[tuple[Loader, Stream, Encoding]]:
    for loader in mix.loaders:
        for stream in () if loader.is_text else loader.streams:
            if stream.card and kind_of(stream.card.encoding).has_targets is has_targets:
                yield loader, stream, stream.card.encoding


@check(
    "format-differs",
    "error",
    "The two formats cut and filter samples differently, so samples may be left without anything to train on.",
)
def format_differs(mix: Mix) -> Iterator[Hit]:
    for loader, stream, encoding in _encodings(mix, has_targets=True):
        wanted = loader.dataset.get("decoder_only_format")
        if isinstance(wanted, bool) and wanted != encoding.decoder_only_format:
            yield Hit(
                [stream.name],
                f"{stream.name} was converted under decoder_only_format: {spelled(encoding.decoder_only_format)}, and "
                f"{loader.label} says {spelled(wanted)}.",
                "convert the stream again, or train it in the format that it was converted for.",
            )


@check(
    "format-pretraining",
    "error",
    "The encoder would see one token of every pretraining sample, and the loss would mean nothing.",
)
def format_pretraining(mix: Mix) -> Iterator[Hit]:
    for loader, stream, _ in _encodings(mix, has_targets=False):
        if loader.dataset.get("decoder_only_format") is False:
            yield Hit(
                [stream.name],
                f"{stream.name} is pretraining data, and {loader.label} says decoder_only_format: false.",
                "set decoder_only_format: true, or train the stream with the text loader.",
            )


@check(
    "targets-narrower",
    "error",
    "A sample that only the other policy could train on is left with nothing, and fails in mid-training (ValueError).",
)
def targets_narrower(mix: Mix) -> Iterator[Hit]:
    yield from _targets(mix, narrower=True)


@check(
    "targets-wider",
    "warning",
    "Samples that only this policy could train on were dropped when converting, so they are missing.",
)
def targets_wider(mix: Mix) -> Iterator[Hit]:
    yield from _targets(mix, narrower=False)


def _targets(mix: Mix, narrower: bool) -> Iterator[Hit]:
    for loader, stream, encoding in _encodings(mix, has_targets=True):
        made = (encoding.target_prompts, encoding.target_responses)
        if made != loader.targets and _is_narrower(loader.targets, made) == narrower:
            yield Hit(
                [stream.name],
                f"{stream.name} was converted for the targets {'/'.join(made)}, and {loader.label} trains {'/'.join(loader.targets)}.",
                "convert the stream again with the targets of the run, or set target_prompts and target_responses to the stream's.",
            )


def _is_narrower(wanted: tuple[str, str], made: tuple[str, str]) -> bool:
    """Whether something that `made` trains is not trained by `wanted`."""
    return any(_width(w) < _width(m) for w, m in zip(wanted, made, strict=True))


def _width(policy: str) -> float:
    kind, _, cutoff = policy.partition(">=")
    return WIDTH.get(kind, 0) + (1 / int(cutoff) if cutoff.isdigit() and int(cutoff) else 0)


@check(
    "targets-compact",
    "error",
    "Compact columns hold a whole conversation as one prompt and its last response: other policies would train on what is not theirs.",
)
def targets_compact(mix: Mix) -> Iterator[Hit]:
    for loader, stream, encoding in _encodings(mix, has_targets=True):
        if encoding.compact and loader.targets != ("none", "last"):
            yield Hit(
                [stream.name],
                f"{stream.name} was converted with columns: compact, and {loader.label} trains {'/'.join(loader.targets)}.",
                "convert the stream again with columns: turns.",
            )


@check(
    "targets-invalid",
    "error",
    "LLM-Foundry refuses the loader's section.",
)
def targets_invalid(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if loader.name != "finetuning":
            continue
        decoder_only = loader.dataset.get("decoder_only_format")
        if not isinstance(decoder_only, bool):
            fix = "set it to true for a causal model, to false for an encoder-decoder."
            yield Hit(
                [],
                f"decoder_only_format of {{loader}} is {spelled(decoder_only)}.",
                fix,
                loader.label,
            )
        prompts, responses = loader.targets
        try:
            Targets(
                max_seq_len=1,
                target_prompts=prompts,
                target_responses=responses,
                decoder_only_format=decoder_only is not False,
            )
        except RecipeError as error:
            problem, _, fix = str(error).partition("; ")
            yield Hit([], f"{{loader}}: {problem}.", fix, loader.label)


@check(
    "packing-invalid",
    "error",
    "LLM-Foundry refuses the loader's section.",
)
def packing_invalid(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if loader.name != "finetuning":
            continue
        ratio = loader.dataset.get("packing_ratio")
        problem = _packing_problem(loader, ratio)
        if problem:
            yield Hit(
                [],
                f"packing_ratio of {{loader}} is {spelled(ratio)}, {problem}.",
                "set it to null, auto or a number of at least 1.",
                loader.label,
            )


def _packing_problem(loader: Loader, ratio: object) -> str | None:
    if ratio is None:
        kept = loader.dataset.get("max_leftover_bins_to_keep")
        return f"and max_leftover_bins_to_keep: {kept} needs one" if kept is not None else None
    if ratio != "auto" and (isinstance(ratio, bool) or not isinstance(ratio, (int, float))):
        return "which is neither a number nor auto"
    if isinstance(ratio, (int, float)) and ratio < 1:
        return "and a packed row holds at least one sample"
    if ratio != 1 and loader.dataset.get("decoder_only_format") is False:
        return "and packing needs decoder_only_format: true"
    return None


@check(
    "documents-unseparated",
    "note",
    "Under the finetuning loader the documents of one full row share a sequence_id and attend to each other, unlike name: text with eos_token_id.",
)
def documents_unseparated(mix: Mix) -> Iterator[Hit]:
    joined = [
        stream
        for _, stream, encoding in _encodings(mix, has_targets=False)
        if encoding.layout == "concat" and shape(stream, "finetuning")
    ]
    if joined:
        yield Hit(
            names(joined),
            f"{', '.join(names(joined))} {does(joined, 'is', 'are')} pretraining text in full rows (layout: concat).",
            "nothing, if that is wanted; layout: document with packing_ratio masks documents from each other.",
        )
