"""What cannot be right in a recipe, whatever the data and the kind of a stream: each rule yields one sentence that says why and what to do.

`mdsmix.kinds.open_recipe` adds the rules of the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from mdsmix.recipe.amounts import Budget, read_budget, read_share
from mdsmix.recipe.spec import BY_BUDGET, UNSOURCED, Recipe, StreamSpec, WeightSpec, foreign_keys
from mdsmix.typed import brief
from mdsmix.words import hint, listed

TARGET_PROMPTS = re.compile(r"none|all|length>=[1-9]\d*")
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TOKENIZER_FOLDER = re.compile(r"tokenizer-[0-9a-f]{8}")
PROCESSOR_FOLDER = re.compile(r"processor-[0-9a-f]{8}")
"What mdsmix names the folders of a tokenizer and of a processor beside the streams."
OWN_SPLIT = re.compile(r"limit-\d+|.+-[0-9a-f]{8}")
"Folders beside a split: first looks, and versions, which `mdsmix gc --keep` deletes."


def is_folder_beside(name: str) -> bool:
    """Whether a folder beside the streams is named as those that mdsmix keeps a tokenizer or a processor in."""
    return bool(TOKENIZER_FOLDER.fullmatch(name) or PROCESSOR_FOLDER.fullmatch(name))


def contradictions(recipe: Recipe) -> Iterator[str]:
    """Sentences on what cannot be right, whatever the data."""
    if not recipe.streams:
        yield "streams is empty; name at least one stream, for example web."
    dataset = recipe.train_loader.get("dataset")
    if dataset is not None and not isinstance(dataset, Mapping):
        yield f"train_loader.dataset is {brief(dataset)}; it must hold keys, for example packing_ratio."
    yield from target_contradictions(
        recipe.target_prompts, recipe.target_responses, recipe.decoder_only_format
    )
    if recipe.sourced and not (recipe.remote or recipe.local):
        yield "neither remote nor local says where to publish; set local to a folder or remote to an s3:// URL."
    yield from mix_contradictions(recipe)
    for stream in recipe.streams.values():
        for sentence in _stream_contradictions(recipe, stream):
            yield f"streams.{stream.name}: {sentence}"


def target_contradictions(
    prompts: str, responses: str, decoder_only_format: bool = True
) -> Iterator[str]:
    """Sentences on target policies, of a recipe or of a training YAML, that LLM-Foundry does not have."""
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
    if not STREAM_NAME.fullmatch(stream.name):
        yield "a stream's name becomes a folder: use letters, digits, '.', '_' and '-'."
    if is_folder_beside(stream.name):
        kept = stream.name.partition("-")[0]
        yield (
            f"{kept}- and 8 hex digits name the folder in which mdsmix keeps a {kept} beside the streams: name the stream otherwise."
        )
    if not STREAM_NAME.fullmatch(stream.split):
        yield f"split is {stream.split!r}; it names one folder: use letters, digits, '.', '_' and '-'."
    if stream.source is None:
        yield from foreign_keys(stream, {UNSOURCED})
        if not (stream.remote or stream.local):
            yield "has neither a source nor a remote or local; say what to convert or where it was published."
        return
    if OWN_SPLIT.fullmatch(stream.split):
        yield (
            f"split is {stream.split!r}; limit-N and names that end in - and 8 hex digits are those of mdsmix's own first "
            "looks and versions, which are replaced and deleted: name it otherwise."
        )
    yield from sample_contradictions(recipe, stream)
    if stream.holdout is not None:
        yield from _holdout_contradictions(recipe, stream)
    if not stream.source.path:
        yield "source.path is empty; name a file, a glob or an s3:// URL."
    if stream.kind is None:
        yield "kind is missing; it is pretraining or finetuning."


def _holdout_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    if stream.split != "train":
        yield f"holdout takes a share of what is trained on, and split is {stream.split}: take one of the two out."
    if held_out_name(stream) in recipe.streams:
        yield f"holdout makes a stream {held_out_name(stream)}, and the recipe has one of that name: rename it."


def held_out_name(stream: StreamSpec) -> str:
    """The name of a held-out stream, in tables and as the label of an eval_loader."""
    return f"{stream.name}-eval"


def with_held_out(recipe: Recipe) -> Recipe:
    """The recipe with a stream for evaluation behind each one that has a holdout."""
    streams = dict[str, StreamSpec]()
    for stream in recipe.streams.values():
        streams[stream.name] = stream
        if stream.holdout is not None:
            name = held_out_name(stream)
            streams[name] = replace(stream, name=name, split="eval", held_out_of=stream.name)
    return replace(recipe, streams=streams)


OF_SHARES = ("count", "max_repeat", "absolute")
"Keys that say something of shares alone."


def mix_contradictions(recipe: Recipe) -> Iterator[str]:
    """Sentences on `mix` and the keys beside it."""
    for name, weight in recipe.mix.items():
        spec = recipe.streams.get(name)
        if spec is None:
            yield f"mix.{name} names no stream; {hint(name, list(recipe.streams), 'streams holds')}"
        elif weight.share is not None and spec not in recipe.trained:
            yield f"mix.{name} is the share of a stream of the split {spec.split}, which is evaluated on and not mixed: take it out."
        if len(weight.given) != 1:
            yield f"mix.{name} must give exactly one of repeat, proportion, choose and share; it gives {list(weight.given) or 'none'}."
    if recipe.is_by_share:
        yield from _beside_shares(recipe)
        yield from _sum_contradictions(recipe)
        yield from _budget_contradictions(recipe)
        return
    for key in OF_SHARES:
        if getattr(recipe, key) != getattr(Recipe, key):
            yield f"{key} speaks of shares, and the recipe has neither a share nor a budget: add mix.<stream>.share or budget, or take {key} out."


def _beside_shares(recipe: Recipe) -> Iterator[str]:
    """Shares decide all streams, so no other weight has a place beside them."""
    for name, weight in recipe.mix.items():
        if weight.share is None:
            yield (
                f"mix.{name} gives {', '.join(weight.given)} in a mix by share, budget or temperature: one of the two decides how often a "
                "stream is drawn; give every stream a share, or none."
            )
    dataset = recipe.train_loader.get("dataset")
    if isinstance(dataset, Mapping) and dataset.get("epoch_size"):
        yield "train_loader.dataset.epoch_size stands in a mix by shares, where budget says how long an epoch is: take epoch_size out."


def _sum_contradictions(recipe: Recipe) -> Iterator[str]:
    written = written_shares(recipe)
    given = {name: share for name, share in written.items() if share is not None}
    without = listed([name for name in written if name not in given])
    total = sum(given.values(), Fraction(0))
    is_percent = {n: str(recipe.mix[n].share).strip().endswith("%") for n in given}
    large = [n for n, share in given.items() if share > 1 and not is_percent[n]]
    if large and (any(is_percent.values()) or recipe.absolute):
        yield f"mix.{large[0]}.share is {recipe.mix[large[0]].share}, more than the whole: where it is meant in percent, write the %."
    if without and recipe.absolute:
        yield f"absolute: true takes every share of the whole budget, and without a share: {without}. Give each stream one; 0 leaves a stream out."
    elif without and total >= 1:
        yield (
            f"the shares come to {float(total):.0%}, and nothing is left for {without}: lower them, or give each stream a share; 0 leaves "
            "a stream out."
        )
    if not without and not total:
        yield "the shares sum to 0, so no sample would be drawn: give a stream a share above 0."
    if not without and recipe.temperature != 1:
        yield f"temperature is {recipe.temperature}, and every stream has a share, so it decides nothing: take it out, or some shares."


def _budget_contradictions(recipe: Recipe) -> Iterator[str]:
    budget, names = budget_of(recipe), [s.name for s in recipe.trained]
    if recipe.absolute and budget is None:
        yield "absolute: true takes shares of the budget, and there is none: add budget, for example 2B tokens."
    if budget and budget.stream and budget.stream not in names:
        yield f"budget counts passes of {budget.stream}, which is no stream that is trained on; {hint(budget.stream, names, 'these are')}"
    if budget and recipe.absolute and recipe.count not in (None, budget.unit):
        yield f"absolute: true takes shares of the budget, which is {budget}, and count is {recipe.count}: leave count out."


def written_shares(recipe: Recipe) -> dict[str, Fraction | None]:
    """Each stream that is trained on, with its share as it is written; None where it has none."""
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
    """What the stream's share of the budget comes to; ValueError says why it is not known before the streams are converted."""
    budget, shares = budget_of(recipe), written_shares(recipe)
    if budget is None:
        raise ValueError("there is none: add budget, for example 2B tokens")
    if budget.unit != "tokens" or recipe.count not in (None, "tokens"):
        raise ValueError(f"it is {budget}: give budget and count in tokens")
    name = stream.held_out_of or stream.name
    if name not in shares:
        raise ValueError(f"a stream of the split {stream.split} has no share: take it out")
    given = [share for share in shares.values() if share is not None]
    total, share = sum(given, Fraction(0)), shares[name]
    if share is None and len(given) == len(shares) - 1 and not recipe.absolute:
        share = 1 - total  # all that the others leave
    if not share:
        raise ValueError(
            f"it has no share above 0 that is known before a conversion: write mix.{name}.share"
        )
    is_normal = len(given) == len(shares) and not recipe.absolute
    return budget.amount * share / (total if is_normal else 1)


def with_budget(recipe: Recipe) -> Recipe:
    """The recipe in which every stream that is converted and trained on takes what the budget wants, where it names no sample."""
    shares = written_shares(recipe)
    streams = {
        s.name: replace(s, sample=BY_BUDGET)
        if s.source and s.sample is None and (s.held_out_of or s.name) in shares
        else s
        for s in recipe.streams.values()
    }
    return replace(recipe, streams=streams)
