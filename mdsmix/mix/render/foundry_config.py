"""A recipe and its published streams -> the sections of an LLM-Foundry config, as plain mappings.

Every key of the recipe's train_loader is passed on unchanged, right or wrong: the checks judge the
rendered config, so they see every key. Where the sections are set into an existing config, the
recipe decides the data and its encoding. Every other key of that config's loader, right or wrong,
takes precedence over the defaults of mdsmix.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mdsmix.errors import MdsmixError
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER, TARGET_KEYS
from mdsmix.foundry_yaml.training_yaml import TRAIN, Settings, StreamSection
from mdsmix.kinds.kind_table import DATASET_KEYS_OF
from mdsmix.mix.render.set_into import LENGTH, LINK
from mdsmix.recipe import Recipe, StreamSpec, WeightSpec
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import TokenizerCard, name_processor_folder
from mdsmix.storage import Location, locate

Section = dict[str, Any]
"Keys and values of a config, as YAML holds them."
VARIABLE = "${max_seq_len}"
EVALS = "eval_loader"
LONE_LABEL = "eval"
NUM_WORKERS = 8
"As in Foundry's own example configs."
WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")
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
"Keys that no evaluation gets, since it reads its streams once, whole and in order."
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
"""Keys of a dataset that name its data and their encoding. The recipe sets these, whatever a config
said before.
"""


def is_train_stream(spec: StreamSpec) -> bool:
    """Whether training reads the stream. A stream of any split but `train` is for evaluation."""
    return spec.split == "train"


def make_stream_section(
    recipe: Recipe, spec: StreamSpec, root: str, split: str, index: Index
) -> Section:
    """The keys of one stream that lies in the folder `split` of `root`, or in `root` itself where
    `split` is empty.

    A cache folder ends in the index's short hash, so no stale index is ever read.
    """
    has_remote = bool(recipe.remote if spec.source else spec.remote)
    local = recipe.local and f"{recipe.local}/{spec.name}" if spec.source else spec.local
    cache = local and (f"{local}-{index.hash[:8]}" if has_remote else root)
    section: Section = {
        "local": cache,
        "remote": root if has_remote else None,
        "split": split or None,
    }
    section |= recipe.mix.get(spec.name, WeightSpec()).given
    return {k: v for k, v in section.items() if v is not None and k != "share"}


def make_sections(
    recipe: Recipe,
    streams: Mapping[str, StreamSection],
    config: Settings,
) -> Section:
    """max_seq_len, tokenizer and train_loader; eval_loader too where the recipe has streams of
    other splits.

    `config`: the config that the sections are set into; empty where they are a file of their own.
    """
    trained = _keys(config.get(TRAIN))
    workers = {key: trained[key] for key in WORKERS if key in trained}
    train = {n: dict(s.settings) for n, s in streams.items() if is_train_stream(recipe.streams[n])}
    evals = [
        {"label": n, **make_loader_section(recipe, {n: dict(s.settings)}, workers, trains=False)}
        for n, s in streams.items()
        if n not in train
    ]
    tree: Section = {
        "max_seq_len": recipe.max_seq_len,
        "tokenizer": _tokenizer(recipe),
        TRAIN: make_loader_section(recipe, train, trained),
    }
    if evals:
        tree[EVALS] = merge_by_label(config.get(EVALS), evals)
    return _with_own_links(tree, config)


def _with_own_links(tree: Section, config: Settings) -> Section:
    """Keep a link of the config to its length, such as `${variables.max_seq_len}`, where VARIABLE
    would replace it.

    Both mean the same, since the config's own `max_seq_len` is that link.
    """
    own = config.get(LENGTH)
    if not isinstance(own, str) or not LINK.fullmatch(own):
        return tree
    return {key: _relinked(value, config.get(key), own) for key, value in tree.items()}


def _relinked(new: Any, old: Any, own: str) -> Any:
    """Return the new value, with `own` for VARIABLE wherever the old value is `own`."""
    if new == VARIABLE and old == own:
        return own
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return {key: _relinked(value, old.get(key), own) for key, value in new.items()}
    return new


def _keys(section: Any) -> Section:
    return dict(section) if isinstance(section, Mapping) else {}


def merge_by_label(before: Any, entries: list[Section]) -> list[Any]:
    """The evaluations of a config in their order. An entry replaces the evaluation of its label, or
    is appended.

    LLM-Foundry reports a lone evaluation without a label as `eval`. In a list each needs a label,
    so the lone one gets `eval`.
    """
    lone = [{"label": LONE_LABEL} | _keys(before)] if isinstance(before, Mapping) and before else []
    ours = {entry["label"]: entry for entry in entries}
    every = before if isinstance(before, list) else lone
    return [ours.pop(str(_keys(entry).get("label")), entry) for entry in every] + [*ours.values()]


def _tokenizer(recipe: Recipe) -> Section:
    """The tokenizer section: the recipe's name and kwargs, or the folder that training nodes fetch,
    whose files hold the kwargs.
    """
    name, kwargs = recipe.tokenizer.name, dict(recipe.tokenizer.kwargs)
    if home := find_fetch_folder(recipe):
        # Where mdsmix is on the training nodes, it fetches the tokenizer before LLM-Foundry looks
        # for it.
        fetches_itself = recipe.loader == MDSMIX_LOADER or recipe.mdsmix_on_nodes
        name, kwargs = home.url if fetches_itself else folder_on_node(recipe, home), {}
    elif copy := _published_copy(recipe):
        name, kwargs = copy, {}
    return {"name": name, "kwargs": {"model_max_length": VARIABLE} | kwargs}


def make_loader_section(
    recipe: Recipe, streams: Section, own: Settings | None = None, trains: bool = True
) -> Section:
    """The section of one loader. `own`: keys of this loader in the config; for an evaluation, the
    worker settings of training.
    """
    had, given = own or {}, dict(recipe.train_loader)
    dataset = {k: v for k, v in _keys(had.get("dataset")).items() if k not in KEYS_SET_BY_RECIPE}
    dataset |= _keys(given.get("dataset"))
    if not trains:
        # An evaluation is never resumed, and its last, smaller batch counts too, even where
        # training drops its own.
        given = {k: v for k, v in given.items() if k not in ("accept_changed", "drop_last")}
        dataset = {k: v for k, v in dataset.items() if k not in TRAINING_ONLY_KEYS}
    settings: Section = {"drop_last": trains, "num_workers": NUM_WORKERS, **had}
    if given.get("num_workers") == 0:
        # Without workers torch takes neither prefetching nor persistence, and Foundry's defaults
        # ask for both.
        settings |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    # The text loader would drop target policies without a word.
    targets = sorted(TARGET_KEYS.intersection(DATASET_KEYS_OF.get(recipe.loader, ())))
    shared = {"max_seq_len": VARIABLE} | {key: getattr(recipe, key) for key in targets}
    if recipe.processor and recipe.loader == MDSMIX_LOADER:
        home = find_fetch_folder(recipe, recipe.processor)
        shared["processor"] = folder_on_node(recipe, home) if home else recipe.processor
    head = {
        "name": recipe.loader,
        "dataset": {"streams": streams} | shared | {"shuffle": trains} | dataset,
    }
    return head | {k: v for k, v in (settings | given).items() if k not in head}


def find_fetch_folder(recipe: Recipe, processor: str | None = None) -> Location | None:
    """The folder from which training nodes fetch the tokenizer (`tokenizer-<hash8>/` at the remote)
    or the processor. None where it comes from a hub, or where the mix has no remote store.

    Training nodes do not have the converting machine's folders. So `convert` copies tokenizer and
    processor to the mix's root, and the YAML names a folder beside the nodes' caches. `mdsmix.load`
    fetches the processor by itself.
    """
    from mdsmix.processor.card import open_processor
    from mdsmix.tokenizer.card import open_tokenizer

    is_remote = "://" in (recipe.remote or "") and recipe.sourced
    if not is_remote or not os.path.isabs(processor or recipe.tokenizer.name):
        return None
    with suppress(MdsmixError):  # tokenizer-unseen and the checks of images say why
        card = TokenizerCard.from_tokenizer(open_tokenizer(recipe.tokenizer))
        digest = open_processor(processor).hash if processor else None
        folder = name_processor_folder(digest, card) if digest else card.folder_name
        return locate(str(recipe.remote)) / folder
    return None


def _published_copy(recipe: Recipe) -> str:
    """Return the folder of the tokenizer that is published with the streams, if LLM-Foundry cannot
    open the recipe's own folder: transformers 5 saved it, or its class is not known.
    """
    from mdsmix.tokenizer.card import open_tokenizer

    with suppress(MdsmixError):  # tokenizer-unseen says why
        tokenizer = open_tokenizer(recipe.tokenizer)
        if tokenizer.note and recipe.local:
            return str(locate(recipe.local) / TokenizerCard.from_tokenizer(tokenizer).folder_name)
    return ""


def folder_on_node(recipe: Recipe, home: Location) -> str:
    """The folder of `home` on a training node: beside the node's caches, else in the folder where
    training starts.
    """
    return f"{recipe.local or '.'}/{home.name}"
