"""Rules on the keys of a loader's section and on where its streams are kept on a training node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mdsmix.foundry_yaml.findings import Finding, Findings, check
from mdsmix.foundry_yaml.loader_keys import DATASETS, LOADER_NEEDS, PASSED_TWICE, STREAM_KEYS, Types
from mdsmix.foundry_yaml.training_yaml import LoaderSection, Settings, StreamSection
from mdsmix.storage import sign_that_ends
from mdsmix.words import nearest, spelled


@check("error", "Nothing can be said of a loader that is not known here.")
def loader_unknown(loader: LoaderSection) -> Findings:
    if loader.name not in DATASETS:
        yield Finding(
            f"name of {{loader}} is {spelled(loader.section.get('name'))}, and mdsmix knows {', '.join(DATASETS)}.",
            "write name: text or name: finetuning, or name: mdsmix for a mix of both.",
        )


def list_sections(loader: LoaderSection) -> Iterator[tuple[str, Settings, Types]]:
    """The loader's section, its dataset and each of its streams: a phrase for it, its keys, and the
    keys that may stand there.
    """
    keys = loader.keys | {"label": Any} if loader.is_in_list else loader.keys
    yield "{loader}", loader.section, keys
    # Of a loader that is not known nothing can be said, and loader-unknown says so.
    yield (
        "dataset of {loader}",
        loader.dataset,
        DATASETS.get(loader.name) or dict.fromkeys(loader.dataset, Any),
    )
    for stream in loader.stream_sections:
        yield stream.name, stream.settings, STREAM_KEYS


@check("error", "The loader is called with it and fails (TypeError).", "key-rejected")
@check(
    "error",
    "The text loader drops keys that it does not know without a word: the setting has no effect.",
    "key-dropped",
)
def keys_unread(loader: LoaderSection) -> Findings:
    for where, section, known in list_sections(loader):
        for key in sorted({*map(str, section)}.difference(known)):
            is_dropped = loader.is_text and section is loader.dataset and key not in PASSED_TWICE
            near = nearest(key, known) or "no key is spelled like it"
            fix = f"leave it out, or write what was meant ({near})."
            if section is loader.section and key in DATASETS.get(loader.name, {}):
                fix = f"move it to dataset, where {key} is read, or leave it out."
            if section is loader.section and key == "label":
                fix = "leave it out, or write eval_loader as a list of one."
            yield Finding(
                f"{where} has the key {key}, which is not read there.",
                fix,
                id="key-dropped" if is_dropped else "key-rejected",
            )


@check("error", "LLM-Foundry refuses the loader's section.")
def key_missing(loader: LoaderSection) -> Findings:
    for key, example in LOADER_NEEDS.get(loader.name, {}).items():
        if loader.section.get(key) is None:
            yield Finding(f"{key} is missing in {{loader}}.", f"add {key}{example}.")


@check("error", "There is nothing to read.", "streams-none")
@check(
    "error",
    "The finetuning loader wants local beside remote, and takes local alone for a Hugging Face dataset (KeyError).",
    "remote-alone",
)
@check(
    "error",
    "A dataset is read from streams or from one remote/local; Streaming refuses both (ValueError).",
    "streams-and-remote",
)
def data_is_named(loader: LoaderSection) -> Findings:
    """The data must be named once, in a form that the loader takes."""
    given = " and ".join(loader.own_places)
    if loader.dataset.get("streams"):
        if given:
            yield Finding(
                f"dataset of {{loader}} has streams and {given}.",
                f"leave {given} out.",
                id="streams-and-remote",
            )
    elif not given:
        yield Finding(
            "{loader} reads no MDS stream.",
            "name streams under dataset.streams, or set those of a recipe into the config by `mdsmix render-yaml RECIPE --into`; a recipe needs "
            "a stream of split: train.",
            id="streams-none",
        )
    elif loader.name == "finetuning" and len(loader.own_places) == 1:
        yield Finding(
            f"dataset of {{loader}} has {given} alone.",
            "write it as one stream under streams.",
            id="remote-alone",
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
    "error",
    "Streaming takes what is behind `#` or `?` for no part of the key, and asks the store for another object.",
)
def remote_cut(stream: StreamSection) -> Findings:
    remote = "/".join(str(stream.settings.get(key) or "") for key in ("remote", "split"))
    if sign := sign_that_ends(remote):
        yield Finding(
            f"the remote of {{streams}}, {remote}, has a `{sign}`.",
            "publish the stream under a name without it.",
        )


@check("error", "Streaming reads no URL of this form, and fails when the run starts (ValueError).")
def remote_file(stream: StreamSection) -> Findings:
    remote = str(stream.settings.get("remote") or "")
    if remote.startswith("file:"):
        yield Finding(
            f"the remote of {{streams}} is {remote}.",
            "write the folder's path without file://.",
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
    limit = loader.dataset.get("cache_limit")
    if limit and not stream.settings.get("remote"):
        yield Finding(
            f"{{loader}} sets cache_limit: {limit}, and there is no remote but the local folder: {{streams}}.",
            "publish to a remote, or leave cache_limit out.",
        )
