"""The dataset of a loader. When the loader is built, unknown keys of the YAML are refused, and a
stream that is missing or hostile too. A shard that fails raises an error in the training loop that
names it, with and without workers: the epoch does not end early, and nothing hangs.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
import shutil
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from streaming.base.dataset import _ShardState
from streaming.base.hashing import is_hash

from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.load.checked_stream import BEST_HASH, FASTEST_FIRST
from mdsmix.load.loader_settings import read_settings
from mdsmix.load.mix_loader import MixLoader
from mdsmix.recipe import TokenizerSpec
from tests.abuse.test_published import Trap
from tests.alarm import fail_after
from tests.published import publish
from tests.with_torch.load_streams import config, first_tokens, loaded, write_stream, write_tokens

ROWS = 24
SHARD = "shard.00002.mds"
"The shard that is damaged."
TOKENS_BEFORE = [10, 18, 26, 34, 42, 50]
"The first tokens of the rows before that shard: all of them are delivered."
pytestmark = pytest.mark.usefixtures("_release_loaders")


def write_shards(folder: Path, **settings: Any) -> Path:
    """Write a stream of 24 rows in shards of about three rows."""
    write_tokens(folder, ROWS, size_limit=260, **settings)
    assert len(list(folder.glob("*.mds*"))) > 4
    return folder


def build(folder: Path, workers: int = 0, remote: Path | None = None, **keys: Any) -> MixLoader:
    """Build the loader of a stream in `folder`, which is fetched from `remote` if that is given.

    A lost shard is requested once: each retry would take at least a second.
    """
    stream = {"local": str(folder), "download_retry": 1}
    if remote:
        stream["remote"] = str(remote)
    return loaded({"web": stream}, num_workers=workers, **keys)


def flip(path: Path) -> None:
    """Change one bit of the last token, which no decoder notices."""
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def first_error(loader: MixLoader) -> tuple[list[int], str]:
    """Return the first tokens of the rows before the error, and its message."""
    tokens: list[int] = []
    with fail_after(30), pytest.raises(MdsmixError) as caught:
        tokens.extend(token for batch in loader for token in first_tokens([batch]))
    return tokens, str(caught.value)


WAYS = [(Path.unlink, "web", 0), (truncate, "copy", 0), (flip, "web", 0), (Path.unlink, "copy", 2)]


@pytest.mark.parametrize(("damage", "local", "workers"), WAYS)
def test_a_damaged_shard_is_named(damage: Any, local: str, workers: int, tmp_path: Path) -> None:
    web = tmp_path / "web"
    hashes = ("sha1",) if damage is flip else ()  # the others are noticed by the size
    damage(write_shards(web, hashes=hashes) / SHARD)
    loader = build(tmp_path / local, workers, web if local == "copy" else None)
    tokens, sentence = first_error(loader)
    assert sentence.startswith(f"Stream web: shard {SHARD} under {web} is lost or damaged")
    assert "\n" not in sentence
    assert tokens == TOKENS_BEFORE, "whole batches of rows before the shard are delivered"
    assert not (tmp_path / "copy" / SHARD).exists(), "the damaged copy is deleted from the cache"


def test_a_damaged_original_is_not_deleted(tmp_path: Path) -> None:
    """If the remote is the local folder, by whatever name, its files are originals. So is a
    compressed shard.
    """
    web = write_shards(tmp_path / "web")
    link = tmp_path / "link"
    truncate(web / SHARD)
    link.symlink_to(web)
    message = f"shard {SHARD} under {link} is lost or damaged"
    assert message in first_error(build(web, remote=link))[1]
    assert (web / SHARD).exists()
    compressed = write_shards(tmp_path / "zip", compression="zstd:3", hashes=()) / f"{SHARD}.zstd"
    truncate(compressed)
    assert f"shard {SHARD}" in first_error(build(tmp_path / "zip"))[1]
    assert compressed.exists()


def test_a_cache_of_decompressed_shards_is_refused_without_its_remote(tmp_path: Path) -> None:
    """Streaming would delete the shards, and then fail without them."""
    settings: dict[str, Any] = {"size_limit": 600, "compression": "zstd:3"}
    remote = write_tokens(tmp_path / "remote", 60, **settings)
    cached = {"remote": str(remote), "local": f"{tmp_path}/local"}
    assert len(first_tokens(loaded({"a": cached}))) == 60
    gc.collect()
    files_before = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert len(files_before) > 2
    assert not any(name.endswith(".zstd") for name in files_before)
    for alone in ({"local": cached["local"]}, cached | {"remote": cached["local"]}):
        count = len(files_before) - 1
        message = (
            f"as compressed, but {count} of them exist only decompressed.*Set the stream's remote"
        )
        with pytest.raises(RecipeError, match=message):
            loaded({"b": {"local": str(write_tokens(tmp_path / "b", 4))}, "a": alone})
        assert sorted(path.name for path in (tmp_path / "local").iterdir()) == files_before
        shutil.rmtree(tmp_path / "b")
    assert len(first_tokens(loaded({"a": cached}))) == 60
    gc.collect()
    assert len(first_tokens(loaded({"a": {"local": str(remote)}}))) == 60, (
        "compressed, as published"
    )


def test_a_shard_is_not_read_before_the_worker_that_fetched_it_has_checked_it(
    tmp_path: Path,
) -> None:
    """The file exists as soon as it is fetched, and is deleted if it is damaged."""
    remote = write_shards(tmp_path / "remote")
    dataset = build(tmp_path / "local", remote=remote).dataset
    truncate(remote / SHARD)
    copy = Path(shutil.copy(remote / SHARD, tmp_path / "local"))
    dataset._shard_states[2] = _ShardState.PREPARING
    dataset.prepare_shard(2, blocking=False)  # a background thread does not wait for the check

    def find_it_damaged() -> None:
        copy.unlink()
        dataset._shard_states[2] = _ShardState.LOCAL

    Timer(0.3, find_it_damaged).start()
    with fail_after(30), pytest.raises(Unreachable, match=SHARD):
        dataset.get_item(int(dataset.sample_offset_per_shard[2]))


@pytest.mark.parametrize(("damage", "workers"), [(truncate, 0), (flip, 2)])
def test_a_damaged_copy_is_fetched_again(damage: Any, workers: int, tmp_path: Path) -> None:
    remote = write_shards(tmp_path / "remote")
    damage(shutil.copytree(remote, tmp_path / "local") / SHARD)
    with fail_after(30):
        batches = list(build(tmp_path / "local", workers, remote))
    rows = [row for batch in batches for row in batch["input_ids"].tolist()]
    assert sorted(rows) == [list(range(10 + 8 * i, 18 + 8 * i)) for i in range(ROWS)]


def test_a_row_that_does_not_decode_or_fit_is_named(tmp_path: Path) -> None:
    rows = [{"turns": [{"input_ids": [10], "labels": labels}]} for labels in ([11], [])]
    shard = write_stream(tmp_path, {"turns": "json"}, rows, hashes=()) / "shard.00000.mds"
    start = "Stream web, shard shard.00000.mds, row 1: this row has no turns, or its last resp"
    assert first_error(build(tmp_path))[1].startswith(start)
    shard.write_bytes(shard.read_bytes().replace(b'"labels"', b"'labels'"))
    tokens, sentence = first_error(build(tmp_path))
    assert tokens == []
    assert "(row 0: " in sentence


def test_an_error_ends_the_workers_and_the_next_pass_starts_others(tmp_path: Path) -> None:
    shard = write_shards(tmp_path) / SHARD
    whole = shard.read_bytes()
    truncate(shard)
    loader = build(tmp_path, 2, persistent_workers=True)
    assert first_error(loader)[0] == TOKENS_BEFORE
    assert not multiprocessing.active_children()
    shard.write_bytes(whole)
    with fail_after(30):
        assert len(first_tokens(loader)) == ROWS
    loader.end()


def test_pickled_rows_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    rows = [{"tokens": pickle.dumps(Trap(tmp_path / "sprung"))}] * 9
    publish(tmp_path / "web", {"tokens": "pkl"}, rows)
    for setting in ({}, {"allow_unsafe_types": True}):
        with fail_after(60), pytest.raises(MdsmixError, match="unsafe"):
            build(tmp_path / "web/train", **setting)
    assert not (tmp_path / "sprung").exists()


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
    max_seq_len: ${max_seq_len}
    decoder_only_format: true
    target_prompts: LENGTH>=20
    shuffle: true
    packing_ratio: 2
  drop_last: true
  num_workers: 8
eval_loader:
- label: faq
  name: finetuning
  dataset: {streams: {faq: {local: a}}, max_seq_len: 8, decoder_only_format: true}
- {label: web, name: text, dataset: {local: b/web, max_seq_len: 8, validate_hash: sha1}}
"""


