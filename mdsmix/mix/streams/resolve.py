"""A recipe, a training YAML or folders of published streams -> a Mix.

Each stream's index and manifest, two small files, are read here, several streams at once. The rest
of a stream is read only if a check needs it. A stream is read at its remote, or in its local folder
if it has no remote.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
from mdsmix.mix.streams.mix import (
    Loader,
    Mix,
    PhaseOfMix,
    StreamInMix,
    how_to_publish_again,
    published_tokenizers,
)
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.phases import list_chosen_phases, make_phase_recipe, require_one_phase
from mdsmix.recipe.plain_yaml import LENGTH
from mdsmix.recipe.read import RecipeInput, name_recipe, read_text, split_overrides
from mdsmix.shards.index import INDEX
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.shards.published import (
    PublishedStream,
    find_current,
    find_published,
    list_limited,
    make_not_published,
    open_published,
    open_stream_in,
)
from mdsmix.shards.token_ids import PACKED_COLUMNS, find_id_columns
from mdsmix.storage import Location, locate, map_threads
from mdsmix.tokenizer.published import adopt_hash

if TYPE_CHECKING:
    from mdsmix.tokenizer.card import Tokenizer

EVALS_HINT = (
    "; if this is an evaluation of the config's own, --keep-evals checks only its keys, and "
    "--drop-evals leaves it out"
)
OwnEvals = Literal["look", "keep", "drop"]
"""How to treat evaluations that are in a config and not in the recipe. `look`: open their streams,
and refuse the mix if that fails; `keep`: if their streams cannot be opened, check only their keys;
`drop`: leave them out.
"""
MixInput = str | os.PathLike[str] | Sequence[str] | Mapping[Any, Any] | Recipe
"""A mix as a user gives it: a recipe or a training config, as a path or as keys and values, or
published streams.
"""
Surveyor = Callable[[Recipe, StreamSpec], tuple[PublishedStream, str]]
"""A function that estimates an unpublished stream of a recipe. It returns the stream as it would be
published, and a sentence on how much of the source was read for the estimate.
"""


def resolve_mix(
    targets: Sequence[str],
    may_estimate: bool = False,
    survey: Surveyor | None = None,
    own_evals: OwnEvals = "look",
) -> Mix:
    """Open the mix that the words of a command name: a recipe, a training YAML, or streams.

    Args:
        targets: the words: a recipe and its overrides, or a training YAML, or streams.
        may_estimate: whether a recipe's shares may be computed from the first samples of streams
            whose tokens were not counted.
        survey: estimates an unpublished stream of a recipe from its source; without it such streams
            are refused.
        own_evals: what to do with a training YAML's evaluations: `look` opens their streams, `keep`
            checks only the keys of those that cannot be opened, `drop` leaves them out. `drop` also
            leaves out the evaluations of a recipe.
    """
    named = find_named_yaml(targets)
    if named is None:
        return make_stream_mix(list_stream_urls(targets))
    path = named.path
    overrides = named.overrides
    if not overrides and not is_recipe_file(path):
        return make_mix(read_text(path), path, own_evals=own_evals)
    return _open_recipe_mix(path, overrides, may_estimate, survey, own_evals)


def open_mix(
    mix: MixInput,
    overrides: Sequence[str] = (),
    *,
    may_estimate: bool = False,
    survey: Surveyor | None = None,
    own_evals: OwnEvals = "look",
) -> Mix:
    """Open a mix: a recipe, a training config or streams. Like `resolve_mix`, but a recipe or a
    training config may also be given as keys and values.

    Args:
        mix: a path, several words as on the command line, or keys and values. Keys and values with
            a `train_loader` and without `streams` are a training config, others a recipe.
        overrides: changes of a recipe, such as "max_seq_len=4096".
        may_estimate: this and the following arguments have the same meaning in `resolve_mix`.
    """
    if not isinstance(mix, (Mapping, Recipe)):
        words = [*list_words(mix), *overrides]
        return resolve_mix(words, may_estimate, survey, own_evals)
    if isinstance(mix, Mapping) and TRAIN in mix and not is_recipe_tree(mix):
        if overrides:
            raise RecipeError(
                "overrides are for a recipe, and this mapping is a training config, since it has a "
                f"{TRAIN} and no streams: change its keys instead."
            )
        return make_mix(dict(mix), "CONFIG", own_evals=own_evals)
    return _open_recipe_mix(mix, overrides, may_estimate, survey, own_evals)


def _open_recipe_mix(
    recipe_input: RecipeInput,
    overrides: Sequence[str],
    may_estimate: bool,
    survey: Surveyor | None,
    own_evals: OwnEvals,
) -> Mix:
    """Open the mix of a recipe, given as a path or as keys and values. The other arguments have the
    same meaning as in `resolve_mix`.
    """
    recipe = open_recipe(recipe_input, overrides)
    name = name_recipe(recipe_input)
    if own_evals == "drop":
        recipe = drop_evaluations(recipe, name)
    return make_recipe_mix(recipe, name, may_estimate, survey, overrides)


def list_words(mix: MixInput) -> list[str]:
    """Return the words with which a command would name the mix; none if it is not a path."""
    if isinstance(mix, (str, os.PathLike)):
        return [os.fspath(mix)]
    return [] if isinstance(mix, (Mapping, Recipe)) else list(map(os.fspath, mix))


class NamedYaml(NamedTuple):
    """A recipe or training YAML, as the words of a command name it."""

    path: str
    overrides: list[str]
    'Changes of the recipe, such as "max_seq_len=4096".'


def find_named_yaml(words: Sequence[str]) -> NamedYaml | None:
    """Return the recipe or training YAML that the words of a command name; None if they name
    streams.

    Raises RecipeError if they name a YAML and streams, or several YAMLs.
    """
    targets, overrides = split_overrides(words)
    if len(targets) == 1 and _is_yaml(targets[0]):
        return NamedYaml(targets[0], overrides)
    if overrides or any(map(_is_yaml, targets)):
        raise RecipeError(
            f"`{' '.join(words)}` is neither one recipe (with key=value overrides) nor a list of "
            "streams: name one recipe, or folders and URLs of streams."
        )
    return None


def find_named_recipe(words: Sequence[str]) -> Recipe | None:
    """Return the recipe that the words of a command name, with its overrides; None if they name
    streams or a training YAML.
    """
    named = find_named_yaml(words)
    if named is None or not (named.overrides or is_recipe_file(named.path)):
        return None
    return open_recipe(named.path, named.overrides)


def find_several_phases(words: Sequence[str]) -> NamedYaml | None:
    """Return the recipe that the words of a command name, if it has phases and chooses none of
    them; otherwise None.
    """
    recipe = find_named_recipe(words)
    if recipe is None or not recipe.phases or recipe.phase is not None:
        return None
    return find_named_yaml(words)


def _is_yaml(name: str) -> bool:
    """Check whether a word of a command names a YAML: a file, though not an index.json, or a name
    that ends like a YAML.
    """
    is_file = os.path.isfile(name) and os.path.basename(name) != INDEX
    return is_file or name.endswith((".yaml", ".yml"))


def list_stream_urls(urls: Iterable[str]) -> list[str]:
    """Return the URLs of single streams. A local folder that contains the streams of a whole mix is
    replaced by the `train` splits of these streams.
    """
    streams = list[str]()
    for url in urls:
        # A URL without such splits is a stream itself.
        streams += _list_train_splits(url) or [url]
    return streams


def _list_train_splits(url: str) -> list[str]:
    """Return the URLs of the published `train` splits of the streams in a local folder, such as
    `out/web/train` for `out`. Empty for a store.
    """
    folder = locate(url)
    if folder.is_store:
        return []
    splits = list[str]()
    for name in folder.folders():
        if find_current(folder / name / "train"):
            splits.append(f"{url}/{name}/train")
    return splits


def drop_evaluations(recipe: Recipe, path: str) -> Recipe:
    """Return the recipe with only its training streams, so that its evaluations need not be
    published.

    Args:
        path: the recipe's path, for messages.

    Raises RecipeError if the recipe has no training stream.
    """
    train = {spec.name: spec for spec in recipe.trained}
    if not train:
        raise RecipeError(
            f"{path} has no stream of `split: train`, so there is nothing to train on: add a "
            "stream to the recipe, or correct the split of a stream."
        )
    # The loader's name is fixed here: without its evaluations the recipe would choose another one.
    return replace(
        recipe, streams=train, train_loader={**recipe.train_loader, "name": recipe.loader}
    )


def is_recipe_file(path: str) -> bool:
    """Check whether a file is to be opened as a recipe, and not as a training YAML.

    Also returns True for a file of data (such as JSONL), since `open_recipe` refuses data with a
    message of its own. Returns False for any other file that cannot be parsed, since the reader of
    training YAMLs reports the line of the error.
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
    """Open the streams of a recipe, render its config, and return both as a mix.

    Args:
        path: the recipe's path, for messages.
        may_estimate: whether shares may be computed from the first samples of streams whose tokens
            were not counted.
        survey: estimates an unpublished stream from its source; without it such streams are
            refused.
        overrides: the recipe's overrides, for messages.

    Raises MixRefused if streams cannot fill their shares, and RecipeError if the recipe has phases
    and does not choose one.
    """
    require_one_phase(recipe, path)
    (mix,) = make_phase_mixes(recipe, path, may_estimate, survey, overrides)
    return mix


