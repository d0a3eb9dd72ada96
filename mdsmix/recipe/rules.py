"""Rules for a recipe that do not depend on the data or the kinds of its streams. A broken rule
yields one sentence that gives the reason and the fix.

`mdsmix.kinds.open_recipe` adds the rules of the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.messages import join_names, suggest_key
from mdsmix.recipe.amounts import Budget, is_lone_share, read_budget, read_share
from mdsmix.recipe.phases import make_phase_recipe
from mdsmix.recipe.spec import Recipe, WeightSpec
from mdsmix.recipe.stream_spec import BY_BUDGET, UNSOURCED, StreamSpec, find_foreign_keys
from mdsmix.schema import shorten_value
from mdsmix.storage import find_key_terminator

TARGET_PROMPTS = re.compile(r"none|all|length>=[1-9]\d*")
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PHASE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
PROCESSOR_FOLDER = re.compile(r"processor-[0-9a-f]{8}")
PRETRAINED_FOLDER = re.compile(rf"tokenizer-[0-9a-f]{{8}}|{PROCESSOR_FOLDER.pattern}")
"Names of the folders next to the streams that contain a tokenizer or a processor."
OWN_SPLIT = re.compile(r"limit-\d+|.+-[0-9a-f]{8}")
"""Names of folders that mdsmix itself makes next to a split: trial conversions of N records
(`limit-N`), and older versions (`train-0123abcd`), which `mdsmix gc --keep` deletes.
"""


def is_pretrained_folder(name: str) -> bool:
    """Check whether mdsmix keeps a tokenizer or a processor in a folder of this name:
    `tokenizer-0123abcd`.
    """
    return PRETRAINED_FOLDER.fullmatch(name) is not None


def find_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each wrong or contradictory key of a recipe, as far as it can be found
    without the tokenizer and without knowing how records are written.
    """
    if not recipe.streams:
        yield "streams is empty; name at least one stream, for example web."
    dataset = recipe.train_loader.get("dataset")
    if dataset is not None and not isinstance(dataset, Mapping):
        yield (
            f"train_loader.dataset is {shorten_value(dataset)}; it must be keys and values, "
            "for example packing_ratio."
        )
    yield from find_target_contradictions(
        recipe.target_prompts, recipe.target_responses, recipe.decoder_only_format
    )
    if recipe.sourced and not (recipe.remote or recipe.local):
        yield (
            "neither remote nor local is set, so there is no place to publish; set local to a "
            "folder, or remote to a URL such as s3://bucket/mix."
        )
    yield from _find_mix_contradictions(recipe)
    for stream in recipe.streams.values():
        for sentence in _find_stream_contradictions(recipe, stream):
            yield f"streams.{stream.name}: {sentence}"


def find_target_contradictions(
    prompts: str, responses: str, decoder_only_format: bool
) -> Iterator[str]:
    """Yield a sentence for each target policy, in a recipe or a training YAML, that LLM-Foundry
    does not have: the problem, `; `, and what to do.
    """
    if not TARGET_PROMPTS.fullmatch(prompts):
        yield (
            f"target_prompts is {prompts!r}; it must be none, all or length>=N with N of at least "
            "1."
        )
    if responses not in ("last", "all"):
        yield f"target_responses is {responses!r}; it must be last or all."
    if not decoder_only_format and (prompts, responses) != ("none", "last"):
        yield (
            f"decoder_only_format: false cannot be used with target_prompts: {prompts} and "
            f"target_responses: {responses}; set target_prompts: none and target_responses: last, "
            "the only targets that LLM-Foundry has for encoder-decoder models."
        )


