"""A recipe and its published streams -> the sections of an LLM-Foundry config, as plain mappings.

Every key of the recipe's train_loader is passed on as it stands, right or wrong: the checks look at what is rendered, so
nothing can be rendered that they did not see. Set into a config that exists, the recipe decides what is read and how it
was encoded; every other key of that config's loader stands before our defaults, right or wrong as well.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from mdsmix.errors import MdsmixError
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import TokenizerCard, processor_folder
from mdsmix.storage import Location, locate
from mdsmix.training.loader_keys import OWN, TARGET_KEYS

LENGTH = "${max_seq_len}"
LONE_LABEL = "eval"
NUM_WORKERS = 8
"As in Foundry's own example configs."
WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")
NOT_FOR_EVAL = frozenset(
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
"An evaluation reads its streams once, whole and in order."
OF_RECIPE = TARGET_KEYS | frozenset(
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
"Keys of a dataset that say which data it reads and how they were encoded: the recipe's, whatever a config said before."


def is_train(spec: StreamSpec) -> bool:
    """A stream of another split is evaluated on."""
    return spec.split == "train"


def stream_section(
    recipe: Recipe, spec: StreamSpec, root: str, split: str, index: Index
) -> dict[str, Any]:
    """The keys of one stream, which was found in the folder `split` of `root`, or in `root` itself.

    A cache folder ends in the index's short hash, so no stale index is ever read.
    """
    has_remote = bool(recipe.remote if spec.source else spec.remote)
    local = recipe.local and f"{recipe.local}/{spec.name}" if spec.source else spec.local
    section: dict[str, Any] = {}
    if local:
        section["local"] = f"{local}-{index.hash[:8]}" if has_remote else root
    if has_remote:
        section["remote"] = root
    if split:
        section["split"] = split
    weight = recipe.mix.get(spec.name)
    return section | ({k: v for k, v in weight.given.items() if k != "share"} if weight else {})


def sections(
    recipe: Recipe,
    streams: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """max_seq_len, tokenizer, train_loader and, where streams are of another split, eval_loader.

    `config` is the one that they are set into, if any.
    """
    train = {n: dict(s) for n, s in streams.items() if is_train(recipe.streams[n])}
    own = config or {}
    trains = _keys(own.get("train_loader"))
    workers = {key: trains[key] for key in WORKERS if key in trains}
    evals = [_eval(recipe, n, dict(s), workers) for n, s in streams.items() if n not in train]
    tree: dict[str, Any] = {
        "max_seq_len": recipe.max_seq_len,
        "tokenizer": _tokenizer(recipe),
        "train_loader": _train(recipe, train, trains),
    }
    return tree | ({"eval_loader": by_label(own.get("eval_loader"), evals)} if evals else {})


def _keys(section: Any) -> dict[str, Any]:
    return dict(section) if isinstance(section, Mapping) else {}


def by_label(before: Any, entries: list[dict[str, Any]]) -> list[Any]:
    """The evaluations that a config had, each in its place, with `entries` in the places of their labels or at the end.

    LLM-Foundry reports a lone evaluation without a label as `eval`; in a list it needs one, and gets that.
    """
    lone = [{"label": LONE_LABEL} | _keys(before)] if isinstance(before, Mapping) and before else []
    listed = before if isinstance(before, list) else lone
    ours = {entry["label"]: entry for entry in entries}
    merged = [ours.pop(_label(entry), entry) for entry in listed]
    return merged + list(ours.values())


def _label(entry: Any) -> str:
    return str(entry.get("label")) if isinstance(entry, Mapping) else ""


def _tokenizer(recipe: Recipe) -> dict[str, Any]:
    """As the recipe names it; of one that training nodes fetch their folder, whose files hold its keywords."""
    if home := home_of(recipe):
        name = home.url if fetches_itself(recipe) else on_node(recipe, home)
        return {"name": name, "kwargs": {"model_max_length": LENGTH}}
    kwargs = {"model_max_length": LENGTH} | dict(recipe.tokenizer.kwargs)
    return {"name": recipe.tokenizer.name, "kwargs": kwargs}


def _train(recipe: Recipe, streams: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    given = dict(recipe.train_loader)
    kept = {k: v for k, v in _dataset(own).items() if k not in OF_RECIPE}
    dataset = {"streams": streams} | _shared(recipe) | {"shuffle": True} | kept | _dataset(given)
    workers = _workers(given, drop_last=True, own=own)
    return {"name": recipe.loader, "dataset": dataset} | workers


def _eval(
    recipe: Recipe, name: str, stream: dict[str, Any], workers: dict[str, Any]
) -> dict[str, Any]:
    """`workers`: those of the config's own train_loader, which an evaluation has too."""
    # What is evaluated is never resumed.
    given = {k: v for k, v in recipe.train_loader.items() if k != "accept_changed"}
    kept = {k: v for k, v in _dataset(given).items() if k not in NOT_FOR_EVAL}
    dataset = {"streams": {name: stream}} | _shared(recipe) | {"shuffle": False} | kept
    head = {"label": name, "name": recipe.loader, "dataset": dataset}
    # The last, smaller batch is evaluated too, whatever training does with it.
    return head | _workers(given, drop_last=False, own=workers) | {"drop_last": False}