def make_phase_mixes(
    recipe: Recipe,
    path: str,
    may_estimate: bool,
    survey: Surveyor | None = None,
    overrides: Sequence[str] = (),
) -> list[Mix]:
    """Open the streams of a recipe, and return the mix of each phase that it chooses; one mix if it
    has no phases. The arguments and errors are those of `make_recipe_mix`.
    """
    mixes = list[Mix]()
    for opened in open_recipe_streams(recipe, path, may_estimate, survey, overrides):
        streams = opened.streams
        adopted = with_published_hash(opened.recipe, streams.values())
        config = foundry_config.make_sections(adopted, streams, {})
        mix = make_mix(config, path, streams, adopted, shares=opened.shares)
        mixes.append(replace(mix, overrides=overrides, phase=opened.phase))
    return mixes


def open_phase_mixes(
    recipe_input: RecipeInput,
    overrides: Sequence[str] = (),
    *,
    may_estimate: bool = False,
    survey: Surveyor | None = None,
    own_evals: OwnEvals = "look",
) -> list[Mix]:
    """Open the mix of each phase that a recipe chooses. The arguments are those of `open_mix`.

    Raises RecipeError if the recipe has no phases.
    """
    recipe = open_recipe(recipe_input, overrides)
    name = name_recipe(recipe_input)
    if not recipe.phases:
        raise RecipeError(f"{name} has no phases: add phases, or call the function for one mix.")
    if own_evals == "drop":
        recipe = drop_evaluations(recipe, name)
    return make_phase_mixes(recipe, name, may_estimate, survey, overrides)


