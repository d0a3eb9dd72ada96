"""Whether streams are those of the recipe and of its sources, as they are now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mdsmix.errors import Damaged, MdsmixError, RecipeError
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.kinds.encodings import make_encoding
from mdsmix.kinds.recipe_changes import SAMPLE, KeyChange, encoding_changes, source_changes
from mdsmix.mix.checks.tokenizers import published_tokenizer
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix
from mdsmix.recipe import StreamSpec
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes.functions import is_function
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import ReadAs, SourceFile
from mdsmix.sources.find import source_keys
from mdsmix.sources.stamps import Stamps, known_stamps, stamp_of

CHECKS = CheckList()

PATH = "source.path"


@CHECKS.stream(
    "note",
    "Whether the stream is what its recipe and its sources would give today is then not known.",
    "recipe-unseen",
)
@CHECKS.stream(
    "warning",
    "The stream holds its sources as they were: what came to them since, or left them, is not trained so.",
    "sources-changed",
)
@CHECKS.stream(
    "error",
    "The rows that are published are those of the recipe as it was, and nothing in training tells.",
    "recipe-changed",
)
def recipe_differs(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    spec, manifest = mix.spec_of(stream), stream.trusted_manifest
    if spec is None or manifest is None or manifest.mixed:
        return
    changes, unseen = list[str](), list[str]()
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
    elif sources.told:
        yield Finding(
            f"{{streams}}: the source files have changed since the conversion: {sources.told}.",
            _fix_of_sources(mix, sources),
            id="sources-changed",
        )
    if _is_for_budget(spec, manifest):
        unseen.append(
            f"it holds {manifest.encoding.sample} of its records for a budget (sample: budget), and the recipe says nothing of it"
        )
    for why in unseen:
        yield Finding(
            f"{{streams}}: not compared in all with the recipe: {why}.",
            "leave it, if that is meant; else check where the recipe's tokenizer and sources are.",
            id="recipe-unseen",
        )


def _fix_of_sources(mix: Mix, sources: _Sources) -> str:
    """Say what to do about source files that are gone, which a conversion refuses, and about those
    that were edited or are new.
    """
    fixes = list[str]()
    if sources.has_gone:
        fixes.append("correct `path`, or bring the files back")
    if sources.has_other:
        fixes.append(f"{mix.republish_fix()}: it reads what is new, and nothing else")
    return f"{'; then '.join(fixes)}."


class _Unseen(Exception):
    """Something that a recipe names is not at hand, so that nothing can be compared."""


def _is_for_budget(spec: StreamSpec, manifest: Manifest) -> bool:
    """Whether the stream was sampled by `mdsmix convert --budget`, which the recipe need not say.
    Older manifests do not tell it from a share that the recipe gave.
    """
    is_by_budget = not manifest.source or manifest.source.get(SAMPLE) == BY_BUDGET
    return spec.sample is None and manifest.encoding.sample is not None and is_by_budget


def _settings(mix: Mix, stream: StreamInMix, spec: StreamSpec, manifest: Manifest) -> list[str]:
    """Compare the settings that shape rows, and say which differ. The budget's share and the day
    that a template prints stay as they are published, as `mdsmix convert` leaves them.
    """
    assert mix.recipe_spec is not None
    made, tokenizer = manifest.encoding, mix.run_tokenizer or published_tokenizer(stream, manifest)
    if tokenizer is None:
        raise _Unseen("the tokenizer is not at hand")
    try:
        now = make_encoding(mix.recipe_spec, spec, tokenizer)
    except RecipeError as error:
        if spec.source and is_function(spec.source.shape):
            raise _Unseen(_sentence(error)) from None
        return [f"what it says now cannot be converted, since {_sentence(error)}"]
    except MdsmixError as error:
        raise _Unseen(_sentence(error)) from None
    keeps_sample = spec.sample == BY_BUDGET or _is_for_budget(spec, manifest)
    sample = made.sample if keeps_sample else now.sample
    now = replace(now, date_string=now.date_string or made.date_string, sample=sample)
    return [str(each) for each in encoding_changes(made, now) if each.shapes_rows]


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """How the source files differ from those that a stream was made of."""

    changes: Sequence[KeyChange] = ()
    "Keys of the recipe that find or read other files."
    told: str = ""
    "How many files were edited, are new or are gone."
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
    known = known_stamps(f"{mix.recipe_spec.published(spec)}/{spec.split}", manifest.index_hash)
    if isinstance(found, MdsmixError):
        if read_otherwise or _names_others(changes):
            return _Sources(changes=changes)
        if known is not None and isinstance(found, RecipeError):  # it was converted here
            told = f"{manifest.source_count:,} gone ({_sentence(found)})"
            return _Sources(told=told, has_gone=True)
        return _Sources(unseen=f"its sources were not looked at, {_sentence(found)}")
    if known is not None and Counter(map(stamp_of, found)) == known:
        return _Sources(changes=read_otherwise)
    try:
        sizes = {source.path: source.size for source in manifest.read_sources(stream.folder)}
    except Damaged:  # a check of its own tells
        return _Sources(changes=read_otherwise)
    if known is None and _are_alike(found, sizes):
        return _Sources(changes=read_otherwise)
    here = {file.name for file in found}
    new, gone = here - sizes.keys(), sizes.keys() - here
    other = [each for each in changes if each.key == PATH]
    if not manifest.source and sizes and not here & sizes.keys():
        # Older manifests do not say the path.
        other = [KeyChange(key=PATH, made=sorted(sizes), now=now[PATH])]
    if (new or gone) and other:
        return _Sources(changes=[*read_otherwise, *other])
    edited = [file for file in found if _is_edited(file, sizes, known)]
    counts = {"edited": len(edited), "new": len(new), "gone": len(gone)}
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return _Sources(
        changes=read_otherwise, told=told, has_gone=bool(gone), has_other=bool(edited or new)
    )


def _names_others(changes: Sequence[KeyChange]) -> bool:
    """Whether the path names other files, and not those of a recipe or folder that was moved."""
    paths = [(each.made, each.now) for each in changes if each.key == PATH]
    return any([*map(_last, made)] != [*map(_last, now)] for made, now in paths)


def _is_edited(file: SourceFile, sizes: Mapping[str, int], known: Stamps | None) -> bool:
    size = sizes.get(file.name)
    is_other = known is not None and not known[stamp_of(file)]
    return size is not None and (file.stat.size != size or is_other)


def _are_alike(found: Sequence[SourceFile], sizes: Mapping[str, int]) -> bool:
    """Whether the files are those of the stream by last names and sizes, in whatever folder."""
    last_names = Counter((_last(path), size) for path, size in sizes.items())
    return Counter((_last(file.name), file.stat.size) for file in found) == last_names


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _sentence(error: MdsmixError) -> str:
    """Return an error as a part of a sentence."""
    return str(error).rstrip(".")
