"""Which processor a loader reads images with: the one that its section names, else the one that lies beside the streams."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.encode.folders import fetch_folder, name_at_hand
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load.config import LoaderSettings
from mdsmix.load.vision import Vision, opened
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.storage import Location, locate


def named_vision(settings: LoaderSettings) -> Vision | None:
    """By the processor that the section names; None where it names none. RecipeError where it cannot be used so."""
    if not (name := settings.row_key("processor")):
        return None
    refuse_packing(settings)
    places = [stream.place for stream in settings.section.stream_sections if stream.place]
    vision = _vision(settings, name_at_hand(str(name), places))
    if any(vision.seeing.around):
        _refuse_bare_text(settings, vision)
    return vision


def published_vision(settings: LoaderSettings) -> Vision | None:
    """By the processor for which the streams of images were converted, from beside them; None where it is not there.
    MixRefused where there are two, or it is another when it is opened here."""
    found = dict(_homes(settings))
    if not found:
        return None
    if len(planned := {m.encoding.images["processor"] for m in found.values()}) > 1:
        raise MixRefused(
            f"{settings.section.label}: its streams of images were converted for {len(planned)} processors "
            f"({', '.join(sorted(digest[:8] for digest in planned))}), so rows of some would not fit: convert them for one."
        )
    refuse_packing(settings)
    for home in found:
        if folder := fetch_folder(home):
            vision = _vision(settings, str(folder))
            _refuse_other(home, str(folder), planned.pop())
            return vision
    return None


def _refuse_bare_text(settings: LoaderSettings, vision: Vision) -> None:
    """MixRefused where rows lack the text that the processor prints around an image: it becomes tokens when a stream is converted."""
    for root, manifest in _manifests(settings):
        if (images := manifest.encoding.images) and not images.get("around"):
            raise MixRefused(
                f"{root} was converted without a processor, and {vision.name} prints text around each image, which its rows lack: write "
                "processor: into the recipe and convert it again."
            )


def _manifests(settings: LoaderSettings) -> Iterator[tuple[Location, Manifest]]:
    for stream in settings.section.stream_sections:
        if stream.place:
            root = locate(stream.place)
            if manifest := read_manifest(root / str(stream.settings.get("split") or "")):
                yield root, manifest


def _homes(settings: LoaderSettings) -> Iterator[tuple[Location, Manifest]]:
    """Where the processor of each stream was published."""
    for root, manifest in _manifests(settings):
        if manifest.processor_folder:
            yield root.parent / manifest.processor_folder, manifest


def _refuse_other(home: Location, folder: str, planned: str) -> None:
    if (found := opened(folder).digest) != planned:
        from mdsmix.encode.pretrained import version

        raise MixRefused(
            f"{home} holds the processor for which the streams were converted ({planned[:8]}), and transformers {version('transformers')} "
            f"makes another of it ({found[:8]}): install the version that converted, or name it by dataset.processor to have each image's "
            "count compared instead."
        )


def refuse_packing(settings: LoaderSettings) -> None:
    """RecipeError where rows of images cannot be read so."""
    own = settings.row_key
    if own("packing_ratio", 1) != 1 or not own("decoder_only_format", True):
        raise RecipeError(
            f"{settings.section.label}: a processor stands beside packing_ratio or decoder_only_format: false, and images are seen in rows of "
            "their own alone: take packing_ratio out and set decoder_only_format: true."
        )


def _vision(settings: LoaderSettings, name: str) -> Vision:
    return Vision(name, with_dummy=bool(settings.row_key("dummy_image", False)))
