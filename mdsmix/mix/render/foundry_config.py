"""A recipe and its published streams -> the sections of an LLM-Foundry config, as plain mappings.

Every key of the recipe's train_loader is passed on unchanged, right or wrong: the checks read the
rendered config, so they report wrong keys. If the sections are set into an existing config, the
recipe decides the data and its encoding. All other keys of the existing loader, right or wrong,
take precedence over the defaults of mdsmix.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from typing import Any

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.foundry_yaml.extra_loaders import DATASET_KEYS_OF
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER, STREAMS_CALLBACK, TARGET_KEYS
from mdsmix.foundry_yaml.training_yaml import TRAIN, Settings, StreamSection
from mdsmix.mix.render.set_into import LINK
from mdsmix.recipe import Recipe, StreamSpec, WeightSpec
from mdsmix.recipe.plain_yaml import LENGTH, LENGTH_VARIABLE
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import TokenizerCard, name_processor_folder
from mdsmix.storage import Location, locate

Section = dict[str, Any]
"Keys and values of a config, as YAML contains them."
EVALS = "eval_loader"
CALLBACKS = "callbacks"
LONE_LABEL = "eval"
"The label under which LLM-Foundry reports an evaluation that is the only one and has no label."
NUM_WORKERS = 8
"The num_workers to render: the number in Foundry's own example configs."
WORKER_KEYS = ("num_workers", "prefetch_factor", "persistent_workers")
WITHOUT_WORKERS: Settings = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
}
"""Without workers torch accepts neither prefetching nor persistent workers, and both are Foundry's
defaults.
"""
FROM_SCRATCH = "mpt_causal_lm"
"The model of LLM-Foundry that begins with random weights."
VOCABULARY_STEP = 64
"A vocabulary is rounded up to a multiple, as in LLM-Foundry's own YAMLs, since GPUs prefer it."
TRAINING_ONLY_KEYS = frozenset(
    [
        "epoch_size",
        "packing_ratio",
        "max_leftover_bins_to_keep",
        "auto_packing_replication",
        "batching_method",
        "sampling_method",
        "sampling_granularity",
        "shuffle",
        "shuffle_algo",
        "shuffle_seed",
        "shuffle_block_size",
    ]
)
"Keys that are not rendered for evaluations, since evaluations read their streams once, in order."
KEYS_SET_BY_RECIPE = TARGET_KEYS | frozenset(
    [
        "streams",
        "remote",
        "local",
        "split",
        "max_seq_len",
        "processor",
        "hf_name",
        "hf_kwargs",
        "preprocessing_fn",
        "safe_load",
        "allowed_dataset_keys",
    ]
)
"""Keys of a dataset that decide its data and how they are encoded. The recipe sets these keys, and
their values in an existing config are dropped.
"""


def is_train_stream(spec: StreamSpec) -> bool:
    """Check whether training reads the stream. A stream of any other split is for evaluation."""
    return spec.split == "train"


def make_stream_section(
    recipe: Recipe, spec: StreamSpec, root: str, split: str, index: Index
) -> Section:
    """Return the keys of one stream in a loader's section: local, remote, split and weight.

    A cache folder's name ends in the index's short hash, so that no stale index is ever read.

    Args:
        root: the stream's folder, or the folder that contains its split.
        split: the split's folder; empty if the stream is in `root` itself.
    """
    if spec.source:
        has_remote = bool(recipe.remote)
        local = recipe.local
        if recipe.local:
            local = f"{recipe.local}/{spec.name}"
    else:
        has_remote = bool(spec.remote)
        local = spec.local
    section: Section = {}
    if local:
        # With a remote, `local` is the cache; without one it is the stream's own folder.
        section["local"] = f"{local}-{index.hash[:8]}" if has_remote else root
    elif local is not None:  # the recipe has an empty string, which is passed on
        section["local"] = local
    if has_remote:
        section["remote"] = root
    if split:
        section["split"] = split
    weight = recipe.mix.get(spec.name, WeightSpec()).set_keys
    return section | {key: value for key, value in weight.items() if key != "share"}


def make_sections(
    recipe: Recipe,
    streams: Mapping[str, StreamSection],
    config: Settings,
    with_callback: bool = False,
    phase_keys: Settings | None = None,
) -> Section:
    """Return the sections max_seq_len, tokenizer and train_loader. If the recipe has streams of
    other splits than train, return eval_loader too, and if the config's model has fewer tokens than
    the tokenizer, model.

    Args:
        streams: the recipe's streams, by name.
        config: the config that the sections are set into; empty if they become a file of their own.
        with_callback: whether to return callbacks too: those of the config, and the callback that
            logs the figures of each stream.
        phase_keys: keys at the top of the YAML of a phase, such as max_duration.
    """
    config_loader = _as_section(config.get(TRAIN))
    worker_settings = {key: config_loader[key] for key in WORKER_KEYS if key in config_loader}
    train_streams: Section = {}
    evaluations = list[Section]()
    for name, stream in streams.items():
        settings = dict(stream.settings)
        if is_train_stream(recipe.streams[name]):
            train_streams[name] = settings
        else:
            section = make_loader_section(recipe, {name: settings}, worker_settings, trains=False)
            evaluations.append({"label": name, **section})
    tree: Section = {
        **(phase_keys or {}),
        "max_seq_len": recipe.max_seq_len,
        "tokenizer": _make_tokenizer_section(recipe),
        TRAIN: make_loader_section(recipe, train_streams, config_loader),
    }
    if evaluations:
        tree[EVALS] = merge_by_label(config.get(EVALS), evaluations)
    model = _enlarge_vocabulary(recipe, config)
    if model:
        tree["model"] = model
    if with_callback:
        tree[CALLBACKS] = {STREAMS_CALLBACK: {}} | _read_callbacks(config)
    return _keep_links(tree, config)


def _enlarge_vocabulary(recipe: Recipe, config: Settings) -> Section | None:
    """Return the config's model with as many tokens as the tokenizer has, rounded up. None if the
    model has enough tokens, or if it may load trained weights, whose vocabulary is fixed.
    """
    from mdsmix.tokenizer.card import open_tokenizer

    model = _as_section(config.get("model"))
    size = model.get("vocab_size")
    # With load_path, training begins with the weights of a checkpoint.
    if model.get("name") != FROM_SCRATCH or config.get("load_path") or not isinstance(size, int):
        return None
    with suppress(MdsmixError):  # tokenizer-unseen reports the error
        needed = open_tokenizer(recipe.tokenizer).vocab_size
        if needed > size:
            return model | {"vocab_size": ceil(needed / VOCABULARY_STEP) * VOCABULARY_STEP}
    return None


def _keep_links(tree: Section, config: Settings) -> Section:
    """Return the sections with the config's own link to its max_seq_len.

    A link is a variable such as `${variables.max_seq_len}`. If the config's max_seq_len is a link,
    other keys may have the same link. The new sections have `${max_seq_len}` there, which gives the
    same number, and it is replaced by the link that was there.

    Args:
        tree: the new sections.
        config: the config that the sections are set into.
    """
    link = config.get(LENGTH)
    if not isinstance(link, str) or not LINK.fullmatch(link):
        return tree
    return {key: _keep_link(value, config.get(key), link) for key, value in tree.items()}


def _keep_link(new: Any, old: Any, link: str) -> Any:
    """Return the new value of a key, or the link (such as `${variables.max_seq_len}`) if the old
    value is the link and the new value is `${max_seq_len}`. In a mapping this is done for each key.
    """
    if new == LENGTH_VARIABLE and old == link:
        return link
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return {key: _keep_link(value, old.get(key), link) for key, value in new.items()}
    return new


def _read_callbacks(config: Settings) -> Section:
    """Return the callbacks of a config. Raises RecipeError if they are a list or other value, which
    a new section would replace.
    """
    callbacks = config.get(CALLBACKS)
    if callbacks is not None and not isinstance(callbacks, Mapping):
        raise RecipeError(
            f"{CALLBACKS} of the config is not keys and values, as LLM-Foundry needs it, so "
            f"{STREAMS_CALLBACK} cannot be added; write for example `{CALLBACKS}: "
            "{lr_monitor: {}}`, without dashes."
        )
    return _as_section(callbacks)


def _as_section(value: Any) -> Section:
    """Return a mapping as a dict, and an empty dict for any other value."""
    return dict(value) if isinstance(value, Mapping) else {}


def merge_by_label(evaluations: Any, entries: list[Section]) -> list[Any]:
    """Return a config's evaluations in their order, with new entries. A new entry replaces the
    evaluation that has the same label, or is appended if no evaluation has it.

    In a list each evaluation needs a label. If the config's only evaluation is not in a list and
    has no label, it gets the label `eval`, as in LLM-Foundry.

    Args:
        evaluations: the config's eval_loader: a list, or one evaluation. Other values are dropped.
        entries: the new evaluations, each with a label.
    """
    old_entries = list[Any]()
    if isinstance(evaluations, list):
        old_entries = evaluations
    elif isinstance(evaluations, Mapping) and evaluations:
        old_entries = [{"label": LONE_LABEL} | _as_section(evaluations)]
    new_entries = {entry["label"]: entry for entry in entries}
    merged = list[Any]()
    for entry in old_entries:
        label = str(_as_section(entry).get("label"))
        merged.append(new_entries.pop(label, entry))
    return [*merged, *new_entries.values()]


def _make_tokenizer_section(recipe: Recipe) -> Section:
    """Return the tokenizer's section: the recipe's name and kwargs, or the name of the folder that
    training nodes read. The files of this folder contain the kwargs already.
    """
    name = recipe.tokenizer.name
    kwargs = dict(recipe.tokenizer.kwargs)
    remote_folder = find_fetch_folder(recipe)
    if remote_folder:
        # If mdsmix is on the training nodes, it fetches the tokenizer before LLM-Foundry opens it.
        fetches_itself = recipe.loader == MDSMIX_LOADER or recipe.mdsmix_on_nodes
        folder = remote_folder.url if fetches_itself else find_folder_on_node(recipe, remote_folder)
    else:
        folder = _find_published_copy(recipe)
    if folder:
        name = folder
        kwargs = {}
    return {"name": name, "kwargs": {"model_max_length": LENGTH_VARIABLE} | kwargs}


def make_loader_section(
    recipe: Recipe, streams: Section, config_loader: Settings | None = None, trains: bool = True
) -> Section:
    """Return the section of one loader.

    Args:
        streams: the sections of its streams, by name.
        config_loader: keys that the section keeps unless the recipe sets them. For train_loader,
            its keys in the config that the sections are set into; for an evaluation, only the keys
            on workers (such as num_workers) of the config's train_loader.
        trains: whether it is the train_loader.
    """
    config_loader = config_loader or {}
    recipe_loader = dict(recipe.train_loader)

    # Keys of the dataset: those of the config that do not decide the data, then the recipe's.
    dataset = {
        key: value
        for key, value in _as_section(config_loader.get("dataset")).items()
        if key not in KEYS_SET_BY_RECIPE
    }
    dataset |= _as_section(recipe_loader.get("dataset"))
    if not trains:
        # An evaluation is never resumed, and its last, smaller batch counts too, even if training
        # drops its own.
        recipe_loader.pop("accept_changed", None)
        recipe_loader.pop("stream_ids", None)
        recipe_loader.pop("drop_last", None)
        dataset = {key: value for key, value in dataset.items() if key not in TRAINING_ONLY_KEYS}

    # Keys next to the dataset: the defaults, then the config's keys, then the recipe's.
    settings: Section = {"drop_last": trains, "num_workers": NUM_WORKERS, **config_loader}
    if recipe_loader.get("num_workers") == 0:
        settings |= WITHOUT_WORKERS
    settings |= recipe_loader

    # Keys that follow from the recipe. The text loader silently drops target policies, so it gets
    # none.
    targets = sorted(TARGET_KEYS.intersection(DATASET_KEYS_OF.get(recipe.loader, ())))
    encoding = {"max_seq_len": LENGTH_VARIABLE} | {key: getattr(recipe, key) for key in targets}
    if recipe.processor and recipe.loader == MDSMIX_LOADER:
        folder = find_fetch_folder(recipe, recipe.processor)
        encoding["processor"] = find_folder_on_node(recipe, folder) if folder else recipe.processor

    section: Section = {
        "name": recipe.loader,
        "dataset": {"streams": streams} | encoding | {"shuffle": trains} | dataset,
    }
    return section | {key: value for key, value in settings.items() if key not in section}


def find_fetch_folder(recipe: Recipe, processor: str | None = None) -> Location | None:
    """Return the folder at the mix's remote from which training nodes fetch the tokenizer
    (`tokenizer-<hash8>/`) or, if `processor` is given, the processor (`processor-<hash8>/`). None
    if nodes get it from a hub, or if the mix has no remote store.

    Training nodes do not have the folders of the machine that converts. So `convert` copies
    tokenizer and processor to the mix's remote, and the YAML names a folder next to the nodes'
    caches. `mdsmix.load` fetches the processor by itself.

    Args:
        processor: the recipe's processor; None for the tokenizer.
    """
    from mdsmix.processor.card import open_processor
    from mdsmix.tokenizer.card import open_tokenizer

    is_remote = "://" in (recipe.remote or "") and recipe.sourced
    if not is_remote or not os.path.isabs(processor or recipe.tokenizer.name):
        return None
    # If the tokenizer or the processor cannot be opened, tokenizer-unseen and the checks of images
    # report the error.
    with suppress(MdsmixError):
        card = TokenizerCard.from_tokenizer(open_tokenizer(recipe.tokenizer))
        folder = card.folder_name
        if processor:
            folder = name_processor_folder(open_processor(processor).hash, card)
        return locate(str(recipe.remote)) / folder
    return None


def _find_published_copy(recipe: Recipe) -> str:
    """Return the tokenizer's folder that is published with the streams, if LLM-Foundry cannot open
    the recipe's own folder: transformers 5 saved it, or the tokenizer's class is not known.
    Otherwise return an empty string.
    """
    from mdsmix.tokenizer.card import open_tokenizer

    with suppress(MdsmixError):  # tokenizer-unseen reports the error
        tokenizer = open_tokenizer(recipe.tokenizer)
        if tokenizer.note and recipe.local:
            return str(locate(recipe.local) / TokenizerCard.from_tokenizer(tokenizer).folder_name)
    return ""


def find_folder_on_node(recipe: Recipe, folder: Location) -> str:
    """Return the path at which a training node finds a tokenizer's or processor's folder after the
    user has copied it there: `LOCAL/NAME` if the recipe sets `local`, which has the node's copies
    of streams; otherwise `./NAME`, in the folder from which training is started.

    Args:
        recipe: the recipe of the rendered YAML.
        folder: the published folder, next to the streams; only its name is used.
    """
    return f"{recipe.local or '.'}/{folder.name}"