def _find_stream_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Yield a sentence for each wrong or contradictory key of a stream. The sentences do not name
    the stream; the caller adds its name.
    """
    yield from _find_name_contradictions(recipe, stream)
    if stream.source is None:
        yield from find_foreign_keys(stream, {UNSOURCED})
        if not (stream.remote or stream.local):
            yield (
                "has neither a source nor a remote or local: set source to convert data, or remote "
                "or local to use a published stream."
            )
        return
    yield from find_sample_contradictions(recipe, stream)
    if stream.holdout is not None:
        if stream.split != "train":
            yield (
                "holdout takes records from a stream that is trained on, but the split of this "
                f"stream is {stream.split}: remove holdout or split."
            )
        held_out_name = make_held_out_name(stream)
        if held_out_name in recipe.streams:
            yield (
                f"holdout makes a stream named {held_out_name}, but the recipe already has a "
                "stream of this name: rename one of the two streams."
            )
    if not stream.source.path:
        yield "source.path is empty; name a file, a glob or a URL of a bucket."
    if stream.kind is None:
        yield "kind is missing; it must be pretraining, finetuning, preference or prompt."


def _find_name_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Yield sentences on a stream's name and split, which become folders."""
    url = f"{recipe.published(stream)}/{stream.split}"
    terminator = find_key_terminator(url)
    if terminator:
        yield (
            f"the stream's URL {url} contains `{terminator}`, and Streaming would cut the URL "
            f"there, as browsers do: remove `{terminator}` from remote, from the stream's name or "
            "from its split."
        )
    if not STREAM_NAME.fullmatch(stream.name) or is_pretrained_folder(stream.name):
        yield (
            "this name cannot be used, since it becomes a folder: use letters, digits, '.', '_' "
            "and '-', but not tokenizer- or processor- with 8 hex digits, since mdsmix keeps "
            "tokenizers and processors in folders of these names."
        )
    is_own_split = stream.source and OWN_SPLIT.fullmatch(stream.split)
    if not STREAM_NAME.fullmatch(stream.split) or is_own_split:
        yield (
            f"split is {stream.split!r}; it names one folder: use letters, digits, '.', '_' and "
            "'-', but not limit-N or an end such as -0123abcd, which are reserved for mdsmix's own "
            "trials and versions."
        )


def make_held_out_name(stream: StreamSpec) -> str:
    """Return the name of the evaluation stream that has the records held out of this stream, such
    as `chat-eval`. It is the name in tables and the label of an eval_loader.
    """
    return f"{stream.name}-eval"


def add_held_out(recipe: Recipe) -> Recipe:
    """Return the recipe with an evaluation stream after each stream that has a holdout."""
    streams = dict[str, StreamSpec]()
    for stream in recipe.streams.values():
        streams[stream.name] = stream
        if stream.holdout is not None:
            name = make_held_out_name(stream)
            streams[name] = replace(stream, name=name, split="eval", held_out_of=stream.name)
    return replace(recipe, streams=streams)


def _find_mix_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on `mix` and the keys that go with it."""
    if recipe.phases:
        yield from _find_phase_contradictions(recipe)
        return
    if recipe.phase is not None:
        yield (
            f"phase is {recipe.phase}, but the recipe has no phases: remove phase, or add phases."
        )
    yield from _find_weight_contradictions(recipe)


def _find_phase_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on phases: their names, budgets and mixes, and keys that a recipe with phases
    cannot have.
    """
    if recipe.mix:
        yield "mix and phases are both set: each phase has a mix of its own, so remove mix."
    if recipe.phase is not None and recipe.phase not in recipe.phases:
        similar = suggest_key(recipe.phase, list(recipe.phases), "the phases are")
        yield f"phase is {recipe.phase!r}, which is not a phase of the recipe; {similar}"
    yield from _find_phase_budget_contradictions(recipe)
    yield from _find_phase_name_contradictions(recipe)
    yield from _find_phase_stream_contradictions(recipe)
    # Check the weights of each phase as those of a recipe without phases.
    phases = {name: make_phase_recipe(recipe, name) for name in recipe.phases}
    for name, phase_recipe in phases.items():
        for sentence in _find_weight_contradictions(phase_recipe):
            yield f"phases.{name}: {sentence}"
    shares_of_phases = [read_shares(phase_recipe) for phase_recipe in phases.values()]
    have_all_shares = all(None not in shares.values() for shares in shares_of_phases)
    if recipe.temperature != 1 and have_all_shares:
        yield (
            f"temperature is {recipe.temperature}, but it only affects streams without a share, "
            "and in every phase every stream has one: remove temperature, or some shares."
        )


