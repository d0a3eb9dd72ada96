"""`build_loader`: builds a loader, with its dataset and collator, from a YAML.

The settings and the tokenizer's ids give the rules of rows. The streams are opened as one dataset,
settings with which a batch could not be filled are refused (batch_checks.py), and the streams'
columns decide which rows and batches the dataset and the collator make.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import current_process
from numbers import Integral
from typing import Any

import torch
from streaming.base.distributed import get_world_size

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.foundry_yaml.extra_loaders import EXTRA_LOADERS
from mdsmix.foundry_yaml.findings import make_refusal_message
from mdsmix.foundry_yaml.loader_keys import LOADER_DEFAULTS, BatchRules
from mdsmix.foundry_yaml.lock import list_locked_settings
from mdsmix.foundry_yaml.section_values import find_wrong_separators
from mdsmix.foundry_yaml.training_yaml import Config
from mdsmix.load.batch_checks import refuse_empty_epoch, refuse_evicting, refuse_unfilled
from mdsmix.load.checked_stream import CheckedStream, describe_error
from mdsmix.load.collate import Collate, Packer, find_best_ratio, list_ratios
from mdsmix.load.dataset import MixDataset
from mdsmix.load.internals import open_process_group
from mdsmix.load.loader_settings import LoaderSettings, read_settings
from mdsmix.load.mix_loader import MixLoader
from mdsmix.load.training_rows import RowRules, TokenIds, TrainingRow
from mdsmix.load.vision import open_vision, refuse_packing
from mdsmix.shards.token_ids import (
    IMAGE_COLUMNS,
    LOSS_WEIGHTS,
    PACKED_COLUMNS,
    PREFERENCE_COLUMNS,
)

log = logging.getLogger(__name__)
LOCAL_IN_USE = (
    "the loader cannot be built, because the folder `local` of one of its streams is in use: by "
    "two of its streams, by another loader that still exists, or by a run that was killed. Give "
    "each stream a `local` of its own, delete the other loader, or call "
    "streaming.base.util.clean_stale_shared_memory() if no other run is on this machine."
)
BUILT_BY_WORKER = (
    "A worker of a loader imports the training script, and the script builds a loader when it is "
    "imported. Workers that are spawned or forked by a server do so: put the loop of the script "
    'under `if __name__ == "__main__":`, or set loader.multiprocessing_context = "fork".'
)
TRIES_TO_OPEN = 10
"How many times the streams are opened if other runs begin at the same moment."
SECONDS_TO_NEXT_TRY = 0.5
"The longest wait before the next try. It is random, since the other runs may try again too."
BATCHES_TRIED = 100
"Batches that a packing ratio is tried on, as in LLM-Foundry."


def build_loader(
    config: Config,
    batch_size: int,
    loader: str = "train_loader",
    *,
    ids: TokenIds | None = None,
    accept_changed: bool = False,
    position_ids: bool = False,
    stream_ids: bool = False,
) -> MixLoader:
    """Build one loader of a rendered YAML, a LLM-Foundry config or a mapping with the same keys.

    Args:
        config: path of the YAML, or the mapping.
        batch_size: rows per batch and device.
        loader: `train_loader`, or `eval_loader.<label>`.
        ids: the ids of the tokenizer's special tokens; None: read from the config's `tokenizer`.
        accept_changed: let `load_state_dict` accept a state that was saved on other data, and log
            the differences.
        position_ids: add `position_ids` to each batch. They begin at 0 again with each document of
            a row.
        stream_ids: add `stream_id` to each batch, the number of a row's stream in the order of the
            YAML: int64 [rows]. If the loader packs, it is the stream of each token, int64 [rows,
            max_seq_len] with -1 for padding, and `stream_samples`, int64 [rows, streams], counts
            the samples of each stream in a row. Take both out before a model gets the batch.

    Raises:
        RecipeError: the config is wrong, or does not suit its streams; or a worker that imports the
            training script calls this function.
        Unreachable: a stream or its index is missing. While iterating: a shard, which the message
            names, is lost or damaged.
        MixRefused: while iterating: a row does not fit the settings; the message names its stream,
            shard and position. In `load_state_dict`: the state was saved on other data
            (docs/loading.md).

    >>> for batch in build_loader("train.yaml", batch_size=8):  # doctest: +SKIP
    ...     loss = model(batch["input_ids"], labels=batch["labels"])
    """
    # The mark with which Python's own multiprocessing notices this.
    if getattr(current_process(), "_inheriting", False):
        raise RecipeError(BUILT_BY_WORKER)
    settings = read_settings(config, loader)
    mix_loader = open_loader(settings, batch_size, ids or open_token_ids(settings), accept_changed)
    with mix_loader.dataset.released_if_refused():
        if position_ids and not mix_loader.collate_fn.rules.decoder_only_format:
            raise RecipeError(
                "position_ids=True cannot be used with decoder_only_format: false: it needs "
                "samples of one sequence, but there a sample has two, an input and a target; call "
                "build_loader without position_ids."
            )
        mix_loader.collate_fn.with_position_ids = position_ids
        if stream_ids:
            mix_loader.add_stream_ids()
    return mix_loader


def open_loader(
    settings: LoaderSettings, batch_size: int, ids: TokenIds, accept_changed: bool = False
) -> MixLoader:
    """Build a loader from its settings, for `build_loader` and the plugin of LLM-Foundry.

    Args:
        batch_size: rows per batch and device.
        accept_changed: resume from states that were saved on other data, even if the YAML does not
            say so.
    """
    batch_size = _check_batch_size(batch_size)
    rules = make_row_rules(settings, ids)
    # With packing, a batch draws more samples than it has rows.
    ratio = _find_packing_ratio(settings, rules, batch_size)
    drawn = int(batch_size * ratio)
    dataset = _open_dataset(settings, rules, drawn, int(settings.loader["num_workers"]))
    dataset.bins = batch_size if ratio > 1 else None
    dataset.accept_changed = accept_changed or settings.loader.get("accept_changed", False)
    with dataset.released_if_refused():
        return _make_loader(settings, rules, dataset, batch_size)


def _make_loader(
    settings: LoaderSettings, rules: RowRules, dataset: MixDataset, batch_size: int
) -> MixLoader:
    """Make the loader of a dataset.

    Args:
        batch_size: rows per batch and device.
    """
    section = settings.section
    keys = settings.loader
    ids = rules.ids
    bins = dataset.bins
    drawn = int(dataset.batch_size)

    # Lock the state to the settings and the facts about the tokenizer that decide batches.
    tokens = f"eos {ids.eos}, bos {ids.bos}, pad {ids.pad}, {ids.padding_side}"
    dataset.locked = list_locked_settings(section, tokens=tokens)

    refuse_empty_epoch(dataset, settings, drawn)
    refuse_unfilled(dataset, section.label)

    # Build the collator.
    vision = open_vision(settings, dataset.has_columns(IMAGE_COLUMNS))
    if vision:
        rules = replace(rules, image=vision.processor.token_id)
        dataset.rules = rules
    collate = make_collate(settings, rules, bins)
    collate.vision = vision
    is_extra = section.name in EXTRA_LOADERS
    if is_extra:
        _use_extra_loader(settings, rules, batch_size, dataset, collate)
    elif dataset.has_columns(PREFERENCE_COLUMNS):
        _use_preferences(settings, rules, dataset, collate)
    # Attention must not cross the documents of a packed row, under any loader's name.
    collate.with_sequence_id |= dataset.has_columns(PACKED_COLUMNS)
    collate.with_weights = dataset.has_columns((LOSS_WEIGHTS,))

    # Batches of the usual rows are written from the bytes of their samples.
    dataset.gives_stored_rows = (
        rules.decoder_only_format
        and not bins
        and vision is None
        and not is_extra
        and not dataset.gives_preferences
    )

    # Without workers torch refuses the two keys about workers, which LLM-Foundry passes on.
    torch_keys = {key: keys[key] for key in LOADER_DEFAULTS}
    torch_keys["pin_memory"] &= torch.cuda.is_available()
    if not keys["num_workers"]:
        torch_keys |= {"prefetch_factor": None, "persistent_workers": False}
    loader = MixLoader(dataset, batch_size=drawn, collate_fn=collate, **torch_keys)
    loader.settings = settings
    if keys.get("stream_ids"):
        loader.add_stream_ids()
    return loader


def _use_extra_loader(
    settings: LoaderSettings,
    rules: RowRules,
    batch_size: int,
    dataset: MixDataset,
    collate: Collate,
) -> None:
    """Make `dataset` and `collate` give the rows and batches of a loader of another library.

    Raises RecipeError if a stream has images, or if the batch is too small for this loader.
    """
    section = settings.section
    if dataset.has_columns(IMAGE_COLUMNS):
        raise RecipeError(
            f"{section.label}: a stream has images, which the {section.name} loader does not "
            "read, so a model would be trained on a bare placeholder for each image: set "
            "train_loader.name: mdsmix."
        )
    extra_loader = EXTRA_LOADERS[section.name]
    extra_loader.refuse_small_batch(section.label, batch_size, "set a larger one")
    batch_rules = make_batch_rules(settings, rules)
    dataset.other_row = partial(extra_loader.row, batch_rules)
    collate.other_batch = partial(extra_loader.batch, batch_rules)


def _use_preferences(
    settings: LoaderSettings, rules: RowRules, dataset: MixDataset, collate: Collate
) -> None:
    """Make `dataset` and `collate` give preferences with images, as TRL batches them.

    Raises RecipeError if some streams are not preferences with images, or if the section sets
    packing.
    """
    _refuse_other_rows(dataset, settings.section.label)
    refuse_packing(settings)
    dataset.gives_preferences = True
    collate.has_preferences = True
    # TRL pads the rows of preferences on the right, whatever the tokenizer says.
    collate.rules = replace(rules, ids=replace(rules.ids, padding_side="right"))
    collate.with_sequence_id = False


def open_token_ids(settings: LoaderSettings) -> TokenIds:
    """Return the ids of the config's tokenizer. Raises RecipeError if it names none."""
    from mdsmix.tokenizer.card import open_tokenizer
    from mdsmix.tokenizer.published import localize_spec

    if settings.tokenizer is None:
        raise RecipeError(
            f"The config of {settings.section.label} names no tokenizer, but rows need the "
            "tokenizer's EOS and padding ids; add tokenizer: {name: ...} to the config, or pass "
            "ids to build_loader."
        )
    tokenizer = open_tokenizer(localize_spec(settings.tokenizer, settings.places))
    return TokenIds(
        eos=tokenizer.eos_id,
        pad=tokenizer.pad_id,
        bos=tokenizer.bos_id,
        padding_side=tokenizer.padding_side,
    )