def test_of_a_foundry_config_only_the_section_of_the_loader_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(FOUNDRY)
    settings = read_settings(path)
    stream = {"local": "./mix/web", "remote": "s3://mix/web", "split": "train", "proportion": 0.3}
    assert settings.streams["web"] == stream | {"validate_hash": BEST_HASH}
    section = settings.section
    loader = settings.loader
    assert (section.max_seq_len, section.targets) == (128, ("length>=20", "last"))
    assert settings.streaming == {"shuffle": True}
    assert settings.row_key("packing_ratio") == 2
    assert (loader["num_workers"], loader["drop_last"]) == (8, True)
    assert settings.tokenizer == TokenizerSpec(name="./tok")
    # The loader of an evaluation is named by its label.
    assert list(read_settings(path, "eval_loader.faq").streams) == ["faq"]
    evaluation = read_settings(path, "eval_loader.web")
    assert evaluation.streams == {"web": {"local": "b/web", "validate_hash": "sha1"}}
    names = r"train_loader, eval_loader\.faq, eval_loader\.web\."
    with pytest.raises(RecipeError, match=names):
        read_settings(path, "eval_loader")


# Each rule has its cases in tests/test_mix_checks.py. Here is one of each sort, and keys that only
# this loader refuses.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "finetuning",
        {"shufle": True},
        "dataset of train_loader has the key shufle, which is not read there. The loader is called "
        "with the key and fails (TypeError). Fix: remove shufle, or write shuffle if that key was "
        "meant.",
    ),
    ("finetuning", {"target_prompts": "some"}, "target_prompts is 'some'"),
    (
        "finetuning",
        {"decoder_only_format": False, "packing_ratio": 2},
        "sets packing_ratio: 2, but also decoder_only_format: false",
    ),
    ("finetuning", {"max_seq_len": 1}, "dataset.max_seq_len of train_loader is 1"),
    ("finetuning", {"allow_unsafe_types": True}, "runs any code that a shard of pickles contains"),
    ("finetuning", {"streams": {}}, "train_loader reads no MDS stream"),
    ("finetuning", {"streams": {"web": {"local": "web", "repeat": "2"}}}, "repeat of web is '2'"),
    ("finetuning", {"streams": {"web": "web"}}, "must be keys and values"),
    ("text", {"mlm_probability": 0.15}, "masks no tokens"),
    (
        "mdsmix",
        {"mlm_probability": 0.1},
        "dataset of train_loader has the key mlm_probability, which is not read there.",
    ),
]