def with_published_hash(recipe: Recipe, streams: Iterable[StreamInMix]) -> Recipe:
    """Return the recipe with the tokenizer hash that its streams were published with. This hash
    differs from today's if an earlier mdsmix, with another rule of hashing, published the streams.
    """
    from mdsmix.tokenizer.card import open_tokenizer

    # If the tokenizer cannot be opened, the check tokenizer-unseen reports why.
    with suppress(MdsmixError):
        tokenizer = open_tokenizer(recipe.tokenizer)
        adopted = adopt_hash(tokenizer, published_tokenizers(streams))
        if adopted.hash != tokenizer.hash:
            spec = replace(recipe.tokenizer, published_hash=adopted.hash)
            return replace(recipe, tokenizer=spec)
    return recipe


class RecipeStreams(NamedTuple):
    """The opened streams of a recipe, or of one of its phases."""

    recipe: Recipe
    "The recipe, or that of the phase."
    streams: dict[str, StreamInMix]
    "Name of a stream -> the stream, with its weight."
    shares: Apportioned | None
    "The recipe's shares as samples; None if it has no shares."
    phase: PhaseOfMix | None
    "None if the recipe has no phases."


def open_recipe_streams(
    recipe: Recipe,
    path: str,
    may_estimate: bool,
    survey: Surveyor | None = None,
    overrides: Sequence[str] = (),
) -> list[RecipeStreams]:
    """Open a recipe's streams, and set the weights that follow from its shares. If the recipe has
    phases, return the streams of each phase that it chooses.

    Args:
        path: the recipe's path, for messages.
        may_estimate: whether shares may be computed from the first samples of streams whose tokens
            were not counted.
        survey: estimates an unpublished stream from its source; without it such streams are
            refused.
        overrides: the recipe's overrides, for messages.

    Raises NotPublished if streams are missing and there is no `survey`, and MixRefused if they are
    missing only because a holdout was added to the recipe since it was converted.
    """
    # Open the published streams, many at a time.
    specs = [*recipe.streams.values()]
    opened = map_threads(lambda spec: _open_published(recipe, spec), specs)
    published = dict(zip((spec.name for spec in specs), opened, strict=True))

    # Refuse missing streams that cannot be estimated.
    missing = [spec for spec in specs if published[spec.name] is None]
    if missing and survey is None:
        present = [stream for stream in published.values() if stream]
        _refuse_new_holdouts(missing, present, path, overrides)
        urls = [f"{spec.name} at {locate(recipe.published(spec)) / spec.split}" for spec in missing]
        raise NotPublished(
            f"these streams are not published: {'; '.join(urls)}. Run `mdsmix convert` on this "
            "recipe first"
            f"{_hint_at_limited(recipe, missing)}."
        )

    # Estimate missing streams, one after the other: chat templates are rendered under an alarm
    # signal, which only the main thread gets.
    streams: dict[str, StreamInMix] = {}
    for spec in specs:
        stream = published[spec.name]
        if stream is None:
            assert survey is not None
            estimate, note = survey(recipe, spec)
            stream = _with_section(recipe, spec, estimate, note)
        streams[spec.name] = stream

    if recipe.phases:
        return _weigh_phases(recipe, streams, may_estimate)
    return [_weigh_streams(recipe, streams, may_estimate)]