def _dataset(train_loader: Mapping[str, Any]) -> dict[str, Any]:
    return _keys(train_loader.get("dataset"))


def _shared(recipe: Recipe) -> dict[str, Any]:
    """What both kinds of loader are told; the text loader would drop the target policies without a word."""
    targets = () if recipe.loader == "text" else sorted(TARGET_KEYS)
    seeing = {"processor": _processor(recipe)} if recipe.processor and recipe.loader == OWN else {}
    return {"max_seq_len": LENGTH} | {key: getattr(recipe, key) for key in targets} | seeing


def _processor(recipe: Recipe) -> str | None:
    """As the recipe names it, or as the training nodes find what lies beside the streams."""
    home = _processor_home(recipe)
    return on_node(recipe, home) if home else recipe.processor


def _workers(
    given: Mapping[str, Any], drop_last: bool, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Without workers torch takes neither prefetching nor persistence, and Foundry's defaults ask for both."""
    settings: dict[str, Any] = {"drop_last": drop_last, "num_workers": NUM_WORKERS, **(own or {})}
    if given.get("num_workers") == 0:
        settings |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    return {k: v for k, v in (settings | dict(given)).items() if k not in ("name", "dataset")}


def home_of(recipe: Recipe) -> Location | None:
    """Where training nodes fetch the tokenizer from, `tokenizer-<hash8>/` at the remote; None where it is at a hub, or everything on one disk.

    No folder of the machine that converted is named for another: `convert` has put the tokenizer at the mix's root, and the YAML names
    a folder beside the nodes' caches.
    """
    card = _card(recipe, recipe.tokenizer.name)
    return locate(str(recipe.remote)) / card.folder_name if card else None


def _processor_home(recipe: Recipe) -> Location | None:
    """The same of the processor, which `mdsmix.load` fetches by itself."""
    from mdsmix.encode.pretrained import open_processor

    card = _card(recipe, recipe.processor)
    if not card or not recipe.processor:
        return None
    try:
        digest = open_processor(recipe.processor).hash
    except MdsmixError:
        return None  # checks of the images say why
    return locate(str(recipe.remote)) / processor_folder(digest, card)


def _card(recipe: Recipe, name: str | None) -> TokenizerCard | None:
    """The card of the recipe's tokenizer, where `name` is a folder or file that the remote holds a copy of."""
    from mdsmix.encode.pretrained import open_tokenizer

    is_remote = "://" in (recipe.remote or "") and recipe.sourced
    if not is_remote or not name or not os.path.isabs(name):
        return None
    try:
        return TokenizerCard.of(open_tokenizer(recipe.tokenizer))
    except MdsmixError:
        return None  # tokenizer-unseen says why


def fetches_itself(recipe: Recipe) -> bool:
    """Whether mdsmix is on the training nodes, where it fetches the tokenizer before LLM-Foundry looks for it."""
    return recipe.loader == OWN or recipe.mdsmix_on_nodes


def on_node(recipe: Recipe, home: Location) -> str:
    """The folder on a training node: beside its caches, else in the folder in which training is started."""
    return f"{recipe.local or '.'}/{home.name}"


def fetch_line(home: Location, folder: str, endpoint: str | None = None) -> str:
    """The command that a training node runs once. `endpoint`: of the store that this machine uses; no YAML names it."""
    options = ["--endpoint-url", endpoint] if endpoint else []
    return shlex.join(["aws", "s3", "cp", "--recursive", *options, home.url, folder])
