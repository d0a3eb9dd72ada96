"""A recipe, a training YAML or folders of published streams -> a Mix.

`command_words.py` finds out what a user has named. `recipe_streams.py` and `open_streams.py` open
the streams, and this file makes a Mix of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER
from mdsmix.foundry_yaml.training_yaml import (
    TRAIN,
    LoaderSection,
    Settings,
    TrainingYaml,
    is_recipe_tree,
    parse_training_yaml,
)
from mdsmix.kinds import kind_of, open_recipe
from mdsmix.mix.epoch.apportion import Apportioned
from mdsmix.mix.render import foundry_config
from mdsmix.mix.streams.command_words import (
    MixInput,
    find_named_yaml,
    is_recipe_file,
    list_stream_urls,
    list_words,
)
from mdsmix.mix.streams.mix import (
    Loader,
    Mix,
    StreamInMix,
    list_published_tokenizers,
)
from mdsmix.mix.streams.open_streams import is_open, open_named_stream, open_section_streams
from mdsmix.mix.streams.recipe_streams import Surveyor, open_recipe_streams, with_published_hash
from mdsmix.recipe import Recipe
from mdsmix.recipe.phases import require_one_phase
from mdsmix.recipe.plain_yaml import LENGTH
from mdsmix.recipe.read import RecipeInput, name_recipe, read_text
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.shards.token_ids import PACKED_COLUMNS, find_id_columns
from mdsmix.storage import map_threads
from mdsmix.tokenizer.published import adopt_hash

if TYPE_CHECKING:
    from mdsmix.tokenizer.card import Tokenizer

OwnEvals = Literal["look", "keep", "drop"]
"""How to treat evaluations that are in a config and not in the recipe. `look`: open their streams,
and refuse the mix if that fails; `keep`: if their streams cannot be opened, check only their keys;
`drop`: leave them out.
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
        raise RecipeError(
            f"{name} has no phases: add phases to the recipe, or call the function for a recipe "
            "without phases: mdsmix.check or mdsmix.plan."
        )
    if own_evals == "drop":
        recipe = drop_evaluations(recipe, name)
    return make_phase_mixes(recipe, name, may_estimate, survey, overrides)


def make_stream_mix(urls: Sequence[str]) -> Mix:
    """Open the streams at these URLs as a mix without weights. Its loader follows from the columns
    of the streams (`_choose_loader`), and its targets are those that the first stream was made for.

    Raises RecipeError if a stream is named twice.
    """
    streams = {stream.name: stream for stream in map_threads(open_named_stream, urls)}
    folders = {stream.folder.url for stream in streams.values()}
    if len(folders) < len(urls):
        raise RecipeError(
            f"the streams {', '.join(urls)} contain one stream twice; name every stream once."
        )
    encodings = [stream.encoding for stream in streams.values() if stream.encoding]
    dataset: dict[str, Any] = {
        "streams": {name: dict(stream.settings) for name, stream in streams.items()},
        "shuffle": True,
    }
    if encodings:
        dataset[LENGTH] = max(encoding.max_seq_len for encoding in encodings)
    # Rows are judged under the targets that they were made for: nothing says that a run has others.
    for encoding in encodings:
        if kind_of(encoding).has_targets:
            for key in ("decoder_only_format", "target_prompts", "target_responses"):
                dataset.setdefault(key, getattr(encoding, key))
    dataset.setdefault("decoder_only_format", True)
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
        tokenizer = adopt_hash(tokenizer, list_published_tokenizers(streams))
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
        is_of_recipe = bool(streams) and all(is_open(stream, opened) for stream in streams)
        if own_evals == "drop" and not is_of_recipe:
            continue
        try:
            evaluations.opened.append(open_section_streams(section, opened))
        except MdsmixError:
            if own_evals == "look" or is_of_recipe:
                raise
            evaluations.unopened.append(section)
    return evaluations


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