def _weigh_phases(
    recipe: Recipe, streams: Mapping[str, StreamInMix], may_estimate: bool
) -> list[RecipeStreams]:
    """Return the streams of each chosen phase with their weights. The shares of all phases up to
    the last chosen one are computed, since max_repeat counts what earlier phases draw.
    """
    chosen = list_chosen_phases(recipe)
    opened = list[RecipeStreams]()
    drawn = dict[str, int]()  # name of a stream -> its samples in all phases so far
    for number, name in enumerate(recipe.phases):
        phase = PhaseOfMix(
            name=name, number=number, names=tuple(recipe.phases), drawn_before=dict(drawn)
        )
        try:
            weighed = _weigh_streams(make_phase_recipe(recipe, name), streams, may_estimate, phase)
        except MixRefused as refused:
            raise MixRefused(f"phase {name}: {refused}") from None
        assert weighed.shares is not None, "every phase has a budget, and so is by share"
        for share in weighed.shares.streams:
            drawn[share.stream] = drawn.get(share.stream, 0) + share.choose
        if name in chosen:
            opened.append(weighed)
    return opened


def _weigh_streams(
    recipe: Recipe,
    streams: Mapping[str, StreamInMix],
    may_estimate: bool,
    phase: PhaseOfMix | None = None,
) -> RecipeStreams:
    """Return the streams with the weights that follow from the recipe's shares, or with its own
    weights.

    Args:
        recipe: a recipe without phases, or that of one phase.
        streams: the opened streams, by name; those that are not in the recipe are left out.
        phase: the phase of the recipe.
    """
    own = {name: streams[name] for name in recipe.streams}
    if not recipe.is_by_share:
        return RecipeStreams(recipe, own, None, phase)
    loader = _make_train_loader(recipe, own.values())
    shares = apportion_recipe(recipe, loader, may_estimate, phase.drawn_before if phase else {})
    for share in shares.streams:
        stream = own[share.stream]
        settings = {**stream.settings, "choose": share.choose}
        own[share.stream] = replace(stream, settings=settings)
    return RecipeStreams(recipe, own, shares, phase)


def _refuse_new_holdouts(
    missing: Sequence[StreamSpec],
    published: Iterable[StreamInMix],
    path: str,
    overrides: Sequence[str],
) -> None:
    """Raise MixRefused if streams are missing only because the recipe has a new `holdout`: each is
    the holdout of a published stream that was converted without one.

    Args:
        missing: the streams of the recipe that are not published.
        published: the other streams of the recipe.
        path: the recipe's path, for the fix.
        overrides: the recipe's overrides, for the fix.
    """
    converted_without = set[str]()
    for stream in published:
        manifest = stream.trusted_manifest
        if manifest and not manifest.mixed and manifest.encoding.holdout is None:
            converted_without.add(stream.name)
    if not all(spec.held_out_of in converted_without for spec in missing):
        return
    changes = [
        f"{spec.held_out_of} was converted by another recipe: holdout was not set and is "
        f"{spec.holdout}, so {spec.name} is not published"
        for spec in missing
    ]
    raise MixRefused(
        f"recipe-changed: {'; '.join(changes)}. Fix: {how_to_publish_again(path, overrides)}; or "
        "undo the change of the recipe."
    )


