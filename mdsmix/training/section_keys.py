"""Rules on the keys of a loader's section and on where its streams are kept on a training node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mdsmix.training.findings import Finding, Findings, check
from mdsmix.training.loader_keys import (
    DATASETS,
    LOADER_NEEDS,
    PASSED_TWICE,
    STREAM_KEYS,
    dataset_keys,
)
from mdsmix.training.sections import LoaderSection, StreamSection
from mdsmix.words import nearest, spelled


@check("error", "Nothing can be said of a loader that is not known here.")
def loader_unknown(loader: LoaderSection) -> Findings:
    if loader.name not in DATASETS:
        yield Finding(
            f"name of {{loader}} is {spelled(loader.section.get('name'))}, and mdsmix knows {', '.join(DATASETS)}.",
            "write name: text or name: finetuning, or name: mdsmix for a mix of both.",
        )


def _unread(
    section: str, given: Iterable[Any], known: Collection[str], streams: Sequence[str] = ()
) -> Findings:
    for key in sorted({*map(str, given)}.difference(known)):
        yield Finding(
            f"{section} has the key {key}, which is not read there.",
            f"leave it out, or write what was meant ({nearest(key, known) or 'no key is spelled like it'}).",
            streams,
        )


@check(
    "error",
    "The text loader drops keys that it does not know without a word: the setting has no effect.",
)
def key_dropped(loader: LoaderSection) -> Findings:
    if loader.is_text:
        given = loader.dataset.keys() - PASSED_TWICE
        yield from _unread("dataset of {loader}", given, dataset_keys(loader.name))


@check("error", "The loader is called with it and fails (TypeError).")
def key_rejected(loader: LoaderSection) -> Findings:
    known = loader.keys.keys() | (set() if loader.trains else {"label"})
    yield from _unread("{loader}", loader.section, known)
    given = loader.dataset.keys() & PASSED_TWICE if loader.is_text else loader.dataset
    if read := dataset_keys(loader.name):  # else loader-unknown
        yield from _unread("dataset of {loader}", given, read)
    for each in loader.stream_sections:
        yield from _unread(each.name, each.settings, STREAM_KEYS, [each.name])


@check("error", "LLM-Foundry refuses the loader's section.")
def key_missing(loader: LoaderSection) -> Findings:
    for key, example in LOADER_NEEDS.get(loader.name, {}).items():
        if loader.section.get(key) is None:
            yield Finding(f"{key} is missing in {{loader}}.", f"add {key}{example}.")


@check(
    "error",
    "A dataset is read from streams or from one remote/local; Streaming refuses both (ValueError).",
)
def streams_and_remote(loader: LoaderSection) -> Findings:
    if loader.dataset.get("streams") and (given := loader.own_places):
        said = " and ".join(given)
        yield Finding(f"dataset of {{loader}} has streams and {said}.", f"leave {said} out.")


@check(
    "error",
    "The finetuning loader wants local beside remote, and takes local alone for a Hugging Face dataset (KeyError).",
)
def remote_alone(loader: LoaderSection) -> Findings:
    given = loader.own_places
    if loader.name == "finetuning" and len(given) == 1 and not loader.dataset.get("streams"):
        yield Finding(
            f"dataset of {{loader}} has {given[0]} alone.", "write it as one stream under streams."
        )


@check("error", "There is nothing to read.")
def streams_none(loader: LoaderSection) -> Findings:
    if not loader.stream_sections:
        yield Finding(
            "{loader} reads no MDS stream.",
            "name streams under dataset.streams; in a recipe, at least one of split: train.",
        )


@check(
    "warning",
    "A stream without a split takes the dataset's, and cannot opt out with split: null.",
)
def split_inherited(loader: LoaderSection) -> Findings:
    split, streams = loader.dataset.get("split"), loader.dataset.get("streams")
    lacking = [n for n, s in (streams or {}).items() if split and not s.get("split")]
    if lacking:
        yield Finding(
            f"{{streams}}: no split, and dataset of {{loader}} has split: {split}.",
            "write the split at every stream and leave it out of the dataset.",
            [*map(str, lacking)],
        )


@check(
    "error",
    "Streaming refuses the folder (Reused local directory), or, through a symlink, mixes up two streams.",
)
def local_duplicate(loader: LoaderSection) -> Findings:
    seen: dict[str, str] = {}
    for stream in loader.stream_sections:
        folder, name = stream.cache_folder, stream.name
        if folder and (first := seen.setdefault(folder, name)) != name:
            yield Finding(
                f"{first} and {name} both have the local folder {folder}.",
                "give each stream a local folder of its own.",
                [first, name],
            )


@check(
    "warning",
    "Streaming caches it in the temporary folder and refuses that folder when the run starts again (FileExistsError).",
)
def local_unset(stream: StreamSection) -> Findings:
    if not stream.settings.get("local"):
        yield Finding("{streams}: no local folder.", "set local, in the recipe or for the stream.")


@check(
    "error",
    "To stay under the limit Streaming deletes shards, and of this stream they are the only copy.",
)
def cache_limit_local(loader: LoaderSection, stream: StreamSection) -> Findings:
    if (limit := loader.dataset.get("cache_limit")) and stream.is_only_copy:
        yield Finding(
            f"{{loader}} sets cache_limit: {limit}, and there is no remote but the local folder: {{streams}}.",
            "publish to a remote, or leave cache_limit out.",
        )
