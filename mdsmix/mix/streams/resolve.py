"""A recipe, a training YAML or folders of published streams -> a Mix.

Indexes and manifests are read here: two small files a stream, many streams at a time. The rest of a
stream is read only when a check asks. A stream is read at its remote, or in its local folder where
it has no remote.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from mdsmix.encode.published_folders import adopt_hash
from mdsmix.errors import MdsmixError, MixRefused, NotPublished, RecipeError
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER
from mdsmix.foundry_yaml.training_yaml import (
    TRAIN,
    LoaderSection,
    Settings,
    StreamSection,
    TrainingYaml,
    is_recipe_tree,
    parse_training_yaml,
    read_unresolved,
)
from mdsmix.kinds import is_data, kind_of, open_recipe
from mdsmix.mix.epoch.apportion import Apportioned
from mdsmix.mix.epoch.figures import apportion_recipe
from mdsmix.mix.render import foundry_config
from mdsmix.mix.render.set_into import LENGTH
from mdsmix.mix.streams.mix import (
    Loader,
    Mix,
    StreamInMix,
    how_to_publish_again,
    published_tokenizers,
)
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.read import parted, read_text
from mdsmix.shards.index import INDEX
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.shards.published import (
    Stream,
    current,
    find_published,
    limited,
    nothing_published,
    read_in,
    read_published,
)
from mdsmix.shards.token_ids import PACKED, layout_of
from mdsmix.storage import Location, locate, together

if TYPE_CHECKING:
    from mdsmix.encode.pretrained import Tokenizer

KEEP = "; of an evaluation that is not the recipe's, --keep-evals judges the keys alone, and --drop-evals leaves it out"
OwnEvals = Literal["look", "keep", "drop"]
"""What becomes of evaluations that are not the recipe's: their streams are looked at, the
evaluations whose streams cannot be opened are judged by their keys alone, or they are left out.
"""
Surveyor = Callable[[Recipe, StreamSpec], tuple[Stream, str]]
"""A function from an unpublished stream to its estimate as a Stream, and a sentence on how far its
source was read.
"""


def resolve_mix(
    targets: Sequence[str],
    may_estimate: bool = False,
    has_evals: bool = True,
    survey: Surveyor | None = None,
    own_evals: OwnEvals = "look",
) -> Mix:
    """The Mix of a recipe (with overrides), a training YAML, or streams; the contents of the
    targets decide which.

    Args:
        may_estimate: a recipe's shares may be worked out from first samples of streams whose tokens
        were not counted.
        has_evals: evaluations are looked at too.
        survey: reads the source of a recipe's unpublished stream; without `survey` such streams are
        refused.
        own_evals: what becomes of a training YAML's evaluations.
    """
    if (found := find_named_yaml(targets)) is None:
        return make_stream_mix(list_stream_urls(targets))
    path, overrides = found
    if not overrides and not is_recipe_file(path):
        return make_mix(read_text(path), path, own_evals=own_evals if has_evals else "drop")
    recipe = open_recipe(path, overrides)
    recipe = recipe if has_evals else drop_evaluations(recipe, path)
    return make_recipe_mix(recipe, path, may_estimate, survey, overrides)


def find_named_yaml(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The recipe or training YAML that the words of a command name, and the overrides; None where
    they name streams. RecipeError where they name both, or several YAMLs.
    """
    named, overrides = parted(words)
    is_one = len(named) == 1 and _is_yaml(named[0])
    if not is_one and (overrides or any(map(_is_yaml, named))):
        raise RecipeError(
            f"`{' '.join(words)}` names neither one recipe (with key=value overrides) nor streams alone: name one recipe, "
            "or folders and s3:// URLs of streams."
        )
    return (named[0], overrides) if is_one else None


def _is_yaml(name: str) -> bool:
    is_file = os.path.isfile(name) and os.path.basename(name) != INDEX
    return is_file or name.endswith((".yaml", ".yml"))


def list_stream_urls(urls: Iterable[str]) -> list[str]:
    """The places of streams; in place of a local folder that holds the streams of a mix, the
    `train` split of each.
    """
    return [place for url in urls for place in _below(url) or [url]]


def _below(url: str) -> list[str]:
    at = locate(url)
    names = () if at.is_store else at.folders()
    return [f"{url}/{name}/train" for name in names if current(at / name / "train")]