def _hint_at_limited(recipe: Recipe, missing: Iterable[StreamSpec]) -> str:
    """Return a hint if missing streams were converted with `--limit`, which does not publish them;
    otherwise an empty string.
    """
    folders = list[Location]()
    for spec in missing:
        folders += list_limited(locate(recipe.published(spec)))
    if not folders:
        return ""
    targets = shlex.join(folder.url for folder in folders)
    return f", without --limit; to check what --limit converted, run `mdsmix check {targets}`"


def _make_train_loader(recipe: Recipe, streams: Iterable[StreamInMix]) -> Loader:
    """Return the recipe's train_loader before its streams have weights. The number of samples for
    each stream's share is computed from this loader, and the weights follow from these numbers.
    """
    section = foundry_config.make_loader_section(recipe, {})
    section["dataset"]["max_seq_len"] = recipe.max_seq_len
    trained = list[StreamInMix]()
    for stream in streams:
        if foundry_config.is_train_stream(recipe.streams[stream.name]):
            trained.append(stream)
    return Loader(label=TRAIN, section=section, streams=tuple(trained))


def make_stream_mix(urls: Sequence[str]) -> Mix:
    """Open the streams at these URLs as a mix without weights. Its loader follows from the columns
    of the streams (`_choose_loader`).

    Raises RecipeError if a stream is named twice.
    """
    streams = {stream.name: stream for stream in map_threads(_open_stream, urls)}
    folders = {stream.folder.url for stream in streams.values()}
    if len(folders) < len(urls):
        raise RecipeError(
            f"the streams {', '.join(urls)} contain one stream twice; name every stream once."
        )
    encodings = [stream.encoding for stream in streams.values() if stream.encoding]
    dataset: dict[str, Any] = {
        "streams": {name: dict(stream.settings) for name, stream in streams.items()},
        "decoder_only_format": True,
        "shuffle": True,
    }
    if encodings:
        dataset[LENGTH] = max(encoding.max_seq_len for encoding in encodings)
    for encoding in encodings:
        if encoding.pack and kind_of(encoding).has_targets:
            # Packed rows can be read only under the targets that they were packed with.
            for key in ("target_prompts", "target_responses"):
                dataset.setdefault(key, getattr(encoding, key))
    section = {"name": _choose_loader(streams.values()), "dataset": dataset}
    return replace(make_mix({TRAIN: section}, ", ".join(urls), streams), is_bare=True)


def _choose_loader(streams: Iterable[StreamInMix]) -> str:
    """Return the name of the loader that reads these streams: `mdsmix` if a stream is packed,
    `text` if all streams contain plain tokens or text, otherwise `finetuning`.
    """
    is_plain = True
    for stream in streams:
        if find_id_columns(stream.columns) == PACKED_COLUMNS:
            return MDSMIX_LOADER
        if "tokens" not in stream.columns and "text" not in stream.columns:
            is_plain = False
    return "text" if is_plain else "finetuning"


def make_mix(
    config: Settings | str,
    origin: str,
    opened: Mapping[str, StreamInMix] | None = None,
    recipe: Recipe | None = None,
    into: str | None = None,
    own_evals: OwnEvals = "look",
    shares: Apportioned | None = None,
) -> Mix:
    """Open the streams and the tokenizer of a config, and return them as a mix.

    Args:
        config: the text of a YAML, or its keys and values.
        origin: the file that the user named; with a `recipe`, the recipe's path.
        opened: streams that are open already, by name; they are not opened again.
        recipe: the recipe that `config` was rendered from; None if the user named a YAML or
            streams.
        into: path of the existing config that the recipe's sections were written into.
        own_evals: what to do with evaluations whose streams are not in `opened`: `look` opens their
            streams, `keep` checks only the keys of those that cannot be opened, `drop` leaves them
            out.
        shares: how many samples an epoch draws for each stream's share in the recipe.
    """
    opened = opened or {}
    yaml = parse_training_yaml(config, into or origin)
    tokenizer: Tokenizer | None = None
    problem = None
    try:
        tokenizer = _open_run_tokenizer(yaml, recipe)
    except MdsmixError as error:
        problem = str(error)
    train = open_section_streams(yaml.train, opened)
    evaluations = _open_evaluations(yaml, opened, own_evals)
    if tokenizer:
        streams = list(train.streams)
        for evaluation in evaluations.opened:
            streams += evaluation.streams
        tokenizer = adopt_hash(tokenizer, published_tokenizers(streams))
    return Mix(
        yaml=yaml,
        recipe_path=origin if recipe else None,
        recipe_spec=recipe,
        train=train,
        evals=tuple(evaluations.opened),
        unopened_evals=tuple(evaluations.unopened),
        tokenizer=TokenizerCard.from_tokenizer(tokenizer) if tokenizer else None,
        tokenizer_problem=problem,
        run_tokenizer=tokenizer,
        tokenizer_home=foundry_config.find_fetch_folder(recipe) if recipe else None,
        shares=shares,
    )