def make_row_rules(settings: LoaderSettings, ids: TokenIds) -> RowRules:
    """Return the rules for turning samples into rows.

    Raises RecipeError if the tokenizer lacks a token that the rows need, or if the settings name
    another id for its EOS or BOS.
    """
    section = settings.section
    if not section.is_text and ids.fill is None:
        raise RecipeError(
            f"{section.label}: the tokenizer has neither a padding nor an EOS token, so rows "
            "cannot be padded; add one of them to the tokenizer."
        )
    for finding in find_wrong_separators(section, {"eos": ids.eos, "bos": ids.bos}):
        raise RecipeError(make_refusal_message(finding, section))
    # If the config has eos_token_id, EOS ends each document. Otherwise BOS begins each document.
    separator = settings.row_key("eos_token_id")
    separator_starts = separator is None
    if separator_starts:
        separator = settings.row_key("bos_token_id")
    return RowRules(
        ids=ids,
        max_seq_len=section.max_seq_len or 0,
        decoder_only_format=settings.row_key("decoder_only_format", True),
        target_prompts=section.targets.prompts,
        target_responses=section.targets.responses,
        token_encoding_type=settings.row_key("token_encoding_type", "int64"),
        separator=separator,
        separator_starts=separator_starts,
    )


def make_batch_rules(settings: LoaderSettings, rules: RowRules) -> BatchRules:
    """Return what the rows and batches of a loader of another library depend on.

    Args:
        settings: the settings of the loader.
        rules: the rules for rows of LLM-Foundry's loaders: their length, EOS and padding.
    """
    ids = rules.ids
    return BatchRules(
        max_seq_len=rules.max_seq_len,
        max_gen_len=settings.row_key("max_gen_len", 0),
        eos=-1 if ids.eos is None else ids.eos,
        fill=-1 if ids.fill is None else ids.fill,
        is_left=ids.padding_side == "left",
    )


