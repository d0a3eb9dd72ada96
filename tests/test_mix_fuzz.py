"""Whatever stands at whatever key of a training YAML or a recipe ends in findings or in one sentence."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.encode import pretrained
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.mix.checking import findings, report, verdict
from mdsmix.mix.resolve import mix_of, resolve
from mdsmix.mix.streams import Mix
from tests.published import LENGTH, SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish, write_mix

SORTS: tuple[tuple[Any, ...], ...] = (
    (None, True, "", [], {}),
    (0, -1, 2.5, 10**30, float("nan"), float("inf")),
    ("text", "1e999", "${nothing}"),
    ([1, [2]], [{"a": None}], {"a": {"b": 1}}, {"streams": 3}),
)


def train_yaml(home: Path) -> dict[str, Any]:
    places = {name: {"local": str(home / name), "split": "train"} for name in ("web", "chat")}
    dataset = {
        "streams": {name: place | {"repeat": 1} for name, place in places.items()},
        "max_seq_len": LENGTH,
        "decoder_only_format": True,
        "target_prompts": "none",
        "target_responses": "last",
        "shuffle": True,
        "shuffle_seed": 1,
        "epoch_size": None,
        "cache_limit": None,
        "packing_ratio": 2.0,
        "batching_method": "stratified",
        "num_canonical_nodes": 2,
        "sampling_granularity": 1,
        "token_encoding_type": "int64",
        "validate_hash": None,
        "download_retry": 2,
        "allow_unsafe_types": False,
        "seq_parallel_replication": 1,
        "split": "train",
    }
    loader = {"name": "finetuning", "dataset": dataset, "drop_last": True, "num_workers": 2}
    evaluated = {"streams": {"web": places["web"]}, "max_seq_len": LENGTH}
    return {
        "max_seq_len": LENGTH,
        "global_train_batch_size": 4,
        "model": {"name": "mpt_causal_lm", "max_seq_len": LENGTH, "vocab_size": 512},
        "tokenizer": {"name": "tok", "kwargs": {"model_max_length": LENGTH}},
        "train_loader": loader,
        "eval_loader": [loader | {"label": "held", "dataset": evaluated}],
    }


def places_in(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = [*tree] if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places_in(tree[key], (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    inner = tree = copy.deepcopy(tree)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return tree


def is_answered(open_mix: Callable[[], Mix]) -> bool:
    """Whether a mix ends in its verdict, or in the sentence that refuses it; any other error is a defect."""
    try:
        found = findings(mix := open_mix())
        return bool(report(mix, found)) and "\n" not in verdict(mix, found)
    except MdsmixError as refusal:
        return "\n" not in str(refusal)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    publish(folder / "web", SPLIT, [SPLIT_ROW] * 8, card={})
    publish(folder / "chat", TURNS, [TURNS_ROW] * 5)
    write_mix(folder, "web", "chat")
    return folder


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(spec: object) -> None:
        raise RecipeError("not here")

    monkeypatch.setattr(pretrained, "open_tokenizer", unknown)


def test_a_value_of_any_sort_at_any_key_is_judged_or_refused_in_a_sentence(home: Path) -> None:
    """An evaluation and the second stream are read by the code of the first: there each key gets one value, in turn."""
    tree = train_yaml(home)
    for number, at in enumerate(places_in(tree)):
        is_second = at[0] == "eval_loader" or "chat" in at
        sorts = [SORTS[number % 4]] if is_second else [s for s in SORTS if s != SORTS[number % 4]]
        for value in (sort[number // 4 % len(sort)] for sort in sorts):
            config = changed(tree, at, value)
            assert is_answered(lambda config=config: mix_of(config, "x")), (at, value)  # type: ignore[misc]


def test_a_recipes_dataset_that_holds_no_keys_is_refused(home: Path) -> None:
    for value in ("5", "[1]", "x"):
        with pytest.raises(RecipeError, match=r"train_loader\.dataset is .* must hold keys"):
            resolve([str(home / "mix.yaml"), f"train_loader.dataset={value}"])
