"""What a YAML and an index say is judged when the loader is built: what no one would read, and a stream that is missing or hostile, is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from streaming.base.hashing import is_hash

from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.load.dataset import BEST_HASH, FASTEST_FIRST
from mdsmix.load.loader_settings import read_settings
from tests.with_torch.load_streams import config, loaded, write_tokens

WEB = {"web": {"local": "web", "split": "train", "repeat": 0.5}}

FOUNDRY = """
variables: {max_seq_len: 128, data: ./mix}
max_seq_len: ${variables.max_seq_len}
model: {name: mpt_causal_lm, token: '${oc.env:SURELY_NOT_SET}'}
tokenizer: {name: ./tok, kwargs: {model_max_length: '${max_seq_len}'}}
train_loader:
  name: finetuning
  dataset:
    streams:
      web: {local: '${variables.data}/web', remote: s3://mix/web, split: train, proportion: 0.3}
      faq: {local: '${variables.data}/faq', remote: s3://mix/faq, split: train, proportion: 0.7}
    max_seq_len: ${max_seq_len}
    decoder_only_format: true
    target_prompts: LENGTH>=20
    shuffle: true
    packing_ratio: 2
  drop_last: true
  num_workers: 8
eval_loader:
- {label: faq, name: finetuning, dataset: {streams: {faq: {local: a}}, max_seq_len: 8, decoder_only_format: true}}
- {label: web, name: text, dataset: {local: b/web, max_seq_len: 8, validate_hash: sha1}}
max_duration: 20ba
"""


def test_a_foundry_config_is_read_and_only_the_loaders_part_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(FOUNDRY)
    settings = read_settings(path)
    at = {"local": "./mix/web", "remote": "s3://mix/web", "split": "train", "proportion": 0.3}
    assert settings.streams["web"] == at | {"validate_hash": BEST_HASH}
    assert settings.section.max_seq_len == 128
    assert settings.section.targets == ("length>=20", "last")
    assert settings.streaming == {"shuffle": True}
    own = settings.loader
    assert (settings.row_key("packing_ratio"), own["num_workers"], own["drop_last"]) == (2, 8, True)
    assert settings.tokenizer is not None
    assert (settings.tokenizer.name, settings.tokenizer.kwargs) == ("./tok", {})
    # An evaluation's loader is named by its label.
    assert list(read_settings(path, "eval_loader.faq").streams) == ["faq"]
    alone = read_settings(path, "eval_loader.web")
    assert alone.streams == {"web": {"local": "b/web", "validate_hash": "sha1"}}
    named = r"name train_loader, eval_loader\.faq, eval_loader\.web\."
    with pytest.raises(RecipeError, match=named):
        read_settings(path, "eval_loader")


# Each rule has its cases in tests/test_mix_checks.py: here is one of each sort, and what this loader alone refuses.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("finetuning", {"shufle": True}, "dataset of train_loader has the key shufle, which is not read there. The loader is called with it and fails (TypeError). Fix: leave it out, or write what was meant (shuffle)."),
    ("finetuning", {"target_prompts": "some"}, "target_prompts is 'some'"),
    ("finetuning", {"decoder_only_format": False, "packing_ratio": 2}, "sets packing_ratio: 2 under decoder_only_format: false"),
    ("finetuning", {"max_seq_len": 1}, "dataset.max_seq_len of train_loader is 1"),
    ("finetuning", {"allow_unsafe_types": True}, "runs whatever code a shard of pickles holds"),
    ("finetuning", {"streams": {}}, "train_loader reads no MDS stream"),
    ("finetuning", {"streams": {"web": {"local": "web", "repeat": "2"}}}, "repeat of web is '2'"),
    ("finetuning", {"streams": {"web": "web"}}, "must be keys and values"),
    ("text", {"mlm_probability": 0.15}, "no token is masked here"),
    ("mdsmix", {"mlm_probability": 0.1}, "dataset of train_loader has the key mlm_probability, which is not read there."),
    ("mdsmix", {"allow_unsafe_types": True}, "allow_unsafe_types"),
]  # fmt: skip


def test_a_missing_or_hostile_stream_is_one_sentence(tmp_path: Path) -> None:
    for side in ("local", "remote"):
        stream = {side: f"{tmp_path}/none", "split": "train", "download_retry": 1}
        sentence = refusal(Unreachable, {"local": f"{tmp_path}/local"} | stream)
        said = f"Stream web: index.json under {tmp_path}/none/train cannot be used"
        assert sentence.startswith(said)
    index = write_tokens(tmp_path / "web", 4) / "index.json"
    tree = json.loads(index.read_text())
    tree["shards"][0]["raw_data"]["basename"] = "../shard.00000.mds"
    for text, why in {
        "{": "cannot be used",
        '{"version": 1, "shards": []}': "cannot be used",
        '{"version": 2}': "cannot be used",
        '{"version": 2, "shards": []}': "lists no samples",
        json.dumps(tree): "outside its own folder",
    }.items():
        index.write_text(text)
        assert why in refusal(Unreachable, {"local": str(index.parent)}), text


def test_what_cannot_be_right_is_one_sentence() -> None:
    for name, dataset, why in REFUSED:
        with pytest.raises(RecipeError) as caught:
            read_settings(config(WEB, name, **dataset))
        assert why in str(caught.value), dataset
        assert "\n" not in str(caught.value)


def test_a_file_without_a_loader_is_refused(tmp_path: Path) -> None:
    path, kept = tmp_path / "train.yaml", r"is a recipe.*`mdsmix render-yaml .*train.yaml -o"
    recipe = {"tokenizer": "./tok", "streams": {"web": {"source": "a.jsonl"}}}
    for text, why in {
        "a: [": "is not a readable training YAML",
        "- a": "its top level must be keys and values",
        "max_seq_len: 8": "it has no train_loader; it holds max_seq_len",
        "train_loader: {name: image, dataset: {}}": "write name: text or name: finetuning",
        "train_loader: {name: text}": "train_loader reads no MDS stream",
        "train_loader: '${nowhere}'": "is not a readable training YAML",
        json.dumps(recipe): kept,
        json.dumps(recipe | {"train_loader": {"dataset": {"shuffle": True}}}): kept,
    }.items():
        path.write_text(text)
        with pytest.raises(RecipeError, match=why):
            read_settings(path)
    with pytest.raises(RecipeError, match=r"none\.yaml cannot be read as YAML: No such file"):
        read_settings(tmp_path / "none.yaml")


def refusal(kind: type[MdsmixError], stream: dict[str, Any], **dataset: Any) -> str:
    with pytest.raises(kind) as caught:
        loaded({"web": stream}, **dataset)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def checked(local: Path, **dataset: Any) -> Any:
    return loaded({"web": {"local": str(local)}}, **dataset).dataset.streams[0].validate_hash


def test_where_the_yaml_names_no_hash_the_fastest_is_checked(tmp_path: Path) -> None:
    """Of those that all shards hold."""

    two = write_tokens(tmp_path / "two", 9, hashes=("sha1", "xxh64"), shard_bytes=260)
    assert checked(two) == "xxh64"
    assert checked(two, validate_hash="sha1") == "sha1"
    assert checked(two, validate_hash=None) is None
    index = json.loads((two / "index.json").read_text())
    del index["shards"][-1]["raw_data"]["hashes"]["xxh64"]
    (two / "index.json").write_text(json.dumps(index))
    assert checked(two) == "sha1", "which all shards hold"
    local = {"local": str(two)}
    assert "hold sha1" in refusal(RecipeError, local, validate_hash="xxh64")
    assert "hold sha1" in refusal(RecipeError, local | {"validate_hash": "md5"})
    assert all(map(is_hash, FASTEST_FIRST))
    assert checked(write_tokens(tmp_path / "none", 4, hashes=())) is None
