"""Rules for a recipe, whatever the data and the kinds of its streams. A broken rule yields one
sentence that says why and what to do.

`mdsmix.kinds.open_recipe` adds the rules of the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from mdsmix.messages import join_names, suggest_key
from mdsmix.recipe.amounts import Budget, read_budget, read_share
from mdsmix.recipe.spec import Recipe, WeightSpec
from mdsmix.recipe.stream_spec import BY_BUDGET, UNSOURCED, StreamSpec, foreign_keys
from mdsmix.schema import shorten
from mdsmix.storage import find_key_terminator

TARGET_PROMPTS = re.compile(r"none|all|length>=[1-9]\d*")
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PROCESSOR_FOLDER = re.compile(r"processor-[0-9a-f]{8}")
FOLDER_BESIDE = re.compile(rf"tokenizer-[0-9a-f]{{8}}|{PROCESSOR_FOLDER.pattern}")
"Names of the folders beside the streams in which mdsmix keeps a tokenizer or a processor."
OWN_SPLIT = re.compile(r"limit-\d+|.+-[0-9a-f]{8}")
"""Names of folders that mdsmix makes beside a split: first looks (`limit-N`), and versions, which
`mdsmix gc --keep` deletes.
"""


def is_folder_beside(name: str) -> bool:
    """Whether mdsmix keeps a tokenizer or a processor in a folder of this name:
    `tokenizer-0123abcd`.
    """
    return FOLDER_BESIDE.fullmatch(name) is not None


def contradictions(recipe: Recipe) -> Iterator[str]:
    """One sentence for each rule that the recipe breaks."""
    if not recipe.streams:
        yield "streams is empty; name at least one stream, for example web."
    dataset = recipe.train_loader.get("dataset")
    if dataset is not None and not isinstance(dataset, Mapping):
        yield f"train_loader.dataset is {shorten(dataset)}; it must hold keys, for example packing_ratio."
    yield from target_contradictions(
        recipe.target_prompts, recipe.target_responses, recipe.decoder_only_format
    )
    if recipe.sourced and not (recipe.remote or recipe.local):
        yield "neither remote nor local says where to publish; set local to a folder or remote to an s3:// URL."
    yield from mix_contradictions(recipe)
    for stream in recipe.streams.values():
        for sentence in _stream_contradictions(recipe, stream):
            yield f"streams.{stream.name}: {sentence}"


def target_contradictions(prompts: str, responses: str, decoder_only_format: bool) -> Iterator[str]:
    """Sentences on target policies that LLM-Foundry does not have, in a recipe or a
    training YAML.
    """
    if not TARGET_PROMPTS.fullmatch(prompts):
        yield f"target_prompts is {prompts!r}; it must be none, all or length>=N with N of at least 1."
    if responses not in ("last", "all"):
        yield f"target_responses is {responses!r}; it must be last or all."
    if not decoder_only_format and (prompts, responses) != ("none", "last"):
        yield (
            f"target_prompts: {prompts} and target_responses: {responses} stand beside decoder_only_format: false; "
            "that allows only target_prompts: none and target_responses: last, as LLM-Foundry does."
        )


def _stream_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    place = f"{recipe.published(stream)}/{stream.split}"
    if sign := find_key_terminator(place):
        yield (
            f"its place {place} has a `{sign}`, and Streaming, which reads URLs as browsers do, would ask the store for what stands before it: "
            "take it out of remote, the stream's name or its split."
        )
    if not STREAM_NAME.fullmatch(stream.name) or is_folder_beside(stream.name):
        yield (
            "a stream's name becomes a folder: use letters, digits, '.', '_' and '-'; tokenizer- and processor- with 8 hex digits are "
            "those that mdsmix keeps beside the streams."
        )
    is_own = stream.source and OWN_SPLIT.fullmatch(stream.split)
    if not STREAM_NAME.fullmatch(stream.split) or is_own:
        yield (
            f"split is {stream.split!r}; it names one folder: use letters, digits, '.', '_' and '-'; limit-N and names that end in - and "
            "8 hex digits are those of mdsmix's own first looks and versions, which are replaced and deleted."
        )
    if stream.source is None:
        yield from foreign_keys(stream, {UNSOURCED})
        if not (stream.remote or stream.local):
            yield "has neither a source nor a remote or local; say what to convert or where it was published."
        return
    yield from sample_contradictions(recipe, stream)
    if stream.holdout is not None and stream.split != "train":
        yield f"holdout takes a share of what is trained on, and split is {stream.split}: take one of the two out."
    if stream.holdout is not None and held_out_name(stream) in recipe.streams:
        yield f"holdout makes a stream {held_out_name(stream)}, and the recipe has one of that name: rename it."
    if not stream.source.path:
        yield "source.path is empty; name a file, a glob or an s3:// URL."
    if stream.kind is None:
        yield "kind is missing; it is pretraining or finetuning."


def held_out_name(stream: StreamSpec) -> str:
    """The name of a held-out stream, in tables and as the label of an eval_loader."""
    return f"{stream.name}-eval"


def with_held_out(recipe: Recipe) -> Recipe:
    """The recipe with an evaluation stream after each stream that has a holdout."""
    streams = dict[str, StreamSpec]()
    for stream in recipe.streams.values():
        streams[stream.name] = stream
        if stream.holdout is not None:
            name = held_out_name(stream)
            streams[name] = replace(stream, name=name, split="eval", held_out_of=stream.name)
    return replace(recipe, streams=streams)


def mix_contradictions(recipe: Recipe) -> Iterator[str]:
    """Sentences on `mix` and the keys beside it."""
    for name, weight in recipe.mix.items():
        spec = recipe.streams.get(name)
        if spec is None:
            yield f"mix.{name} names no stream; {suggest_key(name, list(recipe.streams), 'streams holds')}"
        elif weight.share is not None and spec not in recipe.trained:
            yield f"mix.{name} is the share of a stream of the split {spec.split}, which is evaluated on and not mixed: take it out."
        given = ", ".join(weight.given)
        if len(weight.given) != 1:
            yield f"mix.{name} must give exactly one of repeat, proportion, choose and share; it gives {given or 'none'}."
        if weight.share is None and recipe.is_by_share:
            yield (
                f"mix.{name} gives {given} in a mix by share, budget or temperature: one of the two decides how often a stream is drawn; "
                "give every stream a share, or none."
            )
    if recipe.is_by_share:
        yield from _share_contradictions(recipe)
        return
    for key in ("count", "max_repeat", "absolute"):
        if getattr(recipe, key) != getattr(Recipe, key):
            yield f"{key} speaks of shares, and the recipe has neither a share nor a budget: add mix.<stream>.share or budget, or take {key} out."


def _share_contradictions(recipe: Recipe) -> Iterator[str]:
    written, budget = written_shares(recipe), budget_of(recipe)
    given = {name: share for name, share in written.items() if share is not None}
    without = join_names([name for name in written if name not in given])
    total = sum(given.values(), Fraction(0))
    percents = {name for name in given if "%" in str(recipe.mix[name].share)}
    large = [name for name, share in given.items() if share > 1 and name not in percents]
    if large and (percents or recipe.absolute):
        yield f"mix.{large[0]}.share is {recipe.mix[large[0]].share}, more than the whole: where it is meant in percent, write the %."
    if without and recipe.absolute:
        yield f"absolute: true takes every share of the whole budget, and without a share: {without}. Give each stream one; 0 leaves a stream out."
    elif without and total >= 1:
        yield f"the shares come to {float(total):.0%}, and nothing is left for {without}: lower them, or give each stream a share; 0 leaves a stream out."
    elif not without and percents and total != 1 and not recipe.absolute:
        sum_of_all = f"{float(100 * total):,.10g}%"
        yield (
            f"the shares of the mix come to {sum_of_all}, and shares in percent must come to 100%: correct them, leave one out, which "
            "then is the rest, or write them without %, as ratios."
        )
    elif not without and not total:
        yield "the shares sum to 0, so no sample would be drawn: give a stream a share above 0."
    elif not without and recipe.temperature != 1:
        yield f"temperature is {recipe.temperature}, and every stream has a share, so it decides nothing: take it out, or some shares."
    if recipe.absolute and budget is None:
        yield "absolute: true takes shares of the budget, and there is none: add budget, for example 2B tokens."
    if budget and budget.stream and budget.stream not in written:
        yield f"budget counts passes of {budget.stream}, which is no stream that is trained on; {suggest_key(budget.stream, list(written), 'these are')}"
    if budget and recipe.absolute and recipe.count not in (None, budget.unit):
        yield f"absolute: true takes shares of the budget, which is {budget}, and count is {recipe.count}: leave count out."
    dataset = recipe.train_loader.get("dataset")
    if isinstance(dataset, Mapping) and dataset.get("epoch_size"):
        yield "train_loader.dataset.epoch_size stands in a mix by shares, where budget says how long an epoch is: take epoch_size out."


def written_shares(recipe: Recipe) -> dict[str, Fraction | None]:
    """The share of each stream that is trained on, by name; None where the recipe gives none."""
    weights = {s.name: recipe.mix.get(s.name, WeightSpec()) for s in recipe.trained}
    return {n: None if w.share is None else read_share(w.share) for n, w in weights.items()}


def budget_of(recipe: Recipe) -> Budget | None:
    return None if recipe.budget is None else read_budget(recipe.budget)


def sample_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Sentences on `sample: budget` of a stream with a source."""
    if stream.sample == BY_BUDGET:
        try:
            tokens_wanted(recipe, stream)
        except ValueError as error:
            yield f"sample: budget takes what the stream's share of the budget wants, and {error}, or write sample: 5%."


