"""The function `preview`: from a mix and a run's machines to the first steps of the run."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.extra_loaders import EXTRA_LOADERS
from mdsmix.load.collate import find_best_ratio, list_ratios
from mdsmix.load.internals import Ids
from mdsmix.load.layout import EpochLayout
from mdsmix.load.loader import BATCHES_TRIED, make_row_rules
from mdsmix.load.loader_settings import read_settings
from mdsmix.load.training_rows import TokenIds
from mdsmix.load.vision import refuse_packing
from mdsmix.mix.streams.mix import Mix
from mdsmix.preview.epoch_windows import Preview, cut_into_windows, sample_tokens
from mdsmix.preview.options import PreviewOptions
from mdsmix.preview.shard_reader import ShardReader, find_mix_images
from mdsmix.preview.step_rows import Loaders, make_rank_draws
from mdsmix.shards.token_ids import PREFERENCE_COLUMNS, find_id_columns


def preview(mix: Mix, options: PreviewOptions) -> Preview:
    """Return the first steps of a run on a mix, and the number of samples that the rest of the
    epoch draws from each stream.

    The samples are counted for each window, a run of steps; all windows have about the same number
    of steps.

    Raises RecipeError if Streaming refuses the epoch, Unreachable if a stream cannot be read, and
    MixRefused if a row does not fit the loader.
    """
    extra_loader = EXTRA_LOADERS.get(mix.train.name)
    if extra_loader:
        raise RecipeError(
            "`mdsmix preview` shows rows of LLM-Foundry's and mdsmix's loaders, but train_loader "
            f"has name: {extra_loader.name}, the loader of {extra_loader.whose}. Use `mdsmix "
            "inspect` to see the samples of its streams, or mdsmix.load to see its batches."
        )
    if any(find_id_columns(stream.columns) == PREFERENCE_COLUMNS for stream in mix.train.streams):
        raise RecipeError(
            "`mdsmix preview` shows rows of one sequence, but the streams are preferences, which "
            "have two answers. Use `mdsmix inspect` to see their samples, or mdsmix.load to see "
            "the batches."
        )
    loaders = _open_loaders(mix, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `check` counts rows that are cut
        ratio = _find_packing_ratio(loaders)
        layout = EpochLayout(
            loaders.settings, mix.train.streams, options.world, int(options.world.rows * ratio)
        )
        first, ids = _draw_from_first_step(layout, options)
        shown_ids = ids[: options.steps]
        steps = list(loaders.steps(layout, shown_ids, first, options.samples, is_packed=ratio > 1))
    tokens = [sample_tokens(stream, mix.train) for stream in mix.train.streams]
    return Preview(
        options=options,
        layout=layout,
        loaders=loaders,
        ratio=ratio,
        first=first,
        ids=ids,
        steps=steps,
        tokens=tokens,
        windows=cut_into_windows(layout, ids, tokens, options.windows, first),
    )


def _open_loaders(mix: Mix, options: PreviewOptions) -> Loaders:
    """Return the loaders of all devices, with the settings of the mix's training YAML and the seed
    of the options.

    Raises RecipeError if the tokenizer cannot be opened.
    """
    settings = read_settings(mix.yaml.config)
    images = find_mix_images(mix)
    card = mix.tokenizer
    if card is None:
        why = mix.tokenizer_problem or "the YAML names no tokenizer"
        raise RecipeError(
            f"The tokenizer of {mix.yaml.origin} cannot be opened ({why.rstrip('.')}), but rows "
            "need its EOS and padding tokens; correct tokenizer in the YAML."
        )
    if options.seed is not None:
        settings = replace(settings, streaming={**settings.streaming, "shuffle_seed": options.seed})
    rules = make_row_rules(settings, TokenIds(eos=card.eos_id, pad=card.pad_id, bos=card.bos_id))
    if images:
        refuse_packing(settings)
        rules = replace(rules, image=images.token)
    reader = ShardReader(mix.train.streams, options.read)
    return Loaders(settings, rules, options.world, reader, images)


class EpochFromStep(NamedTuple):
    """The end of an epoch, from the first step on that is previewed."""

    first: int
    "The number of this step in the epoch."
    ids: Ids
    "int64 [steps, ranks, drawn]: the sample ids of this step and of all later steps."


def _draw_from_first_step(layout: EpochLayout, options: PreviewOptions) -> EpochFromStep:
    """Return the samples of the first step to preview and of all later steps of the epoch.

    The first step is the step that the run's state has reached, or `from_step` if the state is at
    the beginning of an epoch.

    Raises RecipeError if the epoch has no such step.
    """
    state = options.state
    per_step = layout.world.num_ranks * layout.batch_size
    layout.apply_state(state.num_canonical_nodes, state.shuffle_seed, state.initial_physical_nodes)
    sample = state.sample_in_epoch or options.from_step * per_step
    if sample <= layout.epoch_size:
        ids = layout.draw_steps(state.epoch, sample)
        if len(ids):
            return EpochFromStep(sample // per_step, ids)
    raise RecipeError(
        f"train_loader: an epoch has {layout.epoch_size:,} samples and a step draws {per_step:,} "
        f"samples, so no step comes after sample {sample:,}: choose an earlier step or a later "
        "epoch. If even the first batch is not full, set drop_last: false (now "
        f"{layout.drop_last}) or a smaller batch."
    )


def _find_packing_ratio(loaders: Loaders) -> float:
    """Return the packing ratio: samples that are drawn for each packed row, 1 without packing.

    `packing_ratio: auto` is computed as the loader computes it. Each device tries the ratios on the
    first samples that it draws, and the smallest of the devices' ratios is used.

    Raises RecipeError if these samples need more than --read bytes.
    """
    setting = loaders.settings.row_key("packing_ratio", 1)
    if setting != "auto":
        return float(setting)
    world = loaders.world
    length = loaders.rules.max_seq_len
    reader = loaders.reader
    candidates = list_ratios(length, world.rows)
    if len(candidates) == 1:
        return 1.0

    # Lay out an epoch with so large a batch that its first step has all samples to try.
    profiled = BATCHES_TRIED * max(candidates)
    # The loader reads these samples without workers.
    layout = EpochLayout(loaders.settings, reader.streams, replace(world, workers=0), profiled)
    layout.drop_last = False  # an epoch may have fewer samples
    layout.apply_state()
    first_step = layout.draw_steps(0)[0]

    # Find the best ratio of each device.
    best_ratios = list[float]()
    limit = reader.most_bytes
    for rank, ids in enumerate(first_step):
        draws = make_rank_draws(layout, world, rank, worker=0, ids=ids)
        samples = reader.samples(draws.places)
        if samples is None:
            raise RecipeError(
                f"packing_ratio: auto needs the first {profiled:,} samples of every device, but "
                f"these samples have more than --read {limit:,} bytes: raise --read, or set "
                "packing_ratio in the YAML to the number that the run logs (Using packing ratio)."
            )
        rows = loaders.rows(draws, samples, "The first rows")
        best_ratios.append(find_best_ratio(rows, candidates, world.rows, length))
    return min(best_ratios, default=1.0)