def _find_phase_name_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on the names of phases, which become parts of file names."""
    first_names = dict[str, str]()  # name in lower case -> the first phase with this name
    for name in recipe.phases:
        if not isinstance(name, str) or not PHASE_NAME.fullmatch(name):
            yield (
                f"phases.{name}: this name cannot be used, since it becomes a part of file names: "
                "begin with a letter, and use letters, digits, '_' and '-'."
            )
        first_name = first_names.setdefault(str(name).lower(), name)
        if first_name != name:
            yield (
                f"phases.{name} and phases.{first_name} differ only in case, and so would the "
                "names of their files, which are one file on some machines: give one another name."
            )


def _find_phase_stream_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on the streams that phases draw: each must be trained on, and each stream
    that is trained on must be in a phase.
    """
    trained = {stream.name for stream in recipe.trained}
    for name, phase in recipe.phases.items():
        for stream in phase.mix:
            if stream not in trained:
                similar = suggest_key(stream, sorted(trained), "these are")
                yield f"phases.{name}.mix.{stream} names no stream that is trained on; {similar}"
        if not phase.mix:
            yield f"phases.{name}.mix names no stream, so nothing would be trained: add shares."
    named = {stream for phase in recipe.phases.values() for stream in phase.mix}
    if trained - named:
        yield (
            f"no phase draws {join_names(sorted(trained - named))}: give each stream a share in a "
            "phase, or remove the stream."
        )


def _find_phase_budget_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if the budgets of the phases do not fit the recipe's budget."""
    shares = {
        name: read_share(phase.budget)
        for name, phase in recipe.phases.items()
        if is_lone_share(phase.budget)
    }
    budget = find_budget(recipe)
    if not shares:
        if budget is not None:
            yield (
                f"budget is {budget}, but each phase has a budget of its own: remove budget, or "
                "write the budgets of the phases as parts of it, such as 10%."
            )
        return
    if budget is None or budget.unit is None:
        name = next(iter(shares))
        yield (
            f"phases.{name}.budget is {recipe.phases[name].budget}, a part of the recipe's budget, "
            "but the recipe has no budget in tokens or samples: add one, for example budget: 2B "
            "tokens."
        )
    elif len(shares) < len(recipe.phases):
        without_shares = [name for name in recipe.phases if name not in shares]
        yield (
            f"the budgets of {join_names(list(shares))} are parts of the recipe's budget, and "
            f"those of {join_names(without_shares)} are not: write all of them in one way."
        )
    elif sum(shares.values()) != 1:
        total = f"{float(100 * sum(shares.values())):,.10g}%"
        yield f"the budgets of the phases sum to {total} of the recipe's budget, not to 100%."
    else:
        for name, share in shares.items():
            if not round(budget.amount * share):
                yield (
                    f"phases.{name}.budget is {recipe.phases[name].budget} of {budget}, which is "
                    "rounded to 0: set a larger budget, or a larger part of it."
                )


def _find_weight_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on the weights of the streams and the keys that go with them."""
    for name, weight in recipe.mix.items():
        stream = recipe.streams.get(name)
        if stream is None:
            similar = suggest_key(name, list(recipe.streams), "the streams are")
            yield f"mix.{name} names no stream; {similar}"
        elif stream not in recipe.trained:
            for key in ("share", "proportion"):
                if key in weight.set_keys:
                    yield (
                        f"mix.{name} sets a {key}, but the split of this stream is {stream.split}, "
                        f"so it is only evaluated on and not mixed: remove the {key}."
                    )
        if weight.max_repeat is not None:
            if not recipe.is_by_share:
                yield (
                    f"mix.{name}.max_repeat is for mixes by share, but the recipe has neither a "
                    f"share nor a budget: add mix.{name}.share or budget, or remove max_repeat."
                )
            if not weight.set_keys:
                continue  # the stream divides with others what the written shares leave
        keys = ", ".join(weight.set_keys)
        if len(weight.set_keys) != 1:
            yield (
                f"mix.{name} must set exactly one of repeat, proportion, choose and share; it sets "
                f"{keys or 'none'}."
            )
        if weight.share is None and recipe.is_by_share:
            yield (
                f"mix.{name} sets {keys}, but the recipe sets a share, a budget or a temperature, "
                "so shares decide how often each stream is drawn: set "
                f"mix.{name}.share instead, or remove all shares, budget and temperature."
            )
    if recipe.is_by_share:
        yield from _find_share_contradictions(recipe)
        return
    for key in ("count", "max_repeat", "absolute"):
        default = getattr(Recipe, key)
        if getattr(recipe, key) != default:
            yield (
                f"{key} is for mixes by share, but the recipe has neither a share nor a budget: "
                f"add mix.<stream>.share or budget, or remove {key}."
            )


def _find_share_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence on each wrong key of a recipe whose shares decide how often a stream is
    drawn: `mix.<stream>.share`, `budget`, and the loader's `epoch_size`.
    """
    yield from _find_sum_contradictions(recipe)
    yield from _find_budget_contradictions(recipe)
    dataset = recipe.train_loader.get("dataset")
    if isinstance(dataset, Mapping) and dataset.get("epoch_size"):
        yield (
            "train_loader.dataset.epoch_size is set, but in a mix by shares the budget decides the "
            "length of an epoch: remove epoch_size."
        )


