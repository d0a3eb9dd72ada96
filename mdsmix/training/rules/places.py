"""Whether a loader's streams can be kept on a training node: a folder each, room in the cache, attempts to fetch them."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.training.findings import Finding, rule
from mdsmix.training.keys import BYTE_UNITS, in_units, whole
from mdsmix.training.sections import LoaderSection


@rule(
    "error",
    "Streaming refuses the folder (Reused local directory), or, through a symlink, mixes up two streams.",
)
def local_duplicate(loader: LoaderSection) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for stream in loader.stream_sections:
        folder = stream.cache_folder
        if folder and folder in seen:
            yield Finding(
                f"{seen[folder]} and {stream.name} both have the local folder {folder}.",
                "give each stream a local folder of its own.",
                [seen[folder], stream.name],
            )
        seen.setdefault(folder or "", stream.name)


@rule(
    "warning",
    "Streaming caches it in the temporary folder and refuses that folder when the run starts again (FileExistsError).",
)
def local_unset(loader: LoaderSection) -> Iterator[Finding]:
    for stream in loader.stream_sections:
        if not stream.settings.get("local"):
            yield Finding(
                f"{stream.name} has no local folder.",
                "set local, in the recipe or for the stream.",
                [stream.name],
            )


@rule(
    "error",
    "To stay under the limit Streaming deletes shards, and of this stream they are the only copy.",
)
def cache_limit_local(loader: LoaderSection) -> Iterator[Finding]:
    limit = loader.dataset.get("cache_limit")
    for stream in loader.stream_sections if limit else ():
        if stream.is_only_copy:
            yield Finding(
                f"{{loader}} sets cache_limit: {limit}, and {stream.name} has no remote but its local folder.",
                "publish the stream to a remote, or leave cache_limit out.",
                [stream.name],
            )


@rule("error", "Streaming refuses the limit (ValueError).")
def cache_limit_size(loader: LoaderSection) -> Iterator[Finding]:
    given = loader.dataset.get("cache_limit")
    if given and in_units(given, BYTE_UNITS) is None:
        yield Finding(
            f"cache_limit of {{loader}} is {given!r}.", "write bytes, or a size such as 500gb."
        )


@rule(
    "error",
    "It counts attempts, not retries: with 0 nothing is ever downloaded (ValueError).",
)
def download_retry(loader: LoaderSection) -> Iterator[Finding]:
    for stream in loader.stream_sections:
        given = stream.settings.get("download_retry", loader.dataset.get("download_retry"))
        if (attempts := whole(given)) is not None and attempts < 1:
            yield Finding(
                f"download_retry of {stream.name} is {attempts}.",
                "set it to at least 1.",
                [stream.name],
            )
