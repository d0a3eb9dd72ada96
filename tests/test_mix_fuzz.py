"""Whatever stands at whatever key of a training YAML or a recipe ends in findings or in one sentence."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdsmix.encode import pretrained
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.mix.checking import findings, report, verdict
from mdsmix.mix.resolve import mix_of, resolve
from tests.published import SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish, write_mix

SORTS: tuple[tuple[Any, ...], ...] = (
    (None, True, "", [], {}),
    (0, -1, 2.5, 10**30, float("nan"), float("inf")),
    ("text", "1e999", "${nothing}"),
    ([1, [2]], [{"a": None}], {"a": {"b": 1}}, {"streams": 3}),
)


TRAIN_YAML = """
max_seq_len: 8
global_train_batch_size: 4
model: {name: mpt_causal_lm, max_seq_len: 8, vocab_size: 512}
tokenizer: {name: tok, kwargs: {model_max_length: 8}}
train_loader: &loader
  name: finetuning
  drop_last: true
  num_workers: 2
  dataset: {
    streams: {web: {local: HOME/web, split: train, repeat: 1}, chat: {local: HOME/chat, split: train, repeat: 1}},
    max_seq_len: 8, decoder_only_format: true, target_prompts: none, target_responses: last, split: train,
    shuffle: true, shuffle_seed: 1, epoch_size: null, cache_limit: null, packing_ratio: 2.0, batching_method: stratified,
    num_canonical_nodes: 2, sampling_granularity: 1, token_encoding_type: int64, validate_hash: null,
    download_retry: 2, allow_unsafe_types: false, seq_parallel_replication: 1,
  }
eval_loader:
- <<: *loader
  label: held
  dataset: {streams: {web: {local: HOME/web, split: train}}, max_seq_len: 8}
"""


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


def is_answered(config: Any) -> bool:
    """Whether a mix ends in its verdict, or in the sentence that refuses it; any other error is a defect."""
    try:
        found = findings(mix := mix_of(config, "x"))
        return bool(report(mix, found)) and "\n" not in verdict(mix, found)
    except MdsmixError as refusal:
        return "\n" not in str(refusal)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def unknown(spec: object) -> None:
        raise RecipeError("not here")

    monkeypatch.setattr(pretrained, "open_tokenizer", unknown)
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 8, card={})
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 5)
    return tmp_path


def test_a_value_of_any_sort_at_any_key_is_judged_or_refused_in_a_sentence(home: Path) -> None:
    """An evaluation and the second stream are read by the code of the first: there each key gets one value, in turn."""
    tree = yaml.safe_load(TRAIN_YAML.replace("HOME", str(home)))
    for number, at in enumerate(places_in(tree)):
        is_second = at[0] == "eval_loader" or "chat" in at
        sorts = [SORTS[number % 4]] if is_second else [s for s in SORTS if s != SORTS[number % 4]]
        for value in (sort[number // 4 % len(sort)] for sort in sorts):
            assert is_answered(changed(tree, at, value)), (at, value)


def test_a_recipes_dataset_that_holds_no_keys_is_refused(home: Path) -> None:
    recipe = str(write_mix(home, "web", "chat"))
    for value in ("5", "[1]", "x"):
        with pytest.raises(RecipeError, match=r"train_loader\.dataset is .* must hold keys"):
            resolve([recipe, f"train_loader.dataset={value}"])