def _find_sum_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on the sum of all shares."""
    all_shares = read_shares(recipe)
    shares = {name: share for name, share in all_shares.items() if share is not None}
    without_share = join_names([name for name in all_shares if name not in shares])
    total = sum(shares.values(), Fraction(0))
    percents = {name for name in shares if "%" in str(recipe.mix[name].share)}
    # Without a percentage in the mix, shares above 1 are ratios, such as 7 and 3.
    above_one = [name for name, share in shares.items() if share > 1 and name not in percents]
    if above_one and (percents or recipe.absolute):
        name = above_one[0]
        share = recipe.mix[name].share
        yield (
            f"mix.{name}.share is {share}, more than the whole: if it is a percentage, write "
            f"{share}%; otherwise set a share of at most 1."
        )
    if without_share and recipe.absolute:
        yield (
            "absolute: true needs a share of the budget for every stream, but these have none: "
            f"{without_share}. Set a share for each stream; 0 leaves a stream out."
        )
    elif without_share and total >= 1:
        yield (
            f"the shares sum to {float(total):.0%}, so nothing is left for {without_share}: lower "
            "them, or set a share for each stream; 0 leaves a stream out."
        )
    elif not without_share and percents and total != 1 and not recipe.absolute:
        sum_of_all = f"{float(100 * total):,.10g}%"
        yield (
            f"the shares of the mix sum to {sum_of_all}, but shares in percent must sum to 100%: "
            "correct the shares, leave one out so that its stream gets the rest, or write all "
            "shares without %, as ratios."
        )
    elif not without_share and not total:
        yield "the shares sum to 0, so no sample would be drawn: set a share above 0 for a stream."
    elif not without_share and recipe.temperature != 1 and recipe.phase is None:
        yield (
            f"temperature is {recipe.temperature}, but it only affects streams without a share, "
            "and every stream has one: remove temperature, or some shares."
        )


def _find_budget_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield sentences on `budget`, and on keys that need one."""
    budget = find_budget(recipe)
    if budget is None:
        if recipe.absolute:
            yield (
                "absolute: true makes each share a part of the budget, but the recipe has no "
                "budget: add one, for example budget: 2B tokens."
            )
        return
    trained = [stream.name for stream in recipe.trained]
    if budget.stream and budget.stream not in trained:
        similar = suggest_key(budget.stream, trained, "these are")
        yield (
            f"budget counts passes of {budget.stream}, which is not a stream that is trained on; "
            f"{similar}"
        )
    if recipe.absolute and recipe.count not in (None, budget.unit):
        yield (
            f"count is {recipe.count}, but with absolute: true each share is a part of the budget "
            f"of {budget} and has its unit: remove count."
        )


def read_shares(recipe: Recipe) -> dict[str, Fraction | None]:
    """Return name -> share of each stream that is trained on. The share is None for a stream that
    sets no share.
    """
    shares = dict[str, Fraction | None]()
    for stream in recipe.trained:
        share = recipe.mix.get(stream.name, WeightSpec()).share
        shares[stream.name] = None if share is None else read_share(share)
    return shares


def find_budget(recipe: Recipe) -> Budget | None:
    """Return the budget of the recipe; None if it sets no budget."""
    return None if recipe.budget is None else read_budget(recipe.budget)


