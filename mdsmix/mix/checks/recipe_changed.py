"""Checks of the recipe and its sources: converting them today must give the published streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mdsmix.errors import Damaged, MdsmixError, RecipeError
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.frozen import frozen
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.recipe_changes import SAMPLE, KeyChange, compare_encodings, compare_sources
from mdsmix.messages import choose_verb, join_names, plural
from mdsmix.mix.checks.tokenizers import open_published_tokenizer
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix
from mdsmix.recipe import StreamSpec
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes.functions import is_function
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import ReadAs, SourceFile
from mdsmix.sources.find import list_source_keys
from mdsmix.sources.stamps import Stamps, compute_stamp, recall_stamps

CHECKS = CheckList()

PATH_KEY = "source.path"


@CHECKS.stream(
    "note",
    "Converting the recipe and its sources today might give another stream.",
    "recipe-unseen",
)
@CHECKS.stream(
    "warning",
    "The stream contains its sources as they were at the conversion: later changes are not "
    "trained.",
    "sources-changed",
)
@CHECKS.stream(
    "error",
    "The published rows are those of the recipe as it was before, and training does not notice.",
    "recipe-changed",
)
def recipe_differs(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams that today's recipe or source files would convert to other rows. Also report
    what could not be compared here.
    """
    spec = mix.spec_of(stream)
    manifest = stream.trusted_manifest
    if spec is None or manifest is None or manifest.mixed:
        return
    changes = list[str]()
    uncompared = list[str]()

    # Compare the settings of the recipe with those of the conversion.
    try:
        changes += _list_setting_changes(mix, stream, spec, manifest)
    except _NotComparable as error:
        uncompared.append(str(error))

    # Compare the source files.
    sources = _compare_sources(mix, spec, manifest, stream)
    changes += [str(change) for change in sources.changes]
    if sources.uncompared:
        uncompared.append(sources.uncompared)
    if _is_for_budget(spec, manifest):
        uncompared.append(
            f"it contains {manifest.encoding.sample} of its records for a budget (sample: budget), "
            "which the recipe does not set"
        )

    if changes:
        yield Finding(
            f"{{streams}}: converted by another recipe: {'; '.join(changes)}.",
            f"{mix.republish_fix()}; or undo the change of the recipe.",
            id="recipe-changed",
        )
    elif sources.counts:
        yield Finding(
            f"{{streams}}: the source files have changed since the conversion: {sources.counts}.",
            _advise_on_sources(mix, sources),
            id="sources-changed",
        )
    for reason in uncompared:
        yield Finding(
            f"{{streams}}: not fully compared with the recipe: {reason}.",
            "OK if intended. Otherwise run the check where the recipe's tokenizer and sources are.",
            id="recipe-unseen",
        )


def _advise_on_sources(mix: Mix, sources: _SourceDifferences) -> str:
    """Return the fix for changed source files, such as `correct `path`, or bring the files back.`
    Missing files must be brought back first, since a conversion without them is refused.
    """
    fixes = list[str]()
    if sources.has_gone:
        fixes.append("correct `path`, or bring the files back")
    if sources.has_new:
        fixes.append(f"{mix.republish_fix()}: the conversion reads only new and edited files")
    return f"{'; then '.join(fixes)}."


class _NotComparable(Exception):
    """The recipe's settings cannot be compared, since its tokenizer or function cannot be opened
    here.
    """


def _is_for_budget(spec: StreamSpec, manifest: Manifest) -> bool:
    """Check whether `mdsmix convert --budget` sampled the stream. The recipe has no `sample` then.

    Older manifests do not record whether the budget or the recipe set the sample.
    """
    is_by_budget = not manifest.source or manifest.source.get(SAMPLE) == BY_BUDGET
    return spec.sample is None and manifest.encoding.sample is not None and is_by_budget


