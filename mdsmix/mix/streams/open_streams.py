"""Opens single published streams: those of a loader's section, and those that a user names.

A stream is read at its remote, or in its local folder if it has no remote.
"""

from __future__ import annotations

from collections.abc import Mapping

from mdsmix.errors import NotPublished, RecipeError
from mdsmix.foundry_yaml.training_yaml import LoaderSection, StreamSection
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.shards.index import INDEX
from mdsmix.shards.published import PublishedStream, find_published, open_published, open_stream_in
from mdsmix.storage import Location, locate, map_threads

EVALS_HINT = (
    "; if this is an evaluation of the config's own, --keep-evals checks only its keys, and "
    "--drop-evals leaves it out"
)


def open_section_streams(
    loader: LoaderSection, opened: Mapping[str, StreamInMix] | None = None
) -> Loader:
    """Open the streams of a loader's section. Leave out streams at URLs that only Streaming can
    open.

    Args:
        opened: streams that are open already, by name; they are not opened again.
    """
    opened = opened or {}

    def open_section(section: StreamSection) -> StreamInMix:
        if is_open(section, opened):
            return opened[section.name]
        return _open_section(loader, section)

    unopened = {stream.name for stream in loader.unopened}
    sections = [section for section in loader.stream_sections if section.name not in unopened]
    return Loader(
        label=loader.label,
        section=loader.section,
        is_in_list=loader.is_in_list,
        streams=tuple(map_threads(open_section, sections)),
    )


def is_open(section: StreamSection, opened: Mapping[str, StreamInMix]) -> bool:
    """Check whether the stream of a section is open already, under the same name and settings."""
    stream = opened.get(section.name)
    return stream is not None and stream.settings == section.settings


def _open_section(loader: LoaderSection, section: StreamSection) -> StreamInMix:
    """Open one stream of a loader.

    Args:
        section: the stream's section in the loader.

    Raises RecipeError if the section names no folder, and NotPublished if the stream is not in
    exactly that folder.
    """
    whose = f"the stream {section.name} of {loader.label}"
    if not section.url:
        raise RecipeError(
            f"{whose} has neither remote nor local, so its folder is unknown; set one of them"
            f"{EVALS_HINT}."
        )
    split = section.settings.get("split")
    folder = locate(section.url)
    if split:
        folder = folder / str(split)
    stream = open_published(folder)
    # If the recipe has `publish: versioned`, the folder of the split has no index. `open_published`
    # then opens the current version in a neighbouring folder, which Streaming would not find.
    if stream is None or stream.folder != folder:
        fix = "correct its remote, local or split"
        if stream:
            fix = f"correct its split, which is {stream.folder.name} now"
        raise NotPublished(f"{whose} is not at {folder}: there is no {INDEX}; {fix}{EVALS_HINT}.")
    return StreamInMix.of(stream, section.name, section.settings)


def open_named_stream(url: str) -> StreamInMix:
    """Open a stream that a user names by the folder of its split (`out/web/train`), by the index in
    this folder, or by the folder above its only split (`out/web`).
    """
    folder = locate(url)
    if folder.name == INDEX:
        folder = folder.parent
    stream = open_published(folder) or open_stream_in(find_published(folder))
    root, split = split_folder(stream, folder)
    settings = {"remote" if folder.is_store else "local": str(root)}
    if split:
        settings["split"] = split
    return StreamInMix.of(stream, url, settings)


def split_folder(stream: PublishedStream, root: Location) -> tuple[Location, str]:
    """Return the folder and the split that name the stream in a loader, such as `out/web` and
    `train`. The split is empty if the stream is in `root` itself.

    Args:
        root: the folder of the stream, or the folder above its split.
    """
    if stream.folder == root:
        return root, ""
    return stream.folder.parent, stream.folder.name
