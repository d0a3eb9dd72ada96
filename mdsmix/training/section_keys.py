"""Rules on the keys of a loader's section and on where its streams are kept on a training node."""

from __future__ import annotations

from mdsmix.training.findings import Finding, Findings, check
from mdsmix.training.loader_keys import (
    DATASET_KEYS,
    LOADER_NEEDS,
    PASSED_TWICE,
    STREAM_KEYS,
    names_of,
)
from mdsmix.training.sections import LoaderSection
from mdsmix.words import nearest, spelled


@check("error", "Nothing can be said of a loader that is not known here.")
def loader_unknown(loader: LoaderSection) -> Findings:
    if loader.name not in DATASET_KEYS:
        yield Finding(
            f"name of {{loader}} is {spelled(loader.section.get('name'))}, and mdsmix knows {', '.join(DATASET_KEYS)}.",
            "write name: text or name: finetuning, or name: mdsmix for a mix of both.",
        )


@check(
    "error",
    "The text loader drops keys that it does not know without a word: the setting has no effect.",
)
def key_dropped(loader: LoaderSection) -> Findings:
    for key in unknown_keys(loader) if loader.is_text else ():
        if key not in PASSED_TWICE:
            yield Finding(
                f"the key {key} of dataset in {{loader}} is one that the text loader does not read.",
                _instead(key, "text"),
            )


@check("error", "The loader is called with it and fails (TypeError).")
def key_rejected(loader: LoaderSection) -> Findings:
    known = names_of(loader.keys) | (set() if loader.trains else {"label"})
    for key in sorted(set(map(str, loader.section)) - known):
        yield Finding(
            f"the key {key} of {{loader}} is one that no loader takes.", _meant(key, known)
        )
    for key in unknown_keys(loader):
        if not loader.is_text or key in PASSED_TWICE:
            yield Finding(
                f"the key {key} of dataset in {{loader}} is one that the {loader.name} loader does not take.",
                _instead(key, loader.name),
            )
    for stream in loader.stream_sections:
        for key in sorted(set(map(str, stream.settings)) - STREAM_KEYS):
            yield Finding(
                f"{stream.name} has the key {key}, which a stream does not take.",
                _meant(key, STREAM_KEYS),
                [stream.name],
            )


def unknown_keys(loader: LoaderSection) -> list[str]:
    """Keys of `dataset` that the loader does not read."""
    known = DATASET_KEYS.get(loader.name)
    return [] if known is None else sorted(set(map(str, loader.dataset)) - known)


def _instead(key: str, name: str) -> str:
    if key in PASSED_TWICE:
        return "leave it out: the loader passes it itself."
    other = next((n for n, known in DATASET_KEYS.items() if key in known), None)
    return f"leave it out, it is for name: {other}." if other else _meant(key, DATASET_KEYS[name])


def _meant(key: str, known: frozenset[str]) -> str:
    near = nearest(key, known)
    return f"write {near}, if that is what was meant, or leave it out." if near else "leave it out."


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
    given = " and ".join(k for k in ("remote", "local") if loader.dataset.get(k))
    if loader.dataset.get("streams") and given:
        yield Finding(f"dataset of {{loader}} has streams and {given}.", f"leave {given} out.")


@check(
    "error",
    "The finetuning loader wants local beside remote, and takes local alone for a Hugging Face dataset (KeyError).",
)
def remote_alone(loader: LoaderSection) -> Findings:
    given = [k for k in ("remote", "local") if loader.dataset.get(k)]
    if loader.name != "finetuning" or len(given) != 1 or loader.dataset.get("streams"):
        return
    if given == ["local"]:
        other, fix = "remote", "write it as one stream under streams."
    else:
        other, fix = "local", "add local, the folder that caches it."
    yield Finding(f"dataset of {{loader}} has {given[0]} and no {other}.", fix)


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
    for name, settings in streams.items() if split and streams else ():
        if not settings.get("split"):
            yield Finding(
                f"{name} has no split, and dataset of {{loader}} has split: {split}.",
                "write the split at every stream and leave it out of the dataset.",
                [str(name)],
            )


@check(
    "error",
    "Streaming refuses the folder (Reused local directory), or, through a symlink, mixes up two streams.",
)
def local_duplicate(loader: LoaderSection) -> Findings:
    seen: dict[str | None, str] = {}
    for stream in loader.stream_sections:
        folder, name = stream.cache_folder, stream.name
        if (first := seen.setdefault(folder, name)) != name and folder:
            yield Finding(
                f"{first} and {name} both have the local folder {folder}.",
                "give each stream a local folder of its own.",
                [first, name],
            )


@check(
    "warning",
    "Streaming caches it in the temporary folder and refuses that folder when the run starts again (FileExistsError).",
)
def local_unset(loader: LoaderSection) -> Findings:
    for stream in loader.stream_sections:
        if not stream.settings.get("local"):
            yield Finding(
                f"{stream.name} has no local folder.",
                "set local, in the recipe or for the stream.",
                [stream.name],
            )


@check(
    "error",
    "To stay under the limit Streaming deletes shards, and of this stream they are the only copy.",
)
def cache_limit_local(loader: LoaderSection) -> Findings:
    limit = loader.dataset.get("cache_limit")
    for stream in loader.stream_sections if limit else ():
        if stream.is_only_copy:
            yield Finding(
                f"{{loader}} sets cache_limit: {limit}, and {stream.name} has no remote but its local folder.",
                "publish the stream to a remote, or leave cache_limit out.",
                [stream.name],
            )