def _list_setting_changes(
    mix: Mix, stream: StreamInMix, spec: StreamSpec, manifest: Manifest
) -> list[str]:
    """List the settings of the recipe that affect rows and have changed since the conversion.

    The sample for a budget and the date that a chat template prints are not compared, since
    `mdsmix convert` keeps both as published.

    Raises _NotComparable if the recipe's tokenizer or function cannot be opened here.
    """
    assert mix.recipe_spec is not None
    converted = manifest.encoding
    tokenizer = mix.run_tokenizer or open_published_tokenizer(stream, manifest)
    if tokenizer is None:
        raise _NotComparable("the tokenizer is not available")
    try:
        encoding = resolve_stream(mix.recipe_spec, spec, tokenizer).encoding
    except RecipeError as error:
        # A function of the user may only be missing on this machine; any other error is a change
        # of the recipe, which was converted without this error.
        if spec.source and is_function(spec.source.shape):
            raise _NotComparable(_strip_full_stop(error)) from None
        return [f"the recipe cannot be converted as it is now: {_strip_full_stop(error)}"]
    except MdsmixError as error:
        raise _NotComparable(_strip_full_stop(error)) from None
    keeps_sample = spec.sample == BY_BUDGET or _is_for_budget(spec, manifest)
    encoding = replace(
        encoding,
        date_string=encoding.date_string or converted.date_string,
        sample=converted.sample if keeps_sample else encoding.sample,
    )
    return [str(change) for change in compare_encodings(converted, encoding) if change.shapes_rows]


@frozen(kw_only=True)
class _SourceDifferences:
    """How the source files differ from the files that a stream was converted from."""

    changes: Sequence[KeyChange] = ()
    "Changed keys of the recipe: keys that select the files, and keys that set how to read them."
    counts: str = ""
    "How many files were edited, are new or are gone, such as `1 edited, 2 new`."
    has_gone: bool = False
    "Files are gone."
    has_new: bool = False
    "Files were edited or are new."
    uncompared: str = ""
    "Why the files could not be compared."


def _compare_sources(
    mix: Mix, spec: StreamSpec, manifest: Manifest, stream: StreamInMix
) -> _SourceDifferences:
    """Compare the source files that the recipe finds now with the files that the stream was
    converted from.

    A changed path counts as a change of the recipe only if it finds other files: the recipe's
    folder may have been moved.
    """
    assert mix.recipe_spec is not None
    assert spec.source is not None

    # Compare the keys that find and read source files.
    keys = list_source_keys(spec.source.path, mix.recipe_spec.folder, ReadAs.of(spec.source))
    changes = compare_sources(manifest.source, keys)
    reading_changes = [change for change in changes if change.key != PATH_KEY]
    path_changes = [change for change in changes if change.key == PATH_KEY]

    # Compare the files, or, if they cannot be listed, the keys alone. `stamps` are digests of the
    # converted files; None if they were not stored on this machine.
    files = mix.source_files[spec.name]
    stamps = recall_stamps(f"{mix.recipe_spec.published(spec)}/{spec.split}", manifest.index_hash)
    if isinstance(files, MdsmixError):
        if reading_changes or any(map(_names_other_files, path_changes)):
            return _SourceDifferences(changes=changes)
        return _describe_unlisted(files, manifest, was_converted_here=stamps is not None)
    # The same files under another path: the recipe or its folder was only moved.
    if stamps is not None and Counter(map(compute_stamp, files)) == stamps:
        return _SourceDifferences(changes=reading_changes)
    try:
        sizes = {source.path: source.size for source in manifest.read_sources(stream.folder)}
    except Damaged:  # the check side-files reports it
        return _SourceDifferences(changes=reading_changes)
    if stamps is None and _have_same_names_and_sizes(files, sizes):
        return _SourceDifferences(changes=reading_changes)

    # If the changed path selects other files, the recipe was changed. Otherwise the files were.
    names = {file.name for file in files}
    if not manifest.source and sizes and names.isdisjoint(sizes):
        # Older manifests do not contain the path. No old name is left, so the path was changed.
        path_changes = [KeyChange(key=PATH_KEY, published=sorted(sizes), current=keys[PATH_KEY])]
    if path_changes and names != sizes.keys():
        return _SourceDifferences(changes=[*reading_changes, *path_changes])
    return replace(_count_changed_files(files, sizes, stamps), changes=reading_changes)


