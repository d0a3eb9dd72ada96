"""Whether every key of a loader's section is one that its loader reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mdsmix.mix.findings import Hit, check, spelled
from mdsmix.mix.foundry import (
    DATASET_KEYS,
    LOADER_KEYS,
    LOADER_NEEDS,
    PASSED_TWICE,
    STREAM_KEYS,
    nearest,
)
from mdsmix.mix.streams import Loader, Mix


@check("loader-unknown", "error", "Nothing can be said of a loader that is not known here.")
def loader_unknown(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if loader.name not in DATASET_KEYS:
            yield Hit(
                [],
                f"name of {{loader}} is {spelled(loader.section.get('name'))}, and mdsmix knows {' and '.join(sorted(DATASET_KEYS))}.",
                "write name: text or name: finetuning.",
                loader.label,
            )


@check(
    "key-dropped",
    "error",
    "The text loader drops keys that it does not know without a word: the setting has no effect.",
)
def key_dropped(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for key in _unknown(loader) if loader.is_text else ():
            if key not in PASSED_TWICE:
                yield Hit(
                    [],
                    f"the key {key} of dataset in {{loader}} is one that the text loader does not read.",
                    f"{nearest(key, DATASET_KEYS['text'])}.",
                    loader.label,
                )


@check(
    "key-rejected",
    "error",
    "The loader is called with it and fails (TypeError).",
)
def key_rejected(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        label = {"label"} if not loader.trains else set()
        for key in sorted(set(map(str, loader.section)) - LOADER_KEYS - label):
            yield Hit(
                [],
                f"the key {key} of {{loader}} is one that no loader takes.",
                f"{nearest(key, LOADER_KEYS)}.",
                loader.label,
            )
        for key in _unknown(loader):
            if not loader.is_text or key in PASSED_TWICE:
                fix = (
                    "leave it out: the loader passes it itself"
                    if key in PASSED_TWICE
                    else nearest(key, DATASET_KEYS["finetuning"])
                )
                yield Hit(
                    [],
                    f"the key {key} of dataset in {{loader}} is one that the {loader.name} loader does not take.",
                    f"{fix}.",
                    loader.label,
                )
        for stream in loader.streams:
            for key in sorted(set(map(str, stream.settings)) - STREAM_KEYS):
                yield Hit(
                    [stream.name],
                    f"{stream.name} has the key {key}, which a stream does not take.",
                    f"{nearest(key, STREAM_KEYS)}.",
                )


def _unknown(loader: Loader) -> list[str]:
    known = DATASET_KEYS.get(loader.name)
    return [] if known is None else sorted(set(map(str, loader.dataset)) - known)


@check("key-missing", "error", "LLM-Foundry refuses the loader's section.")
def key_missing(mix: Mix) -> Iterator[Hit]:
    for loader in () if mix.is_bare else mix.loaders:
        for key in LOADER_NEEDS.get(loader.name, ()):
            if loader.section.get(key) is None:
                yield Hit(
                    [],
                    f"{key} is missing in {{loader}}.",
                    f"add {key}{_example(key)}.",
                    loader.label,
                )


def _example(key: str) -> str:
    return {"drop_last": ": true", "num_workers": ": 8"}.get(key, "")


@check(
    "streams-and-remote",
    "error",
    "A dataset is read from streams or from one remote/local; Streaming refuses both (ValueError), and the finetuning loader "
    "takes local alone for a Hugging Face dataset (KeyError).",
)
def streams_and_remote(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        given = [k for k in ("remote", "local") if loader.dataset.get(k)]
        if loader.dataset.get("streams") and given:
            yield Hit(
                [],
                f"{loader.label}.dataset has streams and {' and '.join(given)}.",
                f"leave {' and '.join(given)} out.",
            )
        elif given == ["local"] and loader.name == "finetuning":
            yield Hit(
                [],
                f"{loader.label}.dataset has local and no remote.",
                "write it as one stream under streams.",
            )
        elif given == ["remote"] and loader.name == "finetuning":
            yield Hit(
                [],
                f"{loader.label}.dataset has remote and no local.",
                "add local, the folder that caches it.",
            )


@check("streams-none", "error", "There is nothing to read.")
def streams_none(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        if not loader.streams:
            yield Hit(
                [],
                f"{loader.label} reads no MDS stream.",
                "name streams under dataset.streams; in a recipe, at least one of split: train.",
            )


@check(
    "split-inherited",
    "warning",
    "A stream without a split takes the dataset's, and cannot opt out with split: null.",
)
def split_inherited(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        sections = loader.dataset.get("streams")
        for name, section in sections.items() if isinstance(sections, Mapping) else ():
            if (
                loader.dataset.get("split")
                and isinstance(section, Mapping)
                and not section.get("split")
            ):
                yield Hit(
                    [str(name)],
                    f"{name} has no split, and {loader.label}.dataset has split: {loader.dataset['split']}.",
                    "write the split at every stream and leave it out of the dataset.",
                )


@check(
    "eval-label",
    "error",
    "LLM-Foundry refuses a list of evaluations without labels, or two of one label.",
)
def eval_label(mix: Mix) -> Iterator[Hit]:
    entries = mix.config.get("eval_loader")
    labels = (
        [e.get("label") for e in entries if isinstance(e, Mapping)]
        if isinstance(entries, list)
        else []
    )
    for number, label in enumerate(labels):
        if label is None or label in labels[:number]:
            yield Hit(
                [],
                f"entry {number} of eval_loader has the label {label}.",
                "give every entry a label of its own.",
            )
