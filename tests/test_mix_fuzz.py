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
    keys = [*tree] if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(tree[key], (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    inner = tree = copy.deepcopy(tree)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return tree


def judge(path: Path) -> str:
    mix = resolve([str(path)])
    found = findings(mix)
    assert report(mix, found)
    return verdict(mix, found)


def is_answered(act: Callable[[Path], str], path: Path, text: str) -> bool:
    """Whether what is done with a file of this text ends in the verdict, or in the sentence that refuses one; any other error is a defect."""
    path.write_text(text)
    try:
        return "\n" not in act(path)
    except MdsmixError as refusal:
        return "\n" not in str(refusal)


def set_into(config: Path) -> str:
    mix, _ = render(str(config.with_name("mix.yaml")), [], str(config))
    return verdict(mix, findings(mix))


def written(tree: Any) -> str:
    """As YAML, by libyaml where there is one: in Python it takes as long as to judge it."""
    return yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


PLACES = list(places(train_yaml(Path("x"))))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    publish(folder / "web", SPLIT, [SPLIT_ROW] * 30, card={})
    publish(folder / "chat", TURNS, [TURNS_ROW] * 20)
    streams = {n: {"local": str(folder / n)} for n in ("web", "chat")}
    recipe = {"tokenizer": "tok", "max_seq_len": LENGTH, "streams": streams}
    (folder / "mix.yaml").write_text(written(recipe))
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
        text = written(changed(train_yaml(home), at, value))
        assert is_answered(judge, home / "train.yaml", text), value


KEYS = ["1", "null", "[a]", "{a: 1}", "? [a]\n", "2001-01-01", "1.5", "'${x}'", "!!binary aGk="]


@pytest.mark.parametrize("inside", ["", "train_loader: ", "eval_loader: ", "tokenizer: "])
def test_any_key_is_judged_or_refused_in_a_sentence(home: Path, inside: str) -> None:
    base = written(train_yaml(home))
    for key in KEYS:
        entry = f"{inside}{{{key.strip()}: 1}}" if inside else f"{key}: 1"
        for text in (f"{base}{entry}\n", f"{entry}\n"):
            assert is_answered(judge, home / "keys.yaml", text), text


@pytest.mark.parametrize("key", ["train_loader", "eval_loader", "tokenizer", "max_seq_len"])
def test_any_config_is_set_or_refused_in_a_sentence(home: Path, key: str) -> None:
    for value in VALUES:
        for is_flow in (None, True):
            text = yaml.safe_dump({key: value}, default_flow_style=is_flow)
            assert is_answered(set_into, home / "into.yaml", text), text


def test_a_recipes_dataset_that_holds_no_keys_is_refused(home: Path) -> None:
    for value in ("5", "[1]", "x"):
        with pytest.raises(RecipeError, match=r"train_loader\.dataset is .* must hold keys"):
            resolve([str(home / "mix.yaml"), f"train_loader.dataset={value}"])


def test_a_stray_streams_key_does_not_make_a_recipe(home: Path) -> None:
    tree, path = train_yaml(home) | {"streams": {}}, home / "stray.yaml"
    for lacking in ("", "model"):
        path.write_text(written({k: v for k, v in tree.items() if k != lacking}))
        assert resolve([str(path)]).recipe is None
    del tree["train_loader"]
    path.write_text(written(tree))
    with pytest.raises(RecipeError, match="has no train_loader"):
        resolve([str(path)])
