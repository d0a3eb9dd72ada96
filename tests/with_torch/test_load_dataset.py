"""What a YAML and an index say is judged when the loader is built: what no one would read, and a
stream that is missing or hostile, is refused. A shard that fails reaches the training loop, named,
with and without workers; nothing ends early, nothing hangs.
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
from mdsmix.load.dataset import BEST_HASH, FASTEST_FIRST
from mdsmix.load.loader import MixLoader
from mdsmix.load.loader_settings import read_settings
from mdsmix.recipe import TokenizerSpec
from tests.abuse.test_published import Trap
from tests.alarm import fail_after
from tests.published import publish
from tests.with_torch.load_streams import config, first_tokens, loaded, write_stream, write_tokens

ROWS, SHARD = 24, "shard.00002.mds"
BEFORE = [10, 18, 26, 34, 42, 50]
"The first tokens of the rows that lie before that shard: all of them are delivered."
pytestmark = pytest.mark.usefixtures("_release_loaders")


def shards_of(folder: Path, **settings: Any) -> Path:
    """A stream of 24 rows in shards of three rows or so."""
    write_tokens(folder, ROWS, size_limit=260, **settings)
    assert len(list(folder.glob("*.mds*"))) > 4
    return folder


def loader_of(folder: Path, workers: int = 0, remote: Path | None = None, **keys: Any) -> MixLoader:
    """Of a stream in the folder, to which it is fetched where `remote` has it. A lost shard is
    asked for once: each further time takes a second and more.
    """
    stream = {"local": str(folder), "download_retry": 1}
    stream |= {"remote": str(remote)} if remote else {}
    return loaded({"web": stream}, num_workers=workers, **keys)


def flip(path: Path) -> None:
    """Changes one bit of the last token, which no decoder notices."""
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def first_error(loader: MixLoader) -> tuple[list[int], str]:
    """The first tokens of the rows that came before the error, and its sentence."""
    seen: list[int] = []
    with fail_after(30), pytest.raises(MdsmixError) as caught:
        seen.extend(token for batch in loader for token in first_tokens([batch]))
    return seen, str(caught.value)


WAYS = [(Path.unlink, "web", 0), (truncate, "copy", 0), (flip, "web", 0), (Path.unlink, "copy", 2)]


@pytest.mark.parametrize(("damage", "local", "workers"), WAYS)
def test_a_damaged_shard_is_named(damage: Any, local: str, workers: int, tmp_path: Path) -> None:
    web, hashes = tmp_path / "web", ("sha1",) if damage is flip else ()  # the size tells the others
    damage(shards_of(web, hashes=hashes) / SHARD)
    loader = loader_of(tmp_path / local, workers, web if local == "copy" else None)
    seen, sentence = first_error(loader)
    assert sentence.startswith(f"Stream web: shard {SHARD} under {web} is lost or damaged")
    assert "\n" not in sentence
    assert seen == BEFORE, "the rows before the shard are delivered, whole batches of them"
    assert not (tmp_path / "copy" / SHARD).exists(), "no damaged copy stays in the cache"


def test_a_damaged_shard_that_is_no_copy_stays_where_it_is(tmp_path: Path) -> None:
    """A remote that is the local folder, by whatever name: what lies there is the stream itself. A
    packed one too.
    """
    web, link = shards_of(tmp_path / "web"), tmp_path / "link"
    truncate(web / SHARD)
    link.symlink_to(web)
    said = f"shard {SHARD} under {link} is lost or damaged"
    assert said in first_error(loader_of(web, remote=link))[1]
    assert (web / SHARD).exists()
    packed = shards_of(tmp_path / "zip", compression="zstd:3", hashes=()) / f"{SHARD}.zstd"
    truncate(packed)
    assert f"shard {SHARD}" in first_error(loader_of(tmp_path / "zip"))[1]
    assert packed.exists()


def test_a_cache_of_packed_shards_without_its_remote_keeps_its_files(tmp_path: Path) -> None:
    """Streaming would delete what it unpacked, and then miss it."""
    settings: dict[str, Any] = {"size_limit": 600, "compression": "zstd:3"}
    remote = write_tokens(tmp_path / "remote", 60, **settings)
    cached = {"remote": str(remote), "local": f"{tmp_path}/local"}
    assert len(first_tokens(loaded({"a": cached}))) == 60
    gc.collect()
    before = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert len(before) > 2
    assert not any(name.endswith(".zstd") for name in before)
    for alone in ({"local": cached["local"]}, cached | {"remote": cached["local"]}):
        told = rf"local contains {len(before) - 1} of its {len(before) - 1} shards only decompressed.*set the remote"
        with pytest.raises(RecipeError, match=told):
            loaded({"b": {"local": str(write_tokens(tmp_path / "b", 4))}, "a": alone})
        assert sorted(path.name for path in (tmp_path / "local").iterdir()) == before
        shutil.rmtree(tmp_path / "b")
    assert len(first_tokens(loaded({"a": cached}))) == 60
    gc.collect()
    assert len(first_tokens(loaded({"a": {"local": str(remote)}}))) == 60, "packed, as published"


def test_no_row_is_read_of_a_shard_that_another_worker_has_not_checked_yet(tmp_path: Path) -> None:
    """It lies there as soon as it is fetched, and goes when it is found to be damaged."""
    remote = shards_of(tmp_path / "remote")
    dataset = loader_of(tmp_path / "local", remote=remote).dataset
    truncate(remote / SHARD)
    copy = Path(shutil.copy(remote / SHARD, tmp_path / "local"))
    dataset._shard_states[2] = _ShardState.PREPARING
    dataset.prepare_shard(2, blocking=False)  # a background thread does not wait for it

    def find_it_damaged() -> None:
        copy.unlink()
        dataset._shard_states[2] = _ShardState.LOCAL

    Timer(0.3, find_it_damaged).start()
    with fail_after(30), pytest.raises(Unreachable, match=SHARD):
        dataset.get_item(int(dataset.sample_offset_per_shard[2]))


@pytest.mark.parametrize(("damage", "workers"), [(truncate, 0), (flip, 2)])
def test_a_damaged_copy_is_fetched_again(damage: Any, workers: int, tmp_path: Path) -> None:
    remote = shards_of(tmp_path / "remote")
    damage(shutil.copytree(remote, tmp_path / "local") / SHARD)
    with fail_after(30):
        batches = list(loader_of(tmp_path / "local", workers, remote))
    rows = [row for batch in batches for row in batch["input_ids"].tolist()]
    assert sorted(rows) == [list(range(10 + 8 * i, 18 + 8 * i)) for i in range(ROWS)]


def test_a_row_that_does_not_decode_or_fit_is_named(tmp_path: Path) -> None:
    rows = [{"turns": [{"input_ids": [10], "labels": labels}]} for labels in ([11], [])]
    shard = write_stream(tmp_path, {"turns": "json"}, rows, hashes=()) / "shard.00000.mds"
    named = "Stream web, shard shard.00000.mds, row 1: it has no turns, or its last resp"
    assert first_error(loader_of(tmp_path))[1].startswith(named)
    shard.write_bytes(shard.read_bytes().replace(b'"labels"', b"'labels'"))
    seen, sentence = first_error(loader_of(tmp_path))
    assert (seen, "(row 0: " in sentence) == ([], True)


def test_an_error_ends_the_workers_and_the_next_pass_has_others(tmp_path: Path) -> None:
    shard = shards_of(tmp_path) / SHARD
    whole = shard.read_bytes()
    truncate(shard)
    loader = loader_of(tmp_path, 2, persistent_workers=True)
    assert first_error(loader)[0] == BEFORE
    assert not multiprocessing.active_children()
    shard.write_bytes(whole)
    with fail_after(30):
        assert len(first_tokens(loader)) == ROWS
    loader.end()


def test_pickled_rows_are_refused_before_one_is_unpickled(tmp_path: Path) -> None:
    rows = [{"tokens": pickle.dumps(Trap(tmp_path / "sprung"))}] * 9
    publish(tmp_path / "web", {"tokens": "pkl"}, rows)
    for setting in ({}, {"allow_unsafe_types": True}):
        with fail_after(60), pytest.raises(MdsmixError, match="unsafe"):
            loader_of(tmp_path / "web/train", **setting)
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
- {label: faq, name: finetuning, dataset: {streams: {faq: {local: a}}, max_seq_len: 8, decoder_only_format: true}}
- {label: web, name: text, dataset: {local: b/web, max_seq_len: 8, validate_hash: sha1}}
"""