def _check_batch_size(batch_size: Any) -> int:
    """Return a batch size as an int. Raises RecipeError if it is not a whole number of rows."""
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise RecipeError(
            f"batch_size is {batch_size!r}: it must be a whole number of rows, 1 or more."
        )
    return int(batch_size)


def _find_packing_ratio(settings: LoaderSettings, rules: RowRules, batch_size: int) -> float:
    """Return the number of samples drawn for each packed row; 1 without packing.

    `packing_ratio: auto` is computed as in LLM-Foundry, by packing the first samples, and logged.
    """
    setting = settings.row_key("packing_ratio", 1)
    if setting != "auto":
        return float(setting)
    ratios = list_ratios(rules.max_seq_len, batch_size)
    rows = list[TrainingRow]()
    if len(ratios) > 1:
        # Read the samples with a separate dataset, so that the loader's own dataset begins its
        # epoch at the first sample. It prepares only `batch_size` samples ahead, since it is read
        # only here: Streaming's default would be 8 batches of `count` samples.
        count = BATCHES_TRIED * max(ratios)
        dataset = _open_dataset(settings, rules, drawn=count, workers=0, ahead=batch_size)
        with dataset.released_if_refused():
            try:
                rows = [*islice(dataset, count)]
            finally:
                dataset.end()
    ratio = find_best_ratio(rows, ratios, batch_size, rules.max_seq_len)
    with open_process_group():
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # All ranks use the smallest ratio that one of them found.
            ratios_of_ranks = [ratio] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(ratios_of_ranks, ratio)
            ratio = min(ratios_of_ranks)
    log.info("Using packing ratio %s", ratio)
    return ratio


