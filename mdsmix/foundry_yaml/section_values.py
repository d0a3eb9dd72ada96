"""Rules on the values of a loader's section: LLM-Foundry and Streaming must accept the values, and
the values must fit each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdsmix.foundry_yaml.extra_loaders import DATASET_KEYS_OF, EXTRA_LOADERS
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.foundry_yaml.loader_keys import (
    COUNT_UNITS,
    LOADER_DEFAULTS,
    NOT_NULL,
    TARGET_KEYS,
    describe_expected,
    is_number,
    parse_quantity,
)
from mdsmix.foundry_yaml.section_keys import list_sections
from mdsmix.foundry_yaml.training_yaml import LoaderSection, StreamSection
from mdsmix.messages import format_yaml_value
from mdsmix.recipe.rules import find_target_contradictions
from mdsmix.schema import describe_value

CHECKS = CheckList()

REFUSED = "LLM-Foundry refuses the loader's section."


@CHECKS.loader_section("error", "LLM-Foundry refuses the loader's section, or the run.")
def length_invalid(loader: LoaderSection) -> Findings:
    """Find a max_seq_len that is missing, not a whole number, or less than 2."""
    if (loader.max_seq_len or 0) < 2:
        yield Finding(
            "dataset.max_seq_len of {loader} is "
            f"{format_yaml_value(loader.dataset.get('max_seq_len'))}, not a whole number of at "
            "least 2.",
            'set max_seq_len: "${max_seq_len}", and max_seq_len at the top level.',
        )


@CHECKS.loader_section(
    "error",
    "The collator divides a row evenly between two answers, and fails at the first batch "
    "(ValueError).",
)
def length_odd(loader: LoaderSection) -> Findings:
    """Find a max_seq_len that a loader of another library (`ExtraLoader`) refuses."""
    extra_loader = EXTRA_LOADERS.get(loader.name)
    length = loader.max_seq_len or 0
    fault = extra_loader.fault(length) if extra_loader else ""
    if fault:
        yield Finding(
            f"dataset.max_seq_len of {{loader}} is {length}, and {fault}.",
            "set max_seq_len to an even number, and convert the streams for it.",
        )


@CHECKS.loader_section(
    "error",
    "The loader refuses the value (ValueError, KeyError or TypeError), or reads another value.",
)
def setting_value(loader: LoaderSection) -> Findings:
    """Find keys whose value is not accepted. `keys_unread` finds unknown keys, and `setting_null`
    finds keys of a dataset that must not be null.
    """
    for section in list_sections(loader):
        for key, value in section.settings.items():
            # In a dataset or stream null means the default; `setting_null` knows the exceptions.
            is_default = value is None and section.settings is not loader.section
            if is_default:
                continue
            expected = describe_expected(section.allowed.get(key, Any), value)
            if expected:
                yield Finding(
                    f"{section.name}: {key} is {describe_value(value)}.", f"set it to {expected}"
                )


@CHECKS.loader_section("error", "LLM-Foundry or Streaming fails on null for this key.")
def setting_null(loader: LoaderSection) -> Findings:
    """Find keys of a dataset that are null but must not be (NOT_NULL)."""
    keys_of_loader = DATASET_KEYS_OF.get(loader.name, {}).keys()
    # The loader of mdsmix reads null as the default.
    for key in sorted(NOT_NULL & keys_of_loader & loader.dataset.keys()):
        if loader.dataset[key] is None and not loader.is_mdsmix:
            yield Finding(
                f"dataset of {{loader}} has {key}: null.",
                f"remove {key}, so that it has its default.",
            )


@CHECKS.loader_section(
    "error",
    "The finetuning loader refuses a local folder if its split is not a folder of exactly that "
    "name (ValueError).",
)
def split_nested(loader: LoaderSection) -> Findings:
    """Find a split that is a path, such as `v1/train` or `train/`, if the dataset itself names a
    local folder. The finetuning loader accepts only the name of one folder there.
    """
    split = str(loader.dataset.get("split") or "")
    remote = loader.dataset.get("remote")
    local = loader.dataset.get("local")
    # A remote that equals local is no remote: the data is in the local folder.
    is_local = bool(local) and remote in (None, local)
    if loader.name == "finetuning" and is_local and "/" in split:
        yield Finding(
            f"dataset of {{loader}} has local: {local} and the path {split} as split, which may "
            "only be the name of one folder.",
            "write the dataset as one stream under streams, or move the path into local and keep "
            "only its last folder as split.",
        )


@CHECKS.loader_section(
    "error",
    "torch's DataLoader refuses prefetching, persistent workers and a timeout without workers, and "
    "LLM-Foundry sets the first two by default.",
)
def workers(loader: LoaderSection) -> Findings:
    """Find settings of worker processes (prefetch_factor, persistent_workers, timeout) in a
    loader's section with num_workers: 0.
    """
    if loader.section.get("num_workers") != 0 or loader.is_mdsmix:
        return  # without workers the loader of mdsmix leaves these settings out itself
    settings = LOADER_DEFAULTS | dict(loader.section)
    prefetch = settings["prefetch_factor"]
    persistent = settings["persistent_workers"]
    timeout = settings["timeout"]
    if timeout:
        yield Finding(
            f"num_workers of {{loader}} is 0, but timeout is {format_yaml_value(timeout)}.",
            "remove timeout, or set num_workers to at least 1.",
        )
    if prefetch is not None or persistent:
        yield Finding(
            f"num_workers of {{loader}} is 0, but prefetch_factor is "
            f"{format_yaml_value(prefetch)} and persistent_workers is "
            f"{format_yaml_value(persistent)}.",
            "set prefetch_factor: null and persistent_workers: false, or num_workers to at least "
            "1.",
        )


@CHECKS.loader_section("error", REFUSED)
def targets_invalid(loader: LoaderSection) -> Findings:
    """Find target policies that LLM-Foundry refuses or that contradict each other."""
    decoder_only = loader.decoder_only_format
    is_default = decoder_only is None and loader.is_mdsmix
    if loader.reads_turns and not is_default and not isinstance(decoder_only, bool):
        yield Finding(
            f"decoder_only_format of {{loader}} is {format_yaml_value(decoder_only)}.",
            "set decoder_only_format to true for a causal model, to false for an encoder-decoder.",
        )
    if loader.reads_turns or TARGET_KEYS & set(loader.dataset):
        contradictions = find_target_contradictions(
            *loader.targets, decoder_only_format=decoder_only is not False
        )
        for contradiction in contradictions:
            # A contradiction is written as `problem; fix`.
            problem, _, fix = contradiction.partition("; ")
            yield Finding(f"{{loader}}: {problem}.", fix)


@CHECKS.loader_section("error", REFUSED)
def packing_invalid(loader: LoaderSection) -> Findings:
    """Find settings of packing that are refused: max_leftover_bins_to_keep without packing_ratio,
    or a packing_ratio for an encoder-decoder (decoder_only_format: false).
    """
    if not loader.reads_turns:
        return
    ratio = loader.dataset.get("packing_ratio")
    leftover_bins = loader.dataset.get("max_leftover_bins_to_keep")
    if ratio is None and leftover_bins is not None:
        yield Finding(
            f"{{loader}} sets max_leftover_bins_to_keep: {leftover_bins}, but no packing_ratio.",
            "remove max_leftover_bins_to_keep, or set packing_ratio.",
        )
    if ratio not in (None, 1) and loader.decoder_only_format is False:
        yield Finding(
            f"{{loader}} sets packing_ratio: {ratio}, but also decoder_only_format: false.",
            "remove packing_ratio, or set decoder_only_format: true.",
        )


@CHECKS.loader_section(
    "warning",
    "A run resumes from a checkpoint of any data, and only its log shows the differences.",
    "changed-accepted",
)
@CHECKS.loader_section(
    "error",
    "The loader of mdsmix would run any code in a shard of pickles, so it refuses them.",
    "unsafe-types",
)
def own_settings(loader: LoaderSection) -> Findings:
    """Find two settings that only the loader `mdsmix` has: allow_unsafe_types, which it refuses,
    and accept_changed, which is worth a warning.
    """
    if loader.is_mdsmix and loader.dataset.get("allow_unsafe_types"):
        yield Finding(
            "{loader} sets allow_unsafe_types.",
            "remove allow_unsafe_types, and write the streams that contain pickles again in "
            "another encoding.",
            id="unsafe-types",
        )
    if loader.is_mdsmix and loader.section.get("accept_changed") is True:
        yield Finding(
            "{loader} sets accept_changed: true.",
            "accept_changed lets one start go on with changed data. Remove it after that start.",
            id="changed-accepted",
        )


@CHECKS.loader_section("error", REFUSED)
def separators_both(loader: LoaderSection) -> Findings:
    """Find a loader with both eos_token_id and bos_token_id."""
    eos = loader.dataset.get("eos_token_id")
    bos = loader.dataset.get("bos_token_id")
    if eos is not None and bos is not None:
        yield Finding(
            "eos_token_id and bos_token_id are both set in {loader}.", "remove one of the two."
        )


SEPARATORS = "LLM-Foundry refuses separators that are not the tokenizer's."


def find_wrong_separators(
    loader: LoaderSection, tokenizer_ids: Mapping[str, int | None]
) -> Findings:
    """Find an `eos_token_id` or `bos_token_id` that differs from the tokenizer's id. Only callers
    that know the tokenizer can use this rule.

    Args:
        loader: the loader's section.
        tokenizer_ids: the tokenizer's EOS and BOS, under the keys "eos" and "bos"; empty if the
            tokenizer is not known.
    """
    for word in ("eos", "bos"):
        token = loader.dataset.get(f"{word}_token_id")
        # With this key LLM-Foundry accepts an id that is not the tokenizer's.
        is_allowed = loader.dataset.get(f"override_{word}_token_id_mismatch_error")
        tokenizer_id = tokenizer_ids.get(word, token)
        if token is not None and token != tokenizer_id and not is_allowed:
            yield Finding(
                f"{word}_token_id of {{loader}} is {token}, but the tokenizer's is "
                f"{format_yaml_value(tokenizer_id)}.",
                f"set {word}_token_id: {format_yaml_value(tokenizer_id)}.",
                why=SEPARATORS,
            )


@CHECKS.stream_section("error", "Streaming refuses the streams (TypeError or ValueError).")
def weights_number(loader: LoaderSection, stream: StreamSection) -> Findings:
    """Find a weight that is not a number of at least 0, or a choose that is not whole."""
    for key, value in stream.weight.items():
        if not is_number(value) or value < 0 or (key == "choose" and value != int(value)):
            number = "a whole number" if key == "choose" else "a number"
            yield Finding(
                f"{key} of {{streams}} is {value!r}.",
                f"set {key} to {number} of at least 0, without quotes.",
            )


@CHECKS.loader_section("error", "Streaming refuses the streams (ValueError).")
def weights_scheme(loader: LoaderSection) -> Findings:
    """Find streams with several weights, and a proportion of only some streams."""
    streams = loader.stream_sections
    for stream in streams:
        if len(stream.weight) > 1:
            yield Finding(
                f"stream {stream.name} has more than one weight: {stream.weight_text}.",
                "keep one of them.",
                [stream.name],
            )
    relative = [stream.name for stream in streams if "proportion" in stream.weight]
    if relative and len(relative) < len(streams):
        yield Finding(
            f"only some of the {len(streams)} streams of {{loader}} are weighted by proportion: "
            "{streams}.",
            "give every stream a proportion, or none.",
            relative,
        )


@CHECKS.loader_section("error", "Streaming refuses the streams (ValueError).")
def weights_epoch_size(loader: LoaderSection) -> Findings:
    """Find an epoch_size that is not a number of samples, or that contradicts the weights."""
    size = loader.dataset.get("epoch_size")
    if not size:
        return
    quantity = parse_quantity(size, COUNT_UNITS)
    if quantity is None or quantity <= 0:
        yield Finding(
            f"epoch_size of {{loader}} is {size!r}, not a number of samples.",
            "write a number of samples, for example 64M.",
        )
    absolute = [
        stream.name
        for stream in loader.stream_sections
        if {"repeat", "choose"} & stream.weight.keys()
    ]
    if absolute:
        yield Finding(
            f"{{loader}} sets epoch_size: {size}, but repeat or choose of {{streams}} already "
            "decides how large an epoch is.",
            "remove epoch_size, or weight all streams by proportion.",
            absolute,
        )


@CHECKS.loader_section(
    "error", "Streaming fails if it can draw no sample of any stream (ValueError)."
)
def weights_none(loader: LoaderSection) -> Findings:
    """Find weights that are 0 for all streams."""
    streams = loader.stream_sections
    zeros = [stream.name for stream in streams if list(stream.weight.values()) == [0]]
    if zeros and len(zeros) == len(streams):
        yield Finding(
            "the weights draw no sample of any stream of {loader}: {streams}.",
            "give at least one stream a weight above 0.",
            zeros,
        )