def test_a_missing_or_hostile_stream_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for side in ("local", "remote"):
        stream = {side: f"{tmp_path}/none", "split": "train", "download_retry": 1}
        sentence = refusal(Unreachable, {"local": f"{tmp_path}/local"} | stream)
        message = f"Stream web: index.json under {tmp_path}/none/train cannot be used"
        assert sentence.startswith(message)
    index = write_tokens(tmp_path / "web", 4) / "index.json"
    tree = json.loads(index.read_text())
    tree["shards"][0]["raw_data"]["basename"] = "../shard.00000.mds"
    for text, message in {
        "{": "cannot be used",
        '{"version": 1, "shards": []}': "cannot be used",
        '{"version": 2}': "cannot be used",
        '{"version": 2, "shards": []}': "lists no samples",
        json.dumps(tree): "outside its own folder",
    }.items():
        index.write_text(text)
        assert message in refusal(Unreachable, {"local": str(index.parent)}), text


def test_wrong_settings_are_refused_in_one_sentence() -> None:
    for name, dataset, message in REFUSED:
        with pytest.raises(RecipeError) as caught:
            read_settings(config(WEB, name, **dataset))
        assert message in str(caught.value), dataset
        assert "\n" not in str(caught.value)


def test_a_file_without_a_loader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    is_recipe = r"is a recipe.*`mdsmix render-yaml .*train.yaml -o"
    recipe = {"tokenizer": "./tok", "streams": {"web": {"source": "a.jsonl"}}}
    for text, why in {
        "a: [": "is not a readable YAML file",
        "- a": "its top level must be keys and values",
        "max_seq_len: 8": "but this file has only max_seq_len",
        "# later": "but this file has no keys",
        "train_loader: {name: image, dataset: {}}": "write name: text or name: finetuning",
        "train_loader: {name: text}": "train_loader reads no MDS stream",
        "train_loader: '${nowhere}'": "is not a readable YAML file",
        json.dumps(recipe): is_recipe,
        json.dumps(recipe | {"train_loader": {"dataset": {"shuffle": True}}}): is_recipe,
    }.items():
        path.write_text(text)
        with pytest.raises(RecipeError, match=why):
            read_settings(path)
    with pytest.raises(RecipeError, match=r"none\.yaml: no such file"):
        read_settings(tmp_path / "none.yaml")


def refusal(kind: type[MdsmixError], stream: dict[str, Any], **dataset: Any) -> str:
    with pytest.raises(kind) as caught:
        loaded({"web": stream}, **dataset)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_hash(local: Path, **dataset: Any) -> Any:
    return loaded({"web": {"local": str(local)}}, **dataset).dataset.streams[0].validate_hash


def test_if_the_yaml_names_no_hash_the_fastest_that_all_shards_have_is_checked(
    tmp_path: Path,
) -> None:
    two = write_tokens(tmp_path / "two", 9, hashes=("sha1", "xxh64"), size_limit=260)
    assert read_hash(two) == "xxh64"
    assert read_hash(two, validate_hash="sha1") == "sha1"
    assert read_hash(two, validate_hash=None) is None
    index = json.loads((two / "index.json").read_text())
    del index["shards"][-1]["raw_data"]["hashes"]["xxh64"]
    (two / "index.json").write_text(json.dumps(index))
    assert read_hash(two) == "sha1", "which all shards have"
    local = {"local": str(two)}
    assert "have hashes by sha1" in refusal(RecipeError, local, validate_hash="xxh64")
    assert "have hashes by sha1" in refusal(RecipeError, local | {"validate_hash": "md5"})
    assert all(map(is_hash, FASTEST_FIRST))
    assert read_hash(write_tokens(tmp_path / "none", 4, hashes=())) is None