def tokens_wanted(recipe: Recipe, stream: StreamSpec) -> Fraction:
    """The tokens of the stream's share of the budget. ValueError says why the number is unknown
    before the streams are converted.
    """
    budget, shares = budget_of(recipe), written_shares(recipe)
    if budget is None:
        raise ValueError("there is none: add budget, for example 2B tokens")
    if budget.unit != "tokens" or recipe.count not in (None, "tokens"):
        raise ValueError(f"it is {budget}: give budget and count in tokens")
    given, name = (
        {n: s for n, s in shares.items() if s is not None},
        stream.held_out_of or stream.name,
    )
    if shares.keys() - given.keys() == {name} and not recipe.absolute:
        given[name] = 1 - sum(given.values(), Fraction(0))  # all that the other streams leave
    if not given.get(name):
        raise ValueError(
            f"it has no share above 0 that is known before a conversion: write mix.{name}.share"
        )
    is_part = recipe.absolute or len(given) < len(shares)
    return budget.amount * given[name] / (1 if is_part else sum(given.values()))


def with_budget(recipe: Recipe) -> Recipe:
    """The recipe with `sample: budget` set for each stream that is converted, is trained on and
    names no sample.
    """
    trained, streams = written_shares(recipe), dict(recipe.streams)
    for name, stream in streams.items():
        if stream.source and stream.sample is None and (stream.held_out_of or name) in trained:
            streams[name] = replace(stream, sample=BY_BUDGET)
    return replace(recipe, streams=streams)
