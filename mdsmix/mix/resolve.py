"""What was asked about -> a Mix: a recipe, a training YAML, or folders of published streams.

Indexes and manifests are read here, two small files a stream, of many streams at a time. The rest of a stream is looked at only when
a check asks. A stream is read where it was published, at its remote, or in its local folder where it has none.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from mdsmix.errors import MdsmixError, NotPublished, RecipeError, Unreachable
from mdsmix.kinds import kind_of, open_recipe
from mdsmix.kinds.survey import Survey
from mdsmix.mix import sections
from mdsmix.mix.shares import apportion
from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.read import parted
from mdsmix.shards.index import BASENAME
from mdsmix.shards.manifest import Encoding, TokenizerCard
from mdsmix.shards.published import (
    Stream,
    current,
    find_published,
    nothing_published,
    read_in,
    read_published,
    read_quarantine,
)
from mdsmix.shards.token_ids import PACKED, layout_of
from mdsmix.storage import Location, locate, together
from mdsmix.training.loader_keys import OWN
from mdsmix.training.sections import LoaderSection, StreamSection, TrainingYaml, is_recipe_tree
from mdsmix.training.training_yaml import parse, read_text, unresolved
from mdsmix.words import does, plural

if TYPE_CHECKING:
    from mdsmix.encode.pretrained import Tokenizer

KEEP = "; `render-yaml --into FILE --keep-evals` keeps evaluations that are not the recipe's unseen"


MOST_COUNTED = 10_000
"Bad records of a stream that are read for its reasons: a quarantine may hold a whole corpus."
Surveyor = Callable[[Recipe, StreamSpec], tuple[Stream, Survey]]
"Tells of a stream that is not published how it would be, from a survey of its source."


def resolve(
    targets: Sequence[str],
    may_estimate: bool = False,
    has_evals: bool = True,
    survey: Surveyor | None = None,
) -> Mix:
    """Tells by content what was asked about: a recipe (with overrides), a training YAML, or streams.

    Args:
        may_estimate: a recipe's shares may be worked out from first samples where nobody counted.
        has_evals: evaluations are looked at too.
        survey: looks at the sources of a recipe's streams that are not published; without it these are refused.
    """
    named, overrides = parted(targets)
    if len(named) == 1 and os.path.isfile(named[0]) and os.path.basename(named[0]) != BASENAME:
        if is_recipe(named[0]):
            recipe = open_recipe(named[0], overrides)
            recipe = recipe if has_evals else training(recipe, named[0])
            return mix_of_recipe(recipe, named[0], may_estimate, survey)
        if not overrides:
            return mix_of_yaml(named[0], evals=None if has_evals else ())
    if overrides:
        raise RecipeError(f"`{overrides[0]}` overrides a recipe, and none was named before it.")
    return mix_of_streams(named)


def training(recipe: Recipe, path: str | os.PathLike[str]) -> Recipe:
    """The recipe with the streams that it trains on; those that it evaluates on need not even be published."""
    train = {name: spec for name, spec in recipe.streams.items() if sections.is_train(spec)}
    if not train:
        raise RecipeError(
            f"{path} has no stream of `split: train`, so there is nothing to train on."
        )
    # With its evaluations the loader that they alone need would go.
    loader = {**recipe.train_loader, "name": recipe.loader}
    return dataclasses.replace(recipe, streams=train, train_loader=loader)


def is_recipe(path: str) -> bool:
    """Whether the file is a recipe; what cannot be read is none, and mix_of_yaml says where it breaks."""
    try:
        return is_recipe_tree(unresolved(read_text(path), path))
    except RecipeError:
        return False


def mix_of_recipe(
    recipe: Recipe,
    path: str | os.PathLike[str],
    may_estimate: bool = False,
    survey: Surveyor | None = None,
) -> Mix:
    """The mix that a recipe renders; MixRefused where its shares cannot be drawn from what the streams hold."""
    specs = recipe.streams.values()
    published = dict(
        zip(recipe.streams, together(lambda s: _published(recipe, s), specs), strict=True)
    )
    absent = [spec for spec in specs if published[spec.name] is None]
    if absent and not survey:
        raise _unpublished(recipe, absent)
    # One after the other: templates are rendered under an alarm, which only this thread gets.
    known = {spec.name: survey(recipe, spec) for spec in absent if survey}
    streams = {
        spec.name: _of_recipe(recipe, spec, *known.get(spec.name, (published[spec.name], None)))
        for spec in specs
    }
    tree = sections.sections(recipe, {name: s.settings for name, s in streams.items()})
    mix = mix_of(tree, str(path), streams, recipe=recipe)
    return _by_share(mix, recipe, may_estimate) if recipe.is_by_share else mix


def _unpublished(recipe: Recipe, streams: Sequence[StreamSpec]) -> NotPublished:
    """The error that names these streams of the recipe, none of which is published."""
    folders = {stream.name: locate(recipe.published(stream)) / stream.split for stream in streams}
    told = [f"{name} at {folder}{_refused_for(folder)}" for name, folder in folders.items()]
    return NotPublished(
        f"{plural(len(told), 'stream')} {does(told, 'is', 'are')} not published: {'; '.join(told)}: run `mdsmix convert` on this recipe "
        "first."
    )


def _refused_for(folder: Location) -> str:
    """What a conversion has set aside there and was refused for; nothing where it never came to that."""
    records = islice(read_quarantine(folder), MOST_COUNTED)
    reasons = Counter(str(record.get("reason")) for record in records)
    if not reasons:
        return ""
    more = " and more" * (reasons.total() == MOST_COUNTED)
    said = ", ".join(f"{n:,} {reason}" for reason, n in reasons.most_common())
    return (
        f", where a conversion was refused for bad records ({said}{more}; `mdsmix quarantine {folder}` shows them: mend the source, or "
        "raise max_bad)"
    )


def _by_share(mix: Mix, recipe: Recipe, may_estimate: bool) -> Mix:
    """The mix with a `choose` of each stream, in its YAML as well."""
    found = apportion(recipe, mix.train, may_estimate)
    chosen = {part.stream: {"choose": part.choose} for part in found.parts}
    config = copy.deepcopy(dict(mix.yaml.config))
    for name, settings in config["train_loader"]["dataset"]["streams"].items():
        settings |= chosen[name]
    streams = tuple(
        dataclasses.replace(s, settings={**s.settings, **chosen[s.name]}) for s in mix.train.streams
    )
    return dataclasses.replace(
        mix,
        yaml=dataclasses.replace(mix.yaml, config=config),
        train=dataclasses.replace(mix.train, section=config["train_loader"], streams=streams),
        shares=found,
    )


def mix_of_yaml(path: str | os.PathLike[str], evals: Collection[str] | None = None) -> Mix:
    """The mix that a training YAML of LLM-Foundry describes; relative paths are the current folder's, as for Foundry."""
    return mix_of(read_text(path), str(path), evals=evals)