def _refuse_other_rows(dataset: MixDataset, label: str) -> None:
    """Raise RecipeError if some streams are not preferences with images. Called if a stream has
    preferences.

    Args:
        label: the loader's name in the message, such as `train_loader`.
    """
    if not dataset.has_columns((*IMAGE_COLUMNS, *PREFERENCE_COLUMNS), in_all=True):
        raise RecipeError(
            f"{label} makes batches of preferences only if all its streams are preferences with "
            "images, and one of its streams is not: train preferences with images in a run of "
            "their own, and preferences without images with train_loader.name: pairwise_preference."
        )


def _open_dataset(
    settings: LoaderSettings, rules: RowRules, drawn: int, workers: int, ahead: int | None = None
) -> MixDataset:
    """Open the streams as one dataset. Raises RecipeError if Streaming refuses a setting.

    Args:
        drawn: samples that a device draws for a batch.
        workers: workers of a device.
        ahead: the most samples that a worker prepares ahead; None: as many as `predownload` says.
    """
    try:
        dataset = _open_streams(settings, rules, drawn)
    except (ValueError, TypeError) as error:
        # A TypeError is raised for a weight or a size that is a string.
        why = f"Streaming refuses it: {describe_error(error)}."
        if "Reused local directory" in why:
            why = LOCAL_IN_USE
        raise RecipeError(f"{settings.section.label}: {why}") from error
    if ahead is not None:
        dataset.predownload = min(dataset.predownload, ahead)
    # The cache needs room for the samples that are prepared ahead, so `ahead` counts as a batch.
    with dataset.released_if_refused():
        refuse_evicting(dataset, settings, drawn=ahead or drawn, workers=workers)
    return dataset


def _open_streams(settings: LoaderSettings, rules: RowRules, drawn: int) -> MixDataset:
    """Open the streams as one dataset. Raises Unreachable if a file of its shared memory exists.

    Streaming gives each dataset of a machine a number, and looks for the first number that has no
    files. Two runs that begin at the same moment may find the same number; then one of them fails,
    and tries again here. Ranks cannot try again, since the other ranks have gone on.

    Args:
        drawn: samples that a device draws for a batch.
    """
    tries = TRIES_TO_OPEN if get_world_size() == 1 else 1
    for attempt in range(1, 1 + tries):
        try:
            return MixDataset(
                rules,
                streams=[
                    CheckedStream(name=name, **keys) for name, keys in settings.streams.items()
                ],
                batch_size=drawn,
                **settings.streaming,
            )
        except FileExistsError as error:
            if attempt == tries:
                raise Unreachable(
                    f"{settings.section.label}: the loader cannot be built, because another run "
                    f"on this machine began at the same moment ({describe_error(error)}): start "
                    "this run again, a few seconds after the other one."
                ) from error
            time.sleep(random.uniform(0, SECONDS_TO_NEXT_TRY))
    raise AssertionError("the last attempt to open the streams neither returned nor raised")


def make_collate(settings: LoaderSettings, rules: RowRules, bins: int | None) -> Collate:
    """Make the collator of a loader.

    Args:
        bins: packed rows of a batch; None without packing.
    """
    packer = None
    if bins:
        keep = settings.row_key("max_leftover_bins_to_keep")
        packer = Packer(bins=bins, max_seq_len=rules.max_seq_len, keep=keep)
    return Collate(
        rules=rules,
        with_sequence_id=not settings.section.is_text or rules.separator is not None,
        packer=packer,
        pad_to_longest=settings.row_key("pad_to_longest", False),
        allow_pad_trimming=settings.row_key("allow_pad_trimming", False),
    )