def drop_evaluations(recipe: Recipe, path: str) -> Recipe:
    """The recipe with its training streams alone, so that its evaluations need not be published.
    RecipeError where it has none.
    """
    train = {spec.name: spec for spec in recipe.trained}
    if not train:
        raise RecipeError(
            f"{path} has no stream of `split: train`, so there is nothing to train on."
        )
    # The name is fixed, since the recipe would choose another loader without its evaluations.
    return replace(
        recipe, streams=train, train_loader={**recipe.train_loader, "name": recipe.loader}
    )


def is_recipe_file(path: str) -> bool:
    """Whether the file is a recipe, or data in a recipe's place, which `open_recipe` refuses.
    Another unreadable file is none: the code that parses it later says where it breaks.
    """
    try:
        tree = read_unresolved(read_text(path), path)
    except RecipeError:
        return is_data(path)
    return is_recipe_tree(tree) or (TRAIN not in tree and is_data(path))


def make_recipe_mix(
    recipe: Recipe,
    path: str,
    may_estimate: bool,
    survey: Surveyor | None = None,
    overrides: Sequence[str] = (),
) -> Mix:
    """The mix that a recipe renders; MixRefused where its streams cannot fill their shares."""
    streams, shares = open_recipe_streams(recipe, path, may_estimate, survey, overrides)
    recipe = with_published_hash(recipe, streams.values())
    mix = make_mix(
        foundry_config.make_sections(recipe, streams, {}), path, streams, recipe, shares=shares
    )
    return replace(mix, overrides=overrides)


def with_published_hash(recipe: Recipe, streams: Iterable[StreamInMix]) -> Recipe:
    """Return the recipe, whose tokenizer is opened under the hash that its streams have of it."""
    from mdsmix.encode.pretrained import open_tokenizer

    with suppress(MdsmixError):  # why it cannot be opened is a finding
        tokenizer = open_tokenizer(recipe.tokenizer)
        adopted = adopt_hash(tokenizer, published_tokenizers(streams))
        if adopted.hash != tokenizer.hash:
            spec = replace(recipe.tokenizer, published_hash=adopted.hash)
            return replace(recipe, tokenizer=spec)
    return recipe


def open_recipe_streams(
    recipe: Recipe,
    path: str,
    may_estimate: bool,
    survey: Surveyor | None = None,
    overrides: Sequence[str] = (),
) -> tuple[dict[str, StreamInMix], Apportioned | None]:
    """Return a recipe's streams by name, opened and weighted, and its shares as samples; None if
    the recipe has no shares.

    Raises NotPublished if streams are missing and there is no `survey`, and MixRefused if they are
    missing only because a holdout was added to the recipe since it was converted.
    """
    specs = [*recipe.streams.values()]
    pairs = [*zip(specs, together(lambda spec: _published(recipe, spec), specs), strict=True)]
    told = [
        f"{s.name} at {locate(recipe.published(s)) / s.split}" for s, found in pairs if not found
    ]
    if told and not survey:
        missing = [spec for spec, found in pairs if not found]
        _refuse_new_holdouts(missing, [found for _, found in pairs if found], path, overrides)
        raise NotPublished(
            f"not published: {'; '.join(told)}: run `mdsmix convert` on this recipe first"
            f"{_of_limited(recipe, missing)}."
        )
    # One after the other: chat templates are rendered under an alarm signal, which only the main
    # thread gets.
    streams = {
        spec.name: found or _of_recipe(recipe, spec, *survey(recipe, spec))  # type: ignore[misc]
        for spec, found in pairs
    }
    if not recipe.is_by_share:
        return streams, None
    shares = apportion_recipe(recipe, _trained(recipe, streams.values()), may_estimate)
    for part in shares.parts:
        stream = streams[part.stream]
        streams[part.stream] = replace(stream, settings={**stream.settings, "choose": part.choose})
    return streams, shares


def _refuse_new_holdouts(
    missing: Sequence[StreamSpec],
    published: Iterable[StreamInMix],
    path: str,
    overrides: Sequence[str],
) -> None:
    """Raise MixRefused if each stream that is missing is held out of a published stream that was
    converted without a holdout.
    """
    without = {
        stream.name
        for stream in published
        if stream.trusted_manifest
        and not stream.trusted_manifest.mixed
        and stream.trusted_manifest.encoding.holdout is None
    }
    if not all(spec.held_out_of in without for spec in missing):
        return
    changes = [
        f"{spec.held_out_of} was converted by another recipe: holdout was not set and is {spec.holdout}, so {spec.name} is not published"
        for spec in missing
    ]
    raise MixRefused(
        f"recipe-changed: {'; '.join(changes)}: {how_to_publish_again(path, overrides)}; or set the recipe back."
    )