def mix_of_streams(urls: Sequence[str]) -> Mix:
    """The mix of streams at these places, unweighted, under `text` where all hold plain tokens or text, `mdsmix` where one is packed,
    else `finetuning`."""
    streams: dict[str, StreamInMix] = {}
    for url, stream in zip(urls, together(_at, urls), strict=True):
        if stream.folder.url in {other.folder.url for other in streams.values()}:
            raise RecipeError(f"{url} is named twice; name every stream once.")
        name = url if stream.name in streams else stream.name  # of two that are called alike
        streams[name] = dataclasses.replace(stream, name=name)
    manifests = [s.trusted_manifest for s in streams.values()]
    dataset = {
        "streams": {n: dict(s.settings) for n, s in streams.items()},
        "decoder_only_format": True,
        "max_seq_len": max((m.encoding.max_seq_len for m in manifests if m), default=None),
        "shuffle": True,
        **_settled(m.encoding for m in manifests if m),
    }
    is_plain = all({"tokens", "text"} & set(s.columns) for s in streams.values())
    is_packed = any(layout_of(s.columns) == PACKED for s in streams.values())
    name = OWN if is_packed else "text" if is_plain else "finetuning"
    section = {"name": name, "dataset": dataset}
    mix = mix_of({"train_loader": section}, ", ".join(urls), streams)
    return dataclasses.replace(mix, is_bare=True)


def _settled(encodings: Iterable[Encoding]) -> dict[str, str]:
    """The target policies that packed rows were made for: no loader can read them by others."""
    packed = [e for e in encodings if e.pack and kind_of(e).has_targets]
    return {k: getattr(packed[0], k) for k in ("target_prompts", "target_responses") if packed}


def mix_of(
    config: Mapping[str, Any] | str,
    origin: str,
    known: Mapping[str, StreamInMix] | None = None,
    recipe: Recipe | None = None,
    into: str | None = None,
    evals: Collection[str] | None = None,
) -> Mix:
    """A Mix from a config, its text or its tree; streams that were opened already are not opened again.

    Args:
        origin: the file that is asked about; with a `recipe`, that one.
        into: the config that the recipe's sections were set into.
        evals: labels of the evaluations to look at; None for all.
    """
    yaml = parse(config, into or origin)
    opened, problem = _tokenizer(yaml, recipe)
    return Mix(
        yaml=yaml,
        recipe=origin if recipe else None,
        train=_loader(yaml, yaml.train, known or {}),
        evals=tuple(
            _loader(yaml, section, known or {})
            for section in yaml.evals
            if evals is None or section.section.get("label") in evals
        ),
        tokenizer=TokenizerCard.of(opened) if opened else None,
        tokenizer_problem=problem,
        tokenizer_path=opened.path if opened else None,
        tokenizer_home=sections.home_of(recipe) if recipe else None,
    )


