"""What cannot be right in a recipe, whatever the data and the kind of a stream: each rule yields one sentence that says why and what to do.

`mdsmix.kinds.open_recipe` adds the rules of the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from mdsmix.recipe.amounts import (
    read_budget,
    read_share,
    sample_contradictions,
    told,
    written_shares,
)
from mdsmix.recipe.spec import UNSOURCED, Recipe, StreamSpec, WeightSpec, foreign_keys
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
    if recipe.loader not in ("text", "finetuning", "mdsmix"):
        yield f"train_loader.name is {recipe.loader!r}; LLM-Foundry has the loaders text and finetuning, and with mdsmix beside it mdsmix."
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
        if name not in recipe.streams:
            yield f"mix.{name} names no stream; {hint(name, list(recipe.streams), 'streams holds')}"
        if len(weight.given) != 1:
            yield f"mix.{name} must give exactly one of repeat, proportion, choose and share; it gives {list(weight.given) or 'none'}."
        yield from _value_contradictions(name, weight)
    if recipe.is_by_share:
        yield from _beside_weights(recipe)
        yield from _share_contradictions(recipe)
        yield from _budget_contradictions(recipe)
        return
    for key in OF_SHARES:
        if getattr(recipe, key) != getattr(Recipe, key):
            yield (
                f"{key} speaks of shares, and the recipe has neither a share nor a budget: add mix.<stream>.share or budget, or "
                f"take {key} out."
            )


def _value_contradictions(name: str, weight: WeightSpec) -> Iterator[str]:
    numbers = {
        k: v for k, v in weight.given.items() if k != "share" and isinstance(v, (int, float))
    }
    if any(not value >= 0 for value in numbers.values()):
        yield f"mix.{name} gives a weight below 0: {numbers}."
    if weight.share is not None:
        try:
            read_share(weight.share)
        except ValueError as error:
            yield f"mix.{name}.share is {told(weight.share)}; {error}."


def _beside_weights(recipe: Recipe) -> Iterator[str]:
    """Shares decide all streams, so no other weight has a place beside them."""
    others = [n for n, w in recipe.mix.items() if set(w.given) - {"share"}]
    has_shares = any(w.share is not None for w in recipe.mix.values())
    by = "share" if has_shares else "temperature" if recipe.budget is None else "budget"
    if others:
        yield (
            f"{by} stands beside the {', '.join(recipe.mix[others[0]].given)} of {listed(others)}: one of the two decides how "
            "often a stream is drawn; give every stream a share, or none."
        )
    dataset = recipe.train_loader.get("dataset")
    if isinstance(dataset, Mapping) and dataset.get("epoch_size"):
        yield (
            f"train_loader.dataset.epoch_size stands beside {by}, and budget says how long an epoch is: take "
            "epoch_size out."
        )


def _share_contradictions(recipe: Recipe) -> Iterator[str]:
    for name, weight in recipe.mix.items():
        spec = recipe.streams.get(name)
        if weight.share is not None and spec is not None and spec not in recipe.trained:
            yield f"mix.{name} is the share of a stream of the split {spec.split}, which is evaluated on and not mixed: take it out."
    with suppress(ValueError):  # a share that is none is told above
        yield from _sum_contradictions(recipe, written_shares(recipe))


def _sum_contradictions(recipe: Recipe, written: Mapping[str, Fraction | None]) -> Iterator[str]:
    given = {name: share for name, share in written.items() if share is not None}
    without, total = [n for n in written if n not in given], sum(given.values(), Fraction(0))
    percents = [n for n in given if str(recipe.mix[n].share).strip().endswith("%")]
    large = [n for n, share in given.items() if share > 1 and n not in percents]
    if large and (percents or recipe.absolute):
        yield (
            f"mix.{large[0]}.share is {told(recipe.mix[large[0]].share)}, more than the whole; where it is meant in percent, write "
            f"{told(recipe.mix[large[0]].share)}%."
        )
    if without and recipe.absolute:
        yield (
            f"absolute: true takes every share of the whole budget, and without a share: {listed(without)}. Give each stream one; "
            "0 leaves a stream out."
        )
    elif without and given and total >= 1:
        yield (
            f"the shares of {listed(list(given))} come to {float(total):.0%}, and nothing is left for {listed(without)}: lower them, "
            "or give each stream a share; 0 leaves a stream out."
        )
    if not without and given and not total:
        yield f"the shares of {listed(list(given))} sum to 0, so no sample would be drawn: give one of them a share above 0."
    if not without and given and recipe.temperature != 1:
        yield (
            f"temperature is {recipe.temperature}, and every stream has a share, so it decides nothing: take it out, or the shares "
            "that it is to decide."
        )


def _budget_contradictions(recipe: Recipe) -> Iterator[str]:
    if recipe.budget is None:
        if recipe.absolute:
            yield "absolute: true takes shares of the budget, and there is none: add budget, for example 2B tokens."
        return
    try:
        budget = read_budget(recipe.budget)
    except ValueError as error:
        yield f"budget is {told(recipe.budget)}; {error}."
        return
    names = [s.name for s in recipe.trained]
    if budget.stream and budget.stream not in names:
        yield f"budget counts passes of {budget.stream}, which is no stream that is trained on; {hint(budget.stream, names, 'these are')}"
    if recipe.absolute and recipe.count and budget.unit and recipe.count != budget.unit:
        yield (
            f"absolute: true takes shares of the budget, which is in {budget.unit}, and count is {recipe.count}: leave count out, "
            f"or give the budget in {recipe.count}."
        )