def _of_limited(recipe: Recipe, missing: Iterable[StreamSpec]) -> str:
    """Return what to do if conversions with `--limit` are there of streams that are not published;
    empty if none is there.
    """
    there = [place for spec in missing for place in limited(locate(recipe.published(spec)))]
    if not there:
        return ""
    named = shlex.join(place.url for place in there)
    return f", without --limit; to look at what --limit converted, `mdsmix check {named}`"


def _trained(recipe: Recipe, streams: Iterable[StreamInMix]) -> Loader:
    """The train_loader that the recipe renders, with its streams before shares weight them."""
    section = foundry_config.make_loader_section(recipe, {})
    section["dataset"]["max_seq_len"] = recipe.max_seq_len
    trained = tuple(s for s in streams if foundry_config.is_train_stream(recipe.streams[s.name]))
    return Loader(label=TRAIN, section=section, streams=trained)


def make_stream_mix(urls: Sequence[str]) -> Mix:
    """The unweighted mix of streams at these places. Its loader is `mdsmix` where a stream is
    packed, `text` where all hold plain tokens or text, else `finetuning`. RecipeError where a
    stream is named twice.
    """
    streams = {stream.name: stream for stream in together(_at, urls)}
    if len({stream.folder.url for stream in streams.values()}) < len(urls):
        raise RecipeError(f"{', '.join(urls)} names a stream twice; name every stream once.")
    encodings = [stream.encoding for stream in streams.values() if stream.encoding]
    columns = [stream.columns for stream in streams.values()]
    dataset: dict[str, Any] = {
        "streams": {name: dict(stream.settings) for name, stream in streams.items()},
        "decoder_only_format": True,
        "shuffle": True,
    }
    if encodings:
        dataset[LENGTH] = max(encoding.max_seq_len for encoding in encodings)
    for encoding in encodings:
        if encoding.pack and kind_of(encoding).has_targets:
            # No loader can read packed rows by other targets than the targets they were packed
            # with.
            for key in ("target_prompts", "target_responses"):
                dataset.setdefault(key, getattr(encoding, key))
    is_plain = all({"tokens", "text"} & each.keys() for each in columns)
    name = (
        MDSMIX_LOADER if PACKED in map(layout_of, columns) else "text" if is_plain else "finetuning"
    )
    section = {"name": name, "dataset": dataset}
    return replace(make_mix({TRAIN: section}, ", ".join(urls), streams), is_bare=True)


def make_mix(
    config: Settings | str,
    origin: str,
    known: Mapping[str, StreamInMix] | None = None,
    recipe: Recipe | None = None,
    into: str | None = None,
    own_evals: OwnEvals = "look",
    shares: Apportioned | None = None,
) -> Mix:
    """A Mix from a config, given as text or as a tree.

    Args:
        origin: the file that is asked about; with a `recipe`, the recipe's path.
        known: streams that are open already, by name; they are not opened again.
        into: the config that the recipe's sections were set into.
        own_evals: what becomes of evaluations whose streams are not among the known ones.
        shares: the recipe's shares as samples.
    """
    yaml = parse_training_yaml(config, into or origin)
    opened, problem = _tokenizer(yaml, recipe)
    train = _loader(yaml.train, known or {})
    evals, unseen = _evaluations(yaml, known or {}, own_evals)
    if opened:
        streams = [stream for loader in (train, *evals) for stream in loader.streams]
        opened = adopt_hash(opened, published_tokenizers(streams))
    return Mix(
        yaml=yaml,
        recipe=origin if recipe else None,
        wanted=recipe,
        train=train,
        evals=tuple(evals),
        unseen=tuple(unseen),
        tokenizer=TokenizerCard.of(opened) if opened else None,
        tokenizer_problem=problem,
        opened=opened,
        tokenizer_home=foundry_config.find_fetch_folder(recipe) if recipe else None,
        shares=shares,
    )