def _loader(yaml: TrainingYaml, section: LoaderSection, known: Mapping[str, StreamInMix]) -> Loader:
    def stream(found: StreamSection) -> StreamInMix:
        opened = known.get(found.name)
        if opened and opened.settings == found.settings:
            return opened
        try:
            return _of_section(found)
        except (RecipeError, Unreachable) as error:
            kept = "" if section.trains else KEEP
            raise type(error)(
                f"{section.label} of {yaml.origin}: {str(error).rstrip('.')}{kept}."
            ) from None

    streams = tuple(together(stream, section.stream_sections))
    return Loader(label=section.label, section=section.section, streams=streams)


def _of_section(section: StreamSection) -> StreamInMix:
    name, settings = section.name, section.settings
    if not section.place:
        raise RecipeError(
            f"The stream {name} has neither remote nor local, so nothing says where it is; add one of them."
        )
    folder = locate(section.place)
    if settings.get("split"):
        folder = folder / str(settings["split"])
    found = read_published(folder)
    if found is None or found.folder != folder:
        fix = (
            f"set its split to {found.folder.name}"
            if found
            else "correct its remote, local or split"
        )
        raise NotPublished(f"the stream {name} is not at {folder}: there is no {BASENAME}; {fix}")
    return _stream(name, found, settings)


def place_of(recipe: Recipe, spec: StreamSpec) -> str:
    """Where a stream of a recipe is read. One that others made may lie flat, without a folder for its split."""
    at = recipe.published(spec)
    is_flat = spec.source is None and not current(locate(at) / spec.split)
    return at if is_flat else f"{at}/{spec.split}"


def _published(recipe: Recipe, spec: StreamSpec) -> Stream | None:
    """A stream of the recipe, where `place_of` says; None where it is to be converted first. The read that looks whether it is there
    opens it too."""
    place = locate(recipe.published(spec))
    found = read_published(place / spec.split)
    if found or spec.source:
        return found
    if (flat := read_published(place)) is None:
        raise nothing_published(place / spec.split)
    return flat


def _of_recipe(
    recipe: Recipe, spec: StreamSpec, found: Stream | None, survey: Survey | None
) -> StreamInMix:
    assert found is not None, "streams that are not published are surveyed or refused"
    place = locate(recipe.published(spec))
    root, split = (place, "") if found.folder == place else (found.folder.parent, found.folder.name)
    settings = sections.stream_section(recipe, spec, str(root), split, found.index)
    stream = _stream(spec.name, found, settings, is_sourced=spec.source is not None)
    return dataclasses.replace(stream, survey=survey)


def _stream(
    name: str, found: Stream, settings: Mapping[str, Any], is_sourced: bool = False
) -> StreamInMix:
    return StreamInMix(
        name=name,
        folder=found.folder,
        index=found.index,
        manifest=found.manifest,
        settings=settings,
        is_sourced=is_sourced,
    )


def _at(url: str) -> StreamInMix:
    """The stream that a user points at: by the folder of its split, the index in it, or the folder above one split."""
    place = at.parent if (at := locate(url)).name == BASENAME else at
    found = read_published(place) or read_in(find_published(place))
    folder, where = found.folder, "remote" if place.is_store else "local"
    if folder == place:
        return _stream(_name(url, folder), found, {where: str(place)})
    name = place.name if folder.parent == place else _name(url, place)
    return _stream(name, found, {where: str(folder.parent), "split": folder.name})


def _name(url: str, folder: Location) -> str:
    """`web/train` for a folder named by its split, which alone says little; no more than the user named."""
    named = url.rstrip("/").removesuffix(f"/{BASENAME}")
    return f"{folder.parent.name}/{folder.name}".strip("/") if "/" in named else folder.name


def _tokenizer(yaml: TrainingYaml, recipe: Recipe | None) -> tuple[Tokenizer | None, str | None]:
    """The run's tokenizer, or why it could not be looked at."""
    from mdsmix.encode.pretrained import open_tokenizer
    from mdsmix.encode.published_folders import at_hand

    try:
        # The recipe's own spec is the one whose snapshot was taken when converting.
        spec = yaml.tokenizer and (recipe.tokenizer if recipe else yaml.tokenizer)
        return (open_tokenizer(at_hand(spec, yaml.places)) if spec else None), None
    except MdsmixError as error:
        return None, str(error)
