"""Whether the values around the streams fit each other: lengths, workers, choices among Streaming's algorithms."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.mix.findings import Hit, check, names, spelled
from mdsmix.mix.foundry import LOADER_DEFAULTS, VALUES
from mdsmix.mix.streams import Mix, whole


@check("length-invalid", "error", "LLM-Foundry refuses the loader's section, or the run.")
def length_invalid(mix: Mix) -> Iterator[Hit]:
    for loader in () if mix.is_bare else mix.loaders:
        given = loader.dataset.get("max_seq_len")
        if (whole(given) or 0) < 2:
            yield Hit(
                [],
                f"dataset.max_seq_len of {{loader}} is {spelled(given)}.",
                'set max_seq_len: "${max_seq_len}".',
                loader.label,
            )


@check(
    "length-model",
    "error",
    "The model has fewer positions than a row has tokens, and fails at the first full row.",
)
def length_model(mix: Mix) -> Iterator[Hit]:
    model = whole(mix.section("model", "max_seq_len"))
    for loader in mix.loaders:
        if model and loader.max_seq_len and model < loader.max_seq_len:
            yield Hit(
                [],
                f"model.max_seq_len is {model}, and rows of {{loader}} have {loader.max_seq_len} tokens.",
                'write "${max_seq_len}" for both.',
                loader.label,
            )


@check(
    "length-differs",
    "warning",
    "Lengths that differ within one config are rarely meant: the model or the tokenizer is set for other rows than it gets.",
)
def length_differs(mix: Mix) -> Iterator[Hit]:
    length = mix.train.max_seq_len
    others = {
        "max_seq_len": mix.config.get("max_seq_len"),
        "model.max_seq_len": mix.section("model", "max_seq_len"),
        "tokenizer.kwargs.model_max_length": mix.section("tokenizer", "kwargs", "model_max_length"),
    }
    for key, value in others.items():
        if value is None or length is None or whole(value) == length:
            continue
        if key != "model.max_seq_len" or (whole(value) or length) > length:
            yield Hit(
                [],
                f"{key} is {value}, and max_seq_len of train_loader is {length}.",
                'write "${max_seq_len}" for both.',
            )


@check(
    "workers",
    "error",
    "torch's DataLoader refuses prefetching and persistent workers without workers, and LLM-Foundry asks for both by default.",
)
def workers(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if loader.section.get("num_workers") != 0:
            continue
        settings = LOADER_DEFAULTS | dict(loader.section)
        for key, right in (("prefetch_factor", None), ("persistent_workers", False)):
            if settings[key] != right:
                yield Hit(
                    [],
                    f"num_workers of {{loader}} is 0, and {key} is {spelled(settings[key])}.",
                    f"set {key}: {spelled(right)}, or num_workers to at least 1.",
                    loader.label,
                )


@check(
    "setting-value",
    "error",
    "Streaming knows no such value and refuses the loader (ValueError or KeyError).",
)
def setting_value(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for key, allowed in VALUES.items():
            value = loader.dataset.get(key)
            if value is not None and value not in allowed:
                yield Hit(
                    [],
                    f"{key} of {{loader}} is {spelled(value)}.",
                    f"set it to one of {', '.join(allowed)}.",
                    loader.label,
                )
        for key, least in (("sampling_granularity", 1), ("shuffle_seed", 0)):
            value = loader.dataset.get(key)
            if value is not None and (whole(value) is None or (whole(value) or 0) < least):
                yield Hit(
                    [],
                    f"{key} of {{loader}} is {spelled(value)}.",
                    f"set it to a whole number of at least {least}.",
                    loader.label,
                )


@check(
    "sequence-parallel",
    "error",
    "LLM-Foundry does not implement it (NotImplementedError).",
)
def sequence_parallel(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        value = whole(loader.dataset.get("seq_parallel_replication"))
        if value and value > 1:
            yield Hit(
                [],
                f"seq_parallel_replication of {{loader}} is {value}.",
                "leave it out.",
                loader.label,
            )


@check(
    "model-encoder",
    "error",
    "LLM-Foundry refuses an encoder-decoder model with the text loader.",
)
def model_encoder(mix: Mix) -> Iterator[Hit]:
    if mix.train.is_text and mix.section("model", "name") == "hf_t5":
        yield Hit(
            names(mix.train.streams),
            "model.name is hf_t5, and train_loader is text.",
            "train it with name: finetuning.",
        )