def _evaluations(
    yaml: TrainingYaml, known: Mapping[str, StreamInMix], own_evals: OwnEvals
) -> tuple[list[Loader], list[LoaderSection]]:
    """Open the evaluations of a training YAML; return them, and the sections of those kept
    unseen.
    """
    opened = list[Loader]()
    unseen = list[LoaderSection]()
    for section in yaml.evals:
        streams = section.stream_sections
        is_known = bool(streams) and all(_is_known(each, known) for each in streams)
        if own_evals == "drop" and not is_known:
            continue
        try:
            opened.append(_loader(section, known))
        except MdsmixError:
            if own_evals == "look" or is_known:
                raise
            unseen.append(section)
    return opened, unseen


def _is_known(section: StreamSection, known: Mapping[str, StreamInMix]) -> bool:
    stream = known.get(section.name)
    return stream is not None and stream.settings == section.settings


def _loader(section: LoaderSection, known: Mapping[str, StreamInMix]) -> Loader:
    def opened(found: StreamSection) -> StreamInMix:
        return known[found.name] if _is_known(found, known) else _of_section(section, found)

    elsewhere = {stream.name for stream in section.unopened}
    sections = [found for found in section.stream_sections if found.name not in elsewhere]
    return Loader(
        label=section.label,
        section=section.section,
        is_in_list=section.is_in_list,
        streams=tuple(together(opened, sections)),
    )


def _of_section(loader: LoaderSection, section: StreamSection) -> StreamInMix:
    whose, split = f"the stream {section.name} of {loader.label}", section.settings.get("split")
    if not section.place:
        raise RecipeError(
            f"{whose} has neither remote nor local, so nothing says where it is; add one of them{KEEP}."
        )
    folder = locate(section.place) / str(split) if split else locate(section.place)
    found = read_published(folder)
    if found is None or found.folder != folder:
        is_at = f"its split, {found.folder.name} by now" if found else "its remote, local or split"
        raise NotPublished(
            f"{whose} is not at {folder}: there is no {INDEX}; correct {is_at}{KEEP}."
        )
    return StreamInMix.of(found, section.name, section.settings)


def _published(recipe: Recipe, spec: StreamSpec) -> StreamInMix | None:
    """The published stream of a recipe, opened by one read. A stream without a source may lie flat,
    without a folder for its split. None where it is to be converted first; NotPublished where it
    has no source.
    """
    place = locate(recipe.published(spec))
    found = read_published(place / spec.split)
    if found is None and not spec.source and (found := read_published(place)) is None:
        raise nothing_published(place / spec.split)
    return _of_recipe(recipe, spec, found) if found else None


def _of_recipe(
    recipe: Recipe, spec: StreamSpec, found: Stream, survey: str | None = None
) -> StreamInMix:
    root, split = _split(found, locate(recipe.published(spec)))
    settings = foundry_config.make_stream_section(recipe, spec, str(root), split, found.index)
    return StreamInMix.of(found, spec.name, settings, survey)


def _at(url: str) -> StreamInMix:
    """The stream that a user names by the folder of its split, by the index in that folder, or by
    the folder above a single split.
    """
    place = at.parent if (at := locate(url)).name == INDEX else at
    found = read_published(place) or read_in(find_published(place))
    root, split = _split(found, place)
    where = {"remote" if place.is_store else "local": str(root), "split": split}
    return StreamInMix.of(found, url, {key: said for key, said in where.items() if said})


def _split(found: Stream, place: Location) -> tuple[Location, str]:
    """The folder from which a loader reads the stream, and its split; an empty split where the
    stream lies in `place` itself.
    """
    folder = found.folder
    return (place, "") if folder == place else (folder.parent, folder.name)


def _tokenizer(yaml: TrainingYaml, recipe: Recipe | None) -> tuple[Tokenizer | None, str | None]:
    """The run's tokenizer, or the reason why it could not be opened."""
    from mdsmix.encode.pretrained import open_tokenizer
    from mdsmix.encode.published_folders import at_hand

    try:
        # Conversion took its snapshot of the tokenizer by the recipe's own spec.
        spec = yaml.tokenizer and (recipe.tokenizer if recipe else yaml.tokenizer)
        return (open_tokenizer(at_hand(spec, yaml.places)) if spec else None), None
    except MdsmixError as error:
        return None, str(error)
