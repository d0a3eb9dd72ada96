"""Whatever stands at whatever key of a training YAML or a recipe ends in findings or in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdsmix.encode import pretrained
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.mix.checking import findings, report, verdict
from mdsmix.mix.render import render
from mdsmix.mix.resolve import resolve
from tests.published import LENGTH, SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2.5,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "text",
    "1e999",
    "${nothing}",
    [],
    [1, [2]],
    [{"a": None}],
    {},
    {"a": {"b": 1}},
    {"streams": 3},
]


def train_yaml(home: Path) -> dict[str, Any]:
    dataset = {
        "streams": {
            name: {"local": str(home / name), "split": "train", "repeat": 1}
            for name in ("web", "chat")
        },
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
    evaluated = {k: dataset[k] for k in ("streams", "max_seq_len", "decoder_only_format")}
    return {
        "max_seq_len": LENGTH,
        "global_train_batch_size": 4,
        "model": {"name": "mpt_causal_lm", "max_seq_len": LENGTH, "vocab_size": 512},
        "tokenizer": {"name": "tok", "kwargs": {"model_max_length": LENGTH}},
        "train_loader": loader,
        "eval_loader": [copy.deepcopy(loader | {"label": "held", "dataset": evaluated})],
    }


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in (
        tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    ):
        yield (*at, key)
        yield from places(tree[key], (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    inner = tree
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return tree


def answer(act: Callable[[], str]) -> str:
    """The verdict, or the sentence that refuses to give one; any other error is a defect."""
    try:
        return act()
    except MdsmixError as refusal:
        return str(refusal)


def judge(path: Path) -> str:
    mix = resolve([str(path)])
    found = findings(mix)
    assert report(mix, found)
    return verdict(mix, found)


def set_into(home: Path) -> str:
    mix, _ = render(str(home / "mix.yaml"), [], str(home / "into.yaml"))
    return verdict(mix, findings(mix))


PLACES = list(places(train_yaml(Path("x"))))


def written(tree: Any) -> str:
    """As YAML, by libyaml where there is one: in Python it takes as long as to judge it."""
    return yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    publish(folder / "web", SPLIT, [SPLIT_ROW] * 30, card={})
    publish(folder / "chat", TURNS, [TURNS_ROW] * 20)
    return folder


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(spec: object) -> None:
        raise RecipeError("not here")

    monkeypatch.setattr(pretrained, "open_tokenizer", unknown)


@pytest.mark.parametrize("at", PLACES, ids=lambda at: ".".join(map(str, at)))
def test_any_value_at_any_key_is_judged_or_refused_in_a_sentence(
    home: Path, at: tuple[Any, ...]
) -> None:
    """An evaluation and the second stream are read by the same code: there a third of the values, others at each key."""
    is_second = at[0] == "eval_loader" or "chat" in at
    for value in VALUES[PLACES.index(at) % 3 :: 3] if is_second else VALUES:
        path = home / "train.yaml"
        path.write_text(written(changed(train_yaml(home), at, value)))
        assert "\n" not in answer(lambda path=path: judge(path))


KEYS = ["1", "null", "[a]", "{a: 1}", "? [a]\n", "2001-01-01", "1.5", "'${x}'", "!!binary aGk="]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("inside", ["", "train_loader: ", "eval_loader: ", "tokenizer: "])
def test_any_key_is_judged_or_refused_in_a_sentence(home: Path, key: str, inside: str) -> None:
    base = written(train_yaml(home))
    entry = f"{key}: 1" if not inside else f"{inside}{{{key.strip()}: 1}}"
    for text in (f"{base}{entry}\n", f"{entry}\n"):
        (home / "keys.yaml").write_text(text)
        assert "\n" not in answer(lambda: judge(home / "keys.yaml"))


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("key", ["train_loader", "eval_loader", "tokenizer", "max_seq_len"])
def test_any_config_is_set_or_refused_in_a_sentence(home: Path, key: str, value: Any) -> None:
    streams = {n: {"local": str(home / n)} for n in ("web", "chat")}
    recipe = {"tokenizer": "tok", "max_seq_len": LENGTH, "streams": streams}
    (home / "mix.yaml").write_text(written(recipe))
    for text in (
        written({key: value}),
        yaml.safe_dump({key: value}, default_flow_style=True),
    ):
        (home / "into.yaml").write_text(text)
        assert "\n" not in answer(lambda: set_into(home))


@pytest.mark.parametrize("value", ["5", "[1]", "x"])
def test_a_recipes_dataset_that_holds_no_keys_is_refused(home: Path, value: str) -> None:
    streams = {n: {"local": str(home / n)} for n in ("web", "chat")}
    recipe = {"tokenizer": "tok", "max_seq_len": LENGTH, "streams": streams}
    (home / "mix.yaml").write_text(written(recipe))
    with pytest.raises(RecipeError, match=r"train_loader\.dataset is .* must hold keys"):
        resolve([str(home / "mix.yaml"), f"train_loader.dataset={value}"])


def test_a_stray_streams_key_does_not_make_a_recipe(home: Path) -> None:
    tree = train_yaml(home)
    for lacking in ((), ("model",), ("train_loader",)):
        left = {k: v for k, v in tree.items() if k not in lacking} | {"streams": {}}
        (home / "stray.yaml").write_text(written(left))
        if lacking == ("train_loader",):
            with pytest.raises(RecipeError, match="has no train_loader"):
                resolve([str(home / "stray.yaml")])
        else:
            assert resolve([str(home / "stray.yaml")]).recipe is None