class Evaluations(NamedTuple):
    """The evaluations of a training YAML."""

    opened: list[Loader]
    unopened: list[LoaderSection]
    "Evaluations that are kept (--keep-evals) although their streams could not be opened."


def _open_evaluations(
    yaml: TrainingYaml, opened: Mapping[str, StreamInMix], own_evals: OwnEvals
) -> Evaluations:
    """Open the evaluations of a training YAML.

    Args:
        opened: the streams of the recipe, by name. If all streams of an evaluation are among them,
            the evaluation is the recipe's.
        own_evals: what to do with the other evaluations: `look` opens their streams, `keep` checks
            only the keys of those that cannot be opened, `drop` leaves them out.
    """
    evaluations = Evaluations([], [])
    for section in yaml.evals:
        streams = section.stream_sections
        is_of_recipe = bool(streams) and all(_is_open(stream, opened) for stream in streams)
        if own_evals == "drop" and not is_of_recipe:
            continue
        try:
            evaluations.opened.append(open_section_streams(section, opened))
        except MdsmixError:
            if own_evals == "look" or is_of_recipe:
                raise
            evaluations.unopened.append(section)
    return evaluations


def _is_open(section: StreamSection, opened: Mapping[str, StreamInMix]) -> bool:
    """Check whether the stream of a section is open already, under the same name and settings."""
    stream = opened.get(section.name)
    return stream is not None and stream.settings == section.settings


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
        if _is_open(section, opened):
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


def _open_published(recipe: Recipe, spec: StreamSpec) -> StreamInMix | None:
    """Open a published stream of a recipe; None if the stream must be converted first.

    The recipe does not convert a stream without a source, so this stream must be published already:
    in the folder of its split, or in the folder above it.

    Raises NotPublished if a stream without a source is in neither folder.
    """
    folder = locate(recipe.published(spec))
    stream = open_published(folder / spec.split)
    if stream is None and not spec.source:
        stream = open_published(folder)
        if stream is None:
            raise make_not_published(folder / spec.split)
    return _with_section(recipe, spec, stream) if stream else None


def _with_section(
    recipe: Recipe, spec: StreamSpec, stream: PublishedStream, survey: str | None = None
) -> StreamInMix:
    """Combine a stream with the section that the recipe renders for it.

    Args:
        spec: the stream in the recipe.
        survey: if the stream is an estimate, a sentence on how much of its source was read.
    """
    root, split = _split_folder(stream, locate(recipe.published(spec)))
    settings = foundry_config.make_stream_section(recipe, spec, str(root), split, stream.index)
    return StreamInMix.of(stream, spec.name, settings, survey)


def _open_stream(url: str) -> StreamInMix:
    """Open a stream that a user names by the folder of its split (`out/web/train`), by the index in
    this folder, or by the folder above its only split (`out/web`).
    """
    folder = locate(url)
    if folder.name == INDEX:
        folder = folder.parent
    stream = open_published(folder) or open_stream_in(find_published(folder))
    root, split = _split_folder(stream, folder)
    settings = {"remote" if folder.is_store else "local": str(root)}
    if split:
        settings["split"] = split
    return StreamInMix.of(stream, url, settings)


def _split_folder(stream: PublishedStream, root: Location) -> tuple[Location, str]:
    """Return the folder and the split that name the stream in a loader, such as `out/web` and
    `train`. The split is empty if the stream is in `root` itself.

    Args:
        root: the folder of the stream, or the folder above its split.
    """
    if stream.folder == root:
        return root, ""
    return stream.folder.parent, stream.folder.name


def _open_run_tokenizer(yaml: TrainingYaml, recipe: Recipe | None) -> Tokenizer | None:
    """Open the run's tokenizer; None if the YAML names none."""
    from mdsmix.tokenizer.card import open_tokenizer
    from mdsmix.tokenizer.published import localize_spec

    spec = yaml.tokenizer
    if spec is None:
        return None
    if recipe:
        spec = recipe.tokenizer  # the spec that conversion opened the tokenizer with
    return open_tokenizer(localize_spec(spec, yaml.stream_urls))