def test_a_foundry_config_is_read_and_only_the_loaders_part_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(FOUNDRY)
    settings = read_settings(path)
    at = {"local": "./mix/web", "remote": "s3://mix/web", "split": "train", "proportion": 0.3}
    assert settings.streams["web"] == at | {"validate_hash": BEST_HASH}
    section, own = settings.section, settings.loader
    assert (section.max_seq_len, section.targets) == (128, ("length>=20", "last"))
    assert settings.streaming == {"shuffle": True}
    assert (settings.row_key("packing_ratio"), own["num_workers"], own["drop_last"]) == (2, 8, True)
    assert settings.tokenizer == TokenizerSpec(name="./tok")
    # An evaluation's loader is named by its label.
    assert list(read_settings(path, "eval_loader.faq").streams) == ["faq"]
    alone = read_settings(path, "eval_loader.web")
    assert alone.streams == {"web": {"local": "b/web", "validate_hash": "sha1"}}
    named = r"name train_loader, eval_loader\.faq, eval_loader\.web\."
    with pytest.raises(RecipeError, match=named):
        read_settings(path, "eval_loader")


# Each rule has its cases in tests/test_mix_checks.py: here is one of each sort, and what this
# loader alone refuses.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("finetuning", {"shufle": True}, "dataset of train_loader has the key shufle, which is not read there. The loader is called with it and fails (TypeError). Fix: leave it out, or write the key that was meant (shuffle)."),
    ("finetuning", {"target_prompts": "some"}, "target_prompts is 'some'"),
    ("finetuning", {"decoder_only_format": False, "packing_ratio": 2}, "sets packing_ratio: 2 under decoder_only_format: false"),
    ("finetuning", {"max_seq_len": 1}, "dataset.max_seq_len of train_loader is 1"),
    ("finetuning", {"allow_unsafe_types": True}, "runs any code that a shard of pickles contains"),
    ("finetuning", {"streams": {}}, "train_loader reads no MDS stream"),
    ("finetuning", {"streams": {"web": {"local": "web", "repeat": "2"}}}, "repeat of web is '2'"),
    ("finetuning", {"streams": {"web": "web"}}, "must be keys and values"),
    ("text", {"mlm_probability": 0.15}, "no token is masked here"),
    ("mdsmix", {"mlm_probability": 0.1}, "dataset of train_loader has the key mlm_probability, which is not read there."),
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
        "max_seq_len: 8": "it has no train_loader, only max_seq_len",
        "train_loader: {name: image, dataset: {}}": "write name: text or name: finetuning",
        "train_loader: {name: text}": "train_loader reads no MDS stream",
        "train_loader: '${nowhere}'": "is not a readable training YAML",
        json.dumps(recipe): kept,
        json.dumps(recipe | {"train_loader": {"dataset": {"shuffle": True}}}): kept,
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


def checked(local: Path, **dataset: Any) -> Any:
    return loaded({"web": {"local": str(local)}}, **dataset).dataset.streams[0].validate_hash


def test_where_the_yaml_names_no_hash_the_fastest_is_checked(tmp_path: Path) -> None:
    """Of those that all shards hold."""
    two = write_tokens(tmp_path / "two", 9, hashes=("sha1", "xxh64"), size_limit=260)
    assert checked(two) == "xxh64"
    assert checked(two, validate_hash="sha1") == "sha1"
    assert checked(two, validate_hash=None) is None
    index = json.loads((two / "index.json").read_text())
    del index["shards"][-1]["raw_data"]["hashes"]["xxh64"]
    (two / "index.json").write_text(json.dumps(index))
    assert checked(two) == "sha1", "which all shards hold"
    local = {"local": str(two)}
    assert "have sha1" in refusal(RecipeError, local, validate_hash="xxh64")
    assert "have sha1" in refusal(RecipeError, local | {"validate_hash": "md5"})
    assert all(map(is_hash, FASTEST_FIRST))
    assert checked(write_tokens(tmp_path / "none", 4, hashes=())) is None
