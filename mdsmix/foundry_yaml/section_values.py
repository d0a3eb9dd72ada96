"""Rules on the values of a loader's section: whether LLM-Foundry and Streaming take them, and they
fit each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.findings import CHECKS, Finding, Findings, check, refusal_message
from mdsmix.foundry_yaml.loader_keys import (
    COUNT_UNITS,
    DATASETS,
    EXTRA_LOADERS,
    LOADER_DEFAULTS,
    NOT_NULL,
    TARGET_KEYS,
    describe_expected,
    is_number,
    parse_quantity,
)
from mdsmix.foundry_yaml.section_keys import list_sections
from mdsmix.foundry_yaml.training_yaml import LoaderSection, StreamSection
from mdsmix.recipe.rules import target_contradictions
from mdsmix.typed import brief
from mdsmix.words import spelled

REFUSED = "LLM-Foundry refuses the loader's section."


@check("error", "LLM-Foundry refuses the loader's section, or the run.")
def length_invalid(loader: LoaderSection) -> Findings:
    if (loader.max_seq_len or 0) < 2:
        yield Finding(
            f"dataset.max_seq_len of {{loader}} is {spelled(loader.dataset.get('max_seq_len'))}.",
            'set max_seq_len: "${max_seq_len}".',
        )


@check(
    "error",
    "The collator divides a row evenly between two answers, and fails at the first batch (ValueError).",
)
def length_odd(loader: LoaderSection) -> Findings:
    other, length = EXTRA_LOADERS.get(loader.name), loader.max_seq_len or 0
    if other and (fault := other.fault(length)):
        yield Finding(
            f"dataset.max_seq_len of {{loader}} is {length}, and {fault}.",
            "choose an even number, and convert the streams for it.",
        )


@check(
    "error",
    "The loader refuses such a value (ValueError, KeyError or TypeError), or takes it for another.",
)
def setting_value(loader: LoaderSection) -> Findings:
    """Unknown keys have a rule of their own, and null is the default of a dataset's and a
    stream's.
    """
    for whose, section, keys in list_sections(loader):
        for key, value in section.items():
            is_default = value is None and section is not loader.section
            if not is_default and (meant := describe_expected(keys.get(key, Any), value)):
                yield Finding(f"{whose}: {key} is {brief(value)}.", f"set it to {meant}")


@check("error", "LLM-Foundry or Streaming fails on null where it expects a value.")
def setting_null(loader: LoaderSection) -> Findings:
    known = DATASETS.get(loader.name, {}).keys()
    for key in sorted(NOT_NULL & known & loader.dataset.keys()):
        if loader.dataset[key] is None and not loader.is_own:
            yield Finding(
                f"dataset of {{loader}} has {key}: null.",
                "leave the key out, which is its default.",
            )


@check(
    "error",
    "The finetuning loader refuses a local folder in which the split is not a folder of that very name (ValueError).",
)
def split_nested(loader: LoaderSection) -> Findings:
    """Find a split of a dataset's own local folder that is a path, such as `v1/train` or
    `train/`.
    """
    split = str(loader.dataset.get("split") or "")
    remote, local = (loader.dataset.get(key) for key in ("remote", "local"))
    is_local = bool(local) and remote in (None, local)
    if loader.name == "finetuning" and is_local and "/" in split:
        yield Finding(
            f"dataset of {{loader}} has local: {local} and split: {split}.",
            "write the dataset as one stream under streams, or move the path into local and keep the last name as split.",
        )


@check(
    "error",
    "torch's DataLoader refuses prefetching, persistent workers and a timeout without workers, and LLM-Foundry asks for the first two by default.",
)
def workers(loader: LoaderSection) -> Findings:
    keys = ("prefetch_factor", "persistent_workers")
    ahead, stay = (loader.section.get(key, LOADER_DEFAULTS[key]) for key in keys)
    has_none = loader.section.get("num_workers") == 0 and not loader.is_own
    timeout = loader.section.get("timeout", LOADER_DEFAULTS["timeout"])
    if has_none and timeout:
        yield Finding(
            f"num_workers of {{loader}} is 0 and timeout is {spelled(timeout)}.",
            "leave timeout out, or set num_workers to at least 1.",
        )
    if has_none and (ahead is not None or stay):
        yield Finding(
            f"num_workers of {{loader}} is 0, prefetch_factor is {spelled(ahead)} and persistent_workers is {spelled(stay)}.",
            "set prefetch_factor: null and persistent_workers: false, or num_workers to at least 1.",
        )


@check("error", REFUSED)
def targets_invalid(loader: LoaderSection) -> Findings:
    decoder_only = loader.decoder_only_format
    is_default = decoder_only is None and loader.is_own
    if loader.reads_turns and not is_default and not isinstance(decoder_only, bool):
        yield Finding(
            f"decoder_only_format of {{loader}} is {spelled(decoder_only)}.",
            "set it to true for a causal model, to false for an encoder-decoder.",
        )
    if loader.reads_turns or TARGET_KEYS & set(loader.dataset):
        for sentence in target_contradictions(*loader.targets, decoder_only is not False):
            problem, _, fix = sentence.partition("; ")
            yield Finding(f"{{loader}}: {problem}.", fix)


@check("error", REFUSED)
def packing_invalid(loader: LoaderSection) -> Findings:
    ratio, kept = (loader.dataset.get(k) for k in ("packing_ratio", "max_leftover_bins_to_keep"))
    if not loader.reads_turns:
        return
    if ratio is None and kept is not None:
        yield Finding(
            f"{{loader}} sets max_leftover_bins_to_keep: {kept} and no packing_ratio.",
            "leave it out, or set packing_ratio.",
        )
    if ratio not in (None, 1) and loader.decoder_only_format is False:
        yield Finding(
            f"{{loader}} sets packing_ratio: {ratio} under decoder_only_format: false.",
            "leave it out, or set decoder_only_format: true.",
        )


@check(
    "warning",
    "A run that is resumed goes on from a checkpoint of any data, and what differs stands in its log alone.",
    "changed-accepted",
)
@check(
    "error",
    "The loader of mdsmix would run whatever code a shard of pickles holds, so it refuses them.",
    "unsafe-types",
)
def own_settings(loader: LoaderSection) -> Findings:
    if loader.is_own and loader.dataset.get("allow_unsafe_types"):
        yield Finding(
            "{loader} sets allow_unsafe_types.",
            "take it out, and write such a stream again in another encoding.",
            id="unsafe-types",
        )
    if loader.is_own and loader.section.get("accept_changed") is True:
        yield Finding(
            "{loader} sets accept_changed: true.",
            "take it out after the one start that it is meant for.",
            id="changed-accepted",
        )


@check("error", REFUSED)
def separators_both(loader: LoaderSection) -> Findings:
    if all(loader.dataset.get(f"{word}_token_id") is not None for word in ("eos", "bos")):
        yield Finding("eos_token_id and bos_token_id are both set in {loader}.", "keep one.")


SEPARATORS = "LLM-Foundry refuses separators that are not the tokenizer's."


def separator_differs(loader: LoaderSection, own: Mapping[str, int | None]) -> Findings:
    """`eos_token_id` and `bos_token_id` must be those of the tokenizer. The rule is for callers
    that know the tokenizer.

    Args:
        own: the tokenizer's ids, as "eos" and "bos"; empty where it is not known.
    """
    for word in ("eos", "bos"):
        token = loader.dataset.get(f"{word}_token_id")
        allowed = loader.dataset.get(f"override_{word}_token_id_mismatch_error")
        right = own.get(word, token)
        if token is not None and token != right and not allowed:
            yield Finding(
                f"{word}_token_id of {{loader}} is {token}, and the tokenizer's is {spelled(right)}.",
                f"set {word}_token_id: {spelled(right)}.",
                why=SEPARATORS,
            )


@check("error", "Streaming refuses the streams (TypeError or ValueError).")
def weights_number(stream: StreamSection) -> Findings:
    for key, value in stream.weight.items():
        if not is_number(value) or value < 0 or (key == "choose" and value != int(value)):
            yield Finding(
                f"{key} of {{streams}} is {value!r}.",
                "write a number of at least 0, without quotes; a whole one for choose.",
            )


@check(
    "error", "Streaming fails where no stream has a sample to draw (ValueError).", "weights-none"
)
@check("error", "Streaming refuses the streams (ValueError).", "weights-epoch-size")
@check("error", "Streaming refuses the streams (ValueError).", "weights-scheme")
def weights_together(loader: LoaderSection) -> Findings:
    streams, size = loader.stream_sections, loader.dataset.get("epoch_size")
    for stream in streams:
        if len(stream.weight) > 1:
            yield Finding(
                f"{stream.name} has {stream.weighted}.",
                "keep one of them.",
                [stream.name],
                "weights-scheme",
            )
    zeros = [stream.name for stream in streams if [*stream.weight.values()] == [0]]
    if zeros and len(zeros) == len(streams):
        yield Finding(
            "the weights draw no sample of any stream of {loader}: {streams}.",
            "give at least one stream a weight above 0.",
            zeros,
            "weights-none",
        )
    relative = [s.name for s in streams if "proportion" in s.weight]
    if relative and len(relative) < len(streams):
        yield Finding(
            f"of the {len(streams)} streams of {{loader}} some are weighted by proportion, and others are not: {{streams}}.",
            "give every stream a proportion, or none.",
            relative,
            "weights-scheme",
        )
    if size and (parse_quantity(size, COUNT_UNITS) or -1) < 0:
        yield Finding(
            f"epoch_size of {{loader}} is {size!r}.",
            "write a number of samples, for example 64M.",
            id="weights-epoch-size",
        )
    absolute = [s.name for s in streams if {"repeat", "choose"} & s.weight.keys()]
    if size and absolute:
        yield Finding(
            f"{{loader}} sets epoch_size: {size}, and repeat or choose, which decide it too, stand at {{streams}}.",
            "leave epoch_size out, or weight all streams by proportion.",
            absolute,
            "weights-epoch-size",
        )


def refuse_broken_rules(loader: LoaderSection, but: Collection[str]) -> None:
    """RecipeError on the first rule that the section breaks, those named in `but` left out."""
    for each in CHECKS.values():
        if each.of.endswith("Section") and each.severity == "error" and each.id not in but:
            for finding in each.found(loader.stream_sections, loader=loader):
                raise RecipeError(refusal_message(finding, loader))
