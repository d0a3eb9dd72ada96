"""Checks that streams are those of the recipe and of its sources, as they are now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mdsmix.errors import Damaged, MdsmixError, RecipeError
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.recipe_changes import SAMPLE, KeyChange, encoding_changes, source_changes
from mdsmix.mix.checks.tokenizers import published_tokenizer
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix
from mdsmix.recipe import StreamSpec
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes.functions import is_function
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import ReadAs, SourceFile
from mdsmix.sources.find import source_keys
from mdsmix.sources.stamps import Stamps, recall_stamps, stamp_of

CHECKS = CheckList()

PATH = "source.path"


@CHECKS.stream(
    "note",
    "Whether the stream is what its recipe and its sources would give today is then unknown.",
    "recipe-unseen",
)
@CHECKS.stream(
    "warning",
    "The stream contains its sources as they were: later changes of them are not trained.",
    "sources-changed",
)
@CHECKS.stream(
    "error",
    "The published rows are those of the recipe as it was, and training does not notice.",
    "recipe-changed",
)
def recipe_differs(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    spec = mix.spec_of(stream)
    manifest = stream.trusted_manifest
    if spec is None or manifest is None or manifest.mixed:
        return
    changes = list[str]()
    unseen = list[str]()
    try:
        changes += _settings(mix, stream, spec, manifest)
    except _Unseen as error:
        unseen.append(str(error))
    sources = _look_at_sources(mix, spec, manifest, stream)
    changes += map(str, sources.changes)
    if sources.unseen:
        unseen.append(sources.unseen)
    if changes:
        yield Finding(
            f"{{streams}}: converted by another recipe: {'; '.join(changes)}.",
            f"{mix.republish_fix()}; or set the recipe back.",
            id="recipe-changed",
        )
    elif sources.counts:
        yield Finding(
            f"{{streams}}: the source files have changed since the conversion: {sources.counts}.",
            _fix_of_sources(mix, sources),
            id="sources-changed",
        )
    if _is_for_budget(spec, manifest):
        unseen.append(
            f"it contains {manifest.encoding.sample} of its records for a budget (sample: budget), "
            "which the recipe does not set"
        )
    for why in unseen:
        yield Finding(
            f"{{streams}}: not fully compared with the recipe: {why}.",
            "OK if intended. Otherwise check where the recipe's tokenizer and sources are.",
            id="recipe-unseen",
        )


def _fix_of_sources(mix: Mix, sources: _Sources) -> str:
    """Return what to do about source files that are gone, which a conversion refuses, and about
    those that were edited or are new.
    """
    fixes = list[str]()
    if sources.has_gone:
        fixes.append("correct `path`, or bring the files back")
    if sources.has_other:
        fixes.append(f"{mix.republish_fix()}: it reads only what is new")
    return f"{'; then '.join(fixes)}."


class _Unseen(Exception):
    """A tokenizer or function of the recipe cannot be opened here, so nothing can be compared."""


def _is_for_budget(spec: StreamSpec, manifest: Manifest) -> bool:
    """Check whether the stream was sampled by `mdsmix convert --budget`, which the recipe need not
    set. Older manifests cannot tell it from a share that the recipe set.
    """
    is_by_budget = not manifest.source or manifest.source.get(SAMPLE) == BY_BUDGET
    return spec.sample is None and manifest.encoding.sample is not None and is_by_budget


def _settings(mix: Mix, stream: StreamInMix, spec: StreamSpec, manifest: Manifest) -> list[str]:
    """Return the settings that shape rows and differ from the conversion. The budget's share and
    the date that a template prints do not count: `mdsmix convert` keeps them as published.
    """
    assert mix.recipe_spec is not None
    converted = manifest.encoding
    tokenizer = mix.run_tokenizer or published_tokenizer(stream, manifest)
    if tokenizer is None:
        raise _Unseen("the tokenizer is not at hand")
    try:
        now = resolve_stream(mix.recipe_spec, spec, tokenizer).encoding
    except RecipeError as error:
        if spec.source and is_function(spec.source.shape):
            raise _Unseen(_sentence(error)) from None
        return [f"the recipe of today cannot be converted, since {_sentence(error)}"]
    except MdsmixError as error:
        raise _Unseen(_sentence(error)) from None
    keeps_sample = spec.sample == BY_BUDGET or _is_for_budget(spec, manifest)
    sample = converted.sample if keeps_sample else now.sample
    now = replace(now, date_string=now.date_string or converted.date_string, sample=sample)
    return [str(change) for change in encoding_changes(converted, now) if change.shapes_rows]


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """How the source files differ from those that a stream was made of."""

    changes: Sequence[KeyChange] = ()
    "Keys of the recipe that find or read other files."
    counts: str = ""
    "How many files were edited, are new or are gone, such as `1 edited, 2 new`."
    has_gone: bool = False
    has_other: bool = False
    "Files were edited or are new."
    unseen: str = ""
    "Why they were not looked at."


def _look_at_sources(
    mix: Mix, spec: StreamSpec, manifest: Manifest, stream: StreamInMix
) -> _Sources:
    assert mix.recipe_spec is not None
    assert spec.source is not None
    now = source_keys(spec.source.path, mix.recipe_spec.folder, ReadAs.of(spec.source))
    changes = source_changes(manifest.source, now)
    read_otherwise = [each for each in changes if each.key != PATH]
    found = mix.source_files[spec.name]
    known = recall_stamps(f"{mix.recipe_spec.published(spec)}/{spec.split}", manifest.index_hash)
    if isinstance(found, MdsmixError):
        if read_otherwise or _names_others(changes):
            return _Sources(changes=changes)
        if known is not None and isinstance(found, RecipeError):  # it was converted here
            counts = f"{manifest.source_count:,} gone ({_sentence(found)})"
            return _Sources(counts=counts, has_gone=True)
        return _Sources(unseen=f"its sources could not be listed: {_sentence(found)}")
    if known is not None and Counter(map(stamp_of, found)) == known:
        return _Sources(changes=read_otherwise)
    try:
        sizes = {source.path: source.size for source in manifest.read_sources(stream.folder)}
    except Damaged:  # the check side-files reports it
        return _Sources(changes=read_otherwise)
    if known is None and _are_alike(found, sizes):
        return _Sources(changes=read_otherwise)
    here = {file.name for file in found}
    new = here - sizes.keys()
    gone = sizes.keys() - here
    other = [each for each in changes if each.key == PATH]
    if not manifest.source and sizes and not here & sizes.keys():
        # Older manifests do not say the path.
        other = [KeyChange(key=PATH, made=sorted(sizes), now=now[PATH])]
    if (new or gone) and other:
        return _Sources(changes=[*read_otherwise, *other])
    edited = [file for file in found if _is_edited(file, sizes, known)]
    numbers = {"edited": len(edited), "new": len(new), "gone": len(gone)}
    return _Sources(
        changes=read_otherwise,
        counts=", ".join(f"{number:,} {state}" for state, number in numbers.items() if number),
        has_gone=bool(gone),
        has_other=bool(edited or new),
    )


def _names_others(changes: Sequence[KeyChange]) -> bool:
    """Check whether the path names other files, and not those of a recipe or folder that was
    moved.
    """
    for change in changes:
        if change.key == PATH and [*map(_last, change.made)] != [*map(_last, change.now)]:
            return True
    return False


def _is_edited(file: SourceFile, sizes: Mapping[str, int], known: Stamps | None) -> bool:
    size = sizes.get(file.name)
    is_other = known is not None and not known[stamp_of(file)]
    return size is not None and (file.stat.size != size or is_other)


def _are_alike(found: Sequence[SourceFile], sizes: Mapping[str, int]) -> bool:
    """Check whether the files are those of the stream by last names and sizes, in any folder."""
    last_names = Counter((_last(path), size) for path, size in sizes.items())
    return Counter((_last(file.name), file.stat.size) for file in found) == last_names


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _sentence(error: MdsmixError) -> str:
    """Return an error as a part of a sentence."""
    return str(error).rstrip(".")