def find_sample_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Yield a sentence if a stream sets `sample: budget`, and the tokens of its share of the budget
    are unknown before conversion. With `sample: budget` only as many records are converted as that
    share needs.
    """
    if stream.sample == BY_BUDGET:
        try:
            count_budget_tokens(recipe, stream)
        except ValueError as error:
            yield (
                "sample: budget takes as many records as the stream's share of the budget needs, "
                f"but {error}, or write a share such as sample: 5%."
            )


def count_budget_tokens(recipe: Recipe, stream: StreamSpec) -> Fraction:
    """Return the tokens of the stream's share of the budget; with phases the sum of its shares.

    Raises ValueError if the number is unknown before the streams are converted.
    """
    name = stream.held_out_of or stream.name
    if recipe.phases:
        tokens = Fraction(0)
        for phase_name, phase in recipe.phases.items():
            if name not in phase.mix:
                continue
            phase_recipe = make_phase_recipe(recipe, phase_name)
            if read_shares(phase_recipe)[name] != 0:
                tokens += count_budget_tokens(phase_recipe, stream)
        if not tokens:
            raise ValueError(
                f"no phase gives the stream a share above 0: set phases.<phase>.mix.{name}"
            )
        return tokens
    budget = find_budget(recipe)
    if budget is None:
        raise ValueError("the recipe has no budget: add one, for example budget: 2B tokens")
    if budget.unit != "tokens":
        raise ValueError(f"the budget is {budget}: set a budget in tokens, such as 2B tokens")
    if recipe.count not in (None, "tokens"):
        raise ValueError(f"count is {recipe.count}, so shares are not of tokens: remove count")
    all_shares = read_shares(recipe)
    shares = {name: share for name, share in all_shares.items() if share is not None}
    is_only_one_without = all_shares.keys() - shares.keys() == {name}
    if is_only_one_without and not recipe.absolute:
        shares[name] = 1 - sum(shares.values(), Fraction(0))  # all that the other streams leave
    if not shares.get(name):
        raise ValueError(
            f"the stream has no share above 0 that is known before conversion: set mix.{name}.share"
        )
    # Shares are fractions of the budget if they are absolute, or if some streams divide the rest.
    # Otherwise they are ratios, whose sum is the whole.
    are_parts = recipe.absolute or len(shares) < len(all_shares)
    whole = Fraction(1) if are_parts else sum(shares.values(), Fraction(0))
    return budget.amount * shares[name] / whole


class SampledRecipe(NamedTuple):
    """A recipe whose streams are sampled as far as the budget needs (`sample: budget`)."""

    recipe: Recipe
    remarks: list[str]
    """A sentence on each stream that is not sampled so, because it sets `sample` itself or is not
    trained on.
    """


def sample_streams_by_budget(recipe: Recipe) -> SampledRecipe:
    """Return the recipe with `sample: budget` set for its training streams: only as many records
    are converted as a stream's share of the budget needs.

    Raises RecipeError if the tokens of a stream's share are unknown before conversion.
    """
    sampled = sample_by_budget(recipe)
    remarks = []
    for stream in sampled.sourced:
        contradictions = list(find_sample_contradictions(sampled, stream))
        if contradictions:
            raise RecipeError(f"--budget cannot sample streams.{stream.name}: {contradictions[0]}")
        if stream.sample != BY_BUDGET:
            amount = f"sample: {stream.sample}" if stream.sample else "all of it"
            remarks.append(
                f"stream {stream.name} is not sampled by --budget; the recipe converts {amount}"
            )
    return SampledRecipe(sampled, remarks)


def sample_by_budget(recipe: Recipe) -> Recipe:
    """Return the recipe with `sample: budget` set for each stream that has a source, is used for
    training, and sets no `sample`. Then only as many records are converted as the stream's share of
    the budget needs.
    """
    trained = {stream.name for stream in recipe.trained}
    streams = dict(recipe.streams)
    for name, stream in streams.items():
        is_trained = (stream.held_out_of or name) in trained
        if stream.source and stream.sample is None and is_trained:
            streams[name] = replace(stream, sample=BY_BUDGET)
    return replace(recipe, streams=streams)
