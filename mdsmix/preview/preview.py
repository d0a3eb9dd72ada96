"""`preview`: a mix and the machines of a run -> the first steps of the run, and its epoch in
windows.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import EXTRA_LOADERS
from mdsmix.load.collate import find_best_ratio, list_ratios
from mdsmix.load.internals import Ids
from mdsmix.load.layout import EpochLayout
from mdsmix.load.loader import PROFILED, make_row_rules
from mdsmix.load.loader_settings import read_settings
from mdsmix.load.training_rows import TokenIds
from mdsmix.load.vision import refuse_packing
from mdsmix.mix.streams.mix import Mix
from mdsmix.preview.epoch_windows import Preview, sample_tokens, windows_of
from mdsmix.preview.options import Asked
from mdsmix.preview.shard_reader import ShardReader, images_of
from mdsmix.preview.step_rows import Loaders, rank_of


def preview(mix: Mix, asked: Asked) -> Preview:
    """The first steps and the epoch of a mix. RecipeError where Streaming refuses the epoch,
    Unreachable where a stream cannot be read, MixRefused where a row does not fit the loader.
    """
    if other := EXTRA_LOADERS.get(mix.train.name):
        raise RecipeError(
            f"a preview shows rows of LLM-Foundry's loaders and of mdsmix's, and name: {other.name} is the loader of {other.whose}: "
            "`mdsmix inspect` shows its samples, and mdsmix.load gives its batches."
        )
    loaders = _loaders(mix, asked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `check` counts rows that are cut
        ratio = _ratio(loaders)
        layout = EpochLayout(
            loaders.settings, mix.train.streams, asked.world, int(asked.world.rows * ratio)
        )
        first, ids = _epoch(layout, asked)
        steps = [*loaders.steps(layout, ids[: asked.steps], first, asked.samples, ratio > 1)]
    tokens = [sample_tokens(stream, mix.train) for stream in mix.train.streams]
    return Preview(
        asked=asked,
        layout=layout,
        loaders=loaders,
        ratio=ratio,
        first=first,
        ids=ids,
        steps=steps,
        tokens=tokens,
        windows=windows_of(layout, ids, tokens, asked.windows, first),
    )


def _loaders(mix: Mix, asked: Asked) -> Loaders:
    settings, images, card = read_settings(mix.yaml.config), images_of(mix), mix.tokenizer
    if card is None:
        why = mix.tokenizer_problem or "it names none"
        raise RecipeError(
            f"The tokenizer of {mix.yaml.origin} is needed for the rows' EOS and padding, and cannot be opened: {why.rstrip('.')}."
        )
    if asked.seed is not None:
        settings = replace(settings, streaming={**settings.streaming, "shuffle_seed": asked.seed})
    rules = make_row_rules(settings, TokenIds(eos=card.eos_id, pad=card.pad_id, bos=card.bos_id))
    if images:
        refuse_packing(settings)
        rules = replace(rules, image=images.token)
    return Loaders(settings, rules, asked.world, ShardReader(mix.train.streams, asked.read), images)


def _epoch(layout: EpochLayout, asked: Asked) -> tuple[int, Ids]:
    """The step at which the epoch is entered, by the state or by `from_step`, and int64 [steps,
    ranks, drawn]: sample ids from there on.
    """
    state, per_step = asked.state, layout.world.num_ranks * layout.batch_size
    layout.enter(state.num_canonical_nodes, state.shuffle_seed, state.initial_physical_nodes)
    sample = state.sample_in_epoch or asked.from_step * per_step
    if sample <= layout.epoch_size and len(ids := layout.steps(state.epoch, sample)):
        return sample // per_step, ids
    raise RecipeError(
        f"train_loader: an epoch of {layout.epoch_size:,} samples, {per_step:,} a step, has no step behind {sample:,} of them: name an "
        f"earlier step or a later epoch; where even the first fills no batch, set drop_last: false (it is {layout.drop_last}), or a smaller batch."
    )


def _ratio(loaders: Loaders) -> float:
    """The packing ratio. `auto` is found as by the loader, from the first rows of every device;
    RecipeError where --read is too small.
    """
    given, world = loaders.settings.row_key("packing_ratio", 1), loaders.world
    if given != "auto":
        return float(given)
    length, reader = loaders.rules.max_seq_len, loaders.reader
    tried, best = list_ratios(length, world.rows), list[float]()
    many = PROFILED * max(tried)
    layout = EpochLayout(loaders.settings, reader.streams, replace(world, workers=0), many)
    layout.drop_last = False
    layout.enter()
    for n, own in enumerate(layout.steps(0)[0] if len(tried) > 1 else ()):
        rank = rank_of(layout, world, n, 0, own)
        if (samples := reader.samples(rank.places)) is None:
            raise RecipeError(
                f"packing_ratio: auto is found from the first {many:,} samples of every device, more than --read {reader.most:,} bytes: raise "
                "that, or write the number that the run logs (Using packing ratio) into the YAML."
            )
        rows = loaders.rows(rank, samples, "The first rows")
        best.append(find_best_ratio(rows, tried, world.rows, length))
    return min(best, default=1.0)