def _describe_unlisted(
    error: MdsmixError, manifest: Manifest, was_converted_here: bool
) -> _SourceDifferences:
    """Return what can be said of source files that cannot be listed, if the recipe's keys are those
    of the conversion: they are gone if the stream was converted on this machine, and otherwise
    perhaps only on another one.

    Args:
        error: why they cannot be listed.
        manifest: the stream's manifest.
        was_converted_here: whether this machine converted the stream, so that the files were here.
    """
    message = _strip_full_stop(error)
    if was_converted_here and isinstance(error, RecipeError):
        counts = f"{manifest.source_count:,} gone ({message})"
        return _SourceDifferences(counts=counts, has_gone=True)
    return _SourceDifferences(uncompared=f"its sources could not be listed: {message}")


def _count_changed_files(
    files: Sequence[SourceFile], sizes: Mapping[str, int], stamps: Stamps | None
) -> _SourceDifferences:
    """Return how many source files were edited, are new or are gone.

    Args:
        files: the source files now.
        sizes: name of a converted file -> its size in bytes.
        stamps: digests of the converted files; None if they were not stored on this machine.
    """
    names = {file.name for file in files}
    edited = [file for file in files if _is_edited(file, sizes, stamps)]
    new = names - sizes.keys()
    gone = sizes.keys() - names
    counts = list[str]()
    if edited:
        counts.append(f"{len(edited):,} edited{_describe_lost_bytes(edited, sizes)}")
    if new:
        counts.append(f"{len(new):,} new")
    if gone:
        counts.append(f"{len(gone):,} gone")
    return _SourceDifferences(
        counts=", ".join(counts), has_gone=bool(gone), has_new=bool(edited or new)
    )


def _describe_lost_bytes(edited: Sequence[SourceFile], sizes: Mapping[str, int]) -> str:
    """Return the names of the edited files that are smaller than they were, with the bytes that
    they lack now: ` (a.jsonl is smaller by 300 of 1,000 bytes)`. Return "" if none is.

    Args:
        edited: source files that were converted, and have changed since.
        sizes: name of a converted file -> its size in bytes.
    """
    smaller = [file for file in edited if file.stat.size < sizes[file.name]]
    if not smaller:
        return ""
    before = sum(sizes[file.name] for file in smaller)
    lost = before - sum(file.stat.size for file in smaller)
    names = join_names([file.name for file in smaller])
    verb = choose_verb(smaller, "is", "are")
    return f" ({names} {verb} smaller by {lost:,} of {plural(before, 'byte')})"


def _names_other_files(path_change: KeyChange) -> bool:
    """Check whether the recipe's path was changed to name other files. If the recipe or its folder
    was only moved, the last parts of the paths are still the same.
    """
    old_names = [_strip_folders(path) for path in path_change.published]
    return old_names != [_strip_folders(path) for path in path_change.current]


def _is_edited(file: SourceFile, sizes: Mapping[str, int], stamps: Stamps | None) -> bool:
    """Check whether a file that was converted has changed since. A new file is not edited.

    Args:
        sizes: name of a converted file -> its size in bytes.
        stamps: digests of the converted files' names, sizes and modification times; None if they
            were not stored on this machine.
    """
    size = sizes.get(file.name)
    # A Counter gives 0 for the stamp of a file that was not converted in this state.
    has_other_stamp = stamps is not None and not stamps[compute_stamp(file)]
    return size is not None and (file.stat.size != size or has_other_stamp)


def _have_same_names_and_sizes(files: Sequence[SourceFile], sizes: Mapping[str, int]) -> bool:
    """Check whether the files are the stream's sources in another folder: each has the file name
    and the size of one source. Only the last part of a path is compared, such as `a.jsonl`.
    """
    sources = Counter((_strip_folders(path), size) for path, size in sizes.items())
    return Counter((_strip_folders(file.name), file.stat.size) for file in files) == sources


def _strip_folders(path: str) -> str:
    """Return the last part of a path: `a.jsonl` of `data/a.jsonl`."""
    return path.rpartition("/")[2]


def _strip_full_stop(error: MdsmixError) -> str:
    return str(error).rstrip(".")
