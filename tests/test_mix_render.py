"""A recipe renders to the same YAML every time, and into a config it changes what it sets and
nothing else.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from omegaconf import OmegaConf

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.foundry_yaml.training_yaml import read_unresolved
from mdsmix.mix.check import is_refused, run_checks
from mdsmix.mix.render.render import render_recipe, require_writable, write_yaml
from mdsmix.mix.render.set_into import set_sections, strip_head
from mdsmix.mix.streams.mix import Mix
from mdsmix.tokenizer import card as pretrained
from tests import published as hand
from tests.published import LENGTH, SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish, write_mix

TREE = {"max_seq_len": 16, "tokenizer": {"name": "new"}, "train_loader": {"name": "text"}}


def became(text: str, tree: Any = TREE) -> str:
    """The config with the sections of the tree set into it."""
    return set_sections(text, read_unresolved(text, "x.yaml"), tree, "x.yaml")[0]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's tokenizer is the one of the hand-made streams, without a subprocess."""
    monkeypatch.setattr(pretrained, "open_tokenizer", lambda spec: hand.TOKENIZER)


HELD = {"local": "mix/held", "split": "val"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three published streams, which no test changes: web and chat to train on, held
    to evaluate on.
    """
    home = tmp_path_factory.mktemp("home")
    publish(home / "mix/web", SPLIT, [SPLIT_ROW] * 30, card={})
    publish(home / "mix/chat", TURNS, [TURNS_ROW] * 20, card={})
    publish(home / "mix/held", TURNS, [TURNS_ROW] * 10, card={}, split="val")
    publish(home / "mix/plain", hand.CONCAT, [hand.TOKEN_ROW] * 30, card={})
    publish(home / "flat", SPLIT, [SPLIT_ROW] * 10, card={}, split=".")
    return home


def rendered(home: Path, into: Path | None = None, **changes: Any) -> tuple[Mix, str]:
    recipe = {
        "tokenizer": "hub/tok",
        "streams": {"web": {"local": "mix/web"}, "chat": {"local": "mix/chat"}, "held": HELD},
        "mix": {"web": {"repeat": 0.5}},
        "train_loader": {"num_workers": 0, "dataset": {"packing_ratio": 2.0}},
    }
    return render_recipe(str(write_mix(home, **recipe | changes)), [], str(into) if into else None)


def resolved(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text), resolve=True)


HEAD = """\
# mdsmix: rendered by version 0.1.0 from mix.yaml. An epoch of the finetuning loader:
# mdsmix:   stream  in it  an epoch   share  tokens   share
# mdsmix:   web        30        15   42.9%     120   60.0%
# mdsmix:   chat       20        20   57.1%      80   40.0%
# mdsmix:   all        50        35  100.0%     200  100.0%
"""
LINK = "${max_seq_len}"
POLICIES = {"decoder_only_format": True, "target_prompts": "none", "target_responses": "last"}
NO_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}


def test_the_rendered_file_is_this_one_and_passes_the_check(home: Path) -> None:
    places = {name: {"local": f"{home}/mix/{name}", "split": "train"} for name in ("web", "chat")}
    places["web"]["repeat"] = 0.5
    held = {"held": {"local": f"{home}/mix/held", "split": "val"}}
    drawn = {"streams": places, "max_seq_len": LINK, **POLICIES, "shuffle": True}
    evaluated = {"streams": held, "max_seq_len": LINK, **POLICIES, "shuffle": False}
    loader = {"name": "finetuning", "dataset": drawn | {"packing_ratio": 2.0}, "drop_last": True}
    evals = {"label": "held", "name": "finetuning", "dataset": evaluated, "drop_last": False}
    tree = {"max_seq_len": 8}
    tree |= {"tokenizer": {"name": "hub/tok", "kwargs": {"model_max_length": LINK}}}
    tree |= {"train_loader": loader | NO_WORKERS, "eval_loader": [evals | NO_WORKERS]}
    mix, text = rendered(home)
    assert text == HEAD + yaml.safe_dump(tree, sort_keys=False)
    assert not is_refused(run_checks(mix))
    assert rendered(home)[1] == text


def test_the_loader_of_this_package_is_rendered_for_training_and_evaluation(home: Path) -> None:
    streams = {"plain": {"local": "mix/plain"}, "chat": {"local": "mix/chat"}, "held": HELD}
    dataset = {"eos_token_id": 0, "shuffle": True, "epoch_size": 9}
    loader = {"name": "mdsmix", "accept_changed": True, "dataset": dataset}
    mix, text = rendered(home, streams=streams, mix={}, train_loader=loader)
    assert {f.id for f in run_checks(mix)} == {"changed-accepted"}
    train, held = resolved(text)["train_loader"], resolved(text)["eval_loader"][0]
    assert (train["name"], train["accept_changed"]) == ("mdsmix", True)
    assert (held["name"], "accept_changed" in held) == ("mdsmix", False)
    assert train["dataset"]["eos_token_id"] == held["dataset"]["eos_token_id"] == 0
    assert (held["dataset"]["shuffle"], "epoch_size" in held["dataset"]) == (False, False)


def test_a_stream_is_named_by_where_it_is_read_and_cached(home: Path) -> None:
    """The cache folder is named after the index; a stream that lies flat has no split."""
    place = str(home / "mix/web")
    streams = {"web": {"remote": place, "local": "cache/web"}, "flat": {"local": "flat"}}
    web, flat = rendered(home, streams=streams, mix={})[0].streams
    cache = str(home / "cache" / f"web-{web.index.hash[:8]}")
    assert web.settings == {"local": cache, "remote": place, "split": "train"}
    assert flat.settings == {"local": str(home / "flat")}


COMMENTED = """\
variables: {max_seq_len: 128, seed: 17}  # one line
max_seq_len: ${variables.max_seq_len}
seed: 17
model:
  max_seq_len: ${max_seq_len}  # follows

tokenizer: {name: ./old, kwargs: {}}   # ours
train_loader:
  name: text   # whichever
  dataset:
    # ours, whatever they say
    streams:
      # one bucket a team
      old:
        # paid by them
        remote: s3://their/mix
        split: train
      # in the order of the paper
    # what the loader reads at a time
    max_seq_len: 4   # short
    "shuffle": off  # in order, please
    shuffle_seed: ${seed}
    eos_token_id: 0
    # packed below
    packing_ratio: {a: 1}   # tuned
    # the end of it
  # workers
  num_workers: 4  # two a GPU
  prefetch_factor: 0x10
  timeout: 0

# behind all
optimizer: {lr: 3.0e-3}
precision: ~
"""
SET = ("variables", "tokenizer", "  name", "      old", " " * 8, "    max_seq_len", "    packing")
"Begin the lines that the recipe sets."
THEIRS = (
    *("remote: s3://theirs/mix", "local: /cache/theirs", "split: val", "processor: theirs"),
    *("hf_name: theirs/chat", "hf_kwargs: {a: 1}", "preprocessing_fn: theirs:read"),
    *("safe_load: true", "allowed_dataset_keys: [a]", "target_prompts: all"),
    "decoder_only_format: false",
)
"""Lines that say which data is read: a stream without a split takes that of its dataset, so one
that is left over sends the loader elsewhere.
"""
KEPT = {"eos_token_id": 0, "shuffle": False, "shuffle_seed": 17}


def into(home: Path, text: str, **changes: Any) -> tuple[str, Any]:
    """The config `text` after the recipe was set into it: its text and what that says."""
    config = home / "config.yaml"
    config.write_text(text)
    made = rendered(home, config, **changes)[1]
    return strip_head(made), resolved(made)


def test_into_keeps_comments_and_what_the_recipe_does_not_name(home: Path) -> None:
    """Right or wrong: a key that the loader does not take is a finding."""
    before = COMMENTED.replace("    eos_token_id", "".join(f"    {line}\n" for line in THEIRS) + "    eos_token_id")  # fmt: skip
    packed = {"train_loader": {"dataset": {"packing_ratio": 2.0}}}
    text, config = into(home, before, **packed)
    assert all("".join(line.partition("#")[1:]) in text for line in COMMENTED.splitlines())
    kept = [line for line in COMMENTED.splitlines() if not line.startswith(SET)]
    ours = text.partition("eval_loader:")[0].splitlines()
    assert [line for line in ours if line in kept] == kept
    assert text.startswith("variables: {max_seq_len: 8, seed: 17}  # one line\n")
    assert "    max_seq_len: ${max_seq_len}   # short\n" in text
    dataset = config["train_loader"].pop("dataset")
    workers = {"num_workers": 4, "prefetch_factor": 16, "timeout": 0}
    assert config["train_loader"] == {"name": "finetuning", "drop_last": True} | workers
    assert list(dataset.pop("streams")) == ["web", "chat"]
    (held,) = config["eval_loader"]
    assert held | {"num_workers": 4, "prefetch_factor": 16, "drop_last": False} == held
    assert dataset == KEPT | POLICIES | {"max_seq_len": LENGTH, "packing_ratio": 2.0}
    alone = resolved(rendered(home, **packed)[1])
    assert (config["tokenizer"], config["max_seq_len"]) == (alone["tokenizer"], LENGTH)
    mix, _ = rendered(home, home / "config.yaml", **packed)
    assert "eos_token_id" in str([f for f in run_checks(mix) if f.id == "key-rejected"])
    assert into(home, text, **packed)[0] == text, "set into once more it stays"


ENTRIES = """\
  - label: c4   # theirs
    name:   finetuning
    dataset: {hf_name: a/b, split: 'val'}

  # an older one of ours
  - label: held
    name: text
  - {label: last, name: finetuning, dataset: {hf_name: c/d}}
"""
OURS = "  - label: held\n    name: finetuning\n    dataset:\n      streams:\n        held:\n"


def test_into_replaces_the_evaluations_of_its_labels_alone(home: Path) -> None:
    old = "  - label: held\n    name: text\n"
    for tail in ("", "\n# Optimization\nseed: 17\n"):
        for is_there in (True, False):
            before, after = ENTRIES.split(old) if is_there else (ENTRIES.replace(old, ""), "")
            text, config = into(home, f"eval_loader:\n{before}{old * is_there}{after}{tail}")
            labels = [entry["label"] for entry in config["eval_loader"]]
            assert labels == (["c4", "held", "last"] if is_there else ["c4", "last", "held"])
            assert text.startswith(f"eval_loader:\n{before}{OURS}")
            assert f"{after}{tail}" in text
            assert into(home, text)[0] == text, "set into once more it stays"


LONE = (
    "eval_loader:\n  name: finetuning\n  dataset: {hf_name: a/b}\nseed: 1\n",
    "eval_loader:\n    name: finetuning\n    dataset: {hf_name: a/b}\nseed: 1\n",
    "eval_loader: {name: finetuning, dataset: {hf_name: a/b}}\nseed: 1\n",
    "eval_loader: [{label: eval, name: finetuning, dataset: {hf_name: a/b}}]\n",
    "eval_loader:\n- label: eval\n  name: finetuning\n  dataset: {hf_name: a/b}",
    "x: &x {label: eval, name: finetuning, dataset: {hf_name: a/b}}\neval_loader:\n- *x\n",
)


def test_a_lone_or_oddly_written_evaluation_stays_beside_ours(home: Path) -> None:
    for before in LONE:
        theirs, ours = into(home, before)[1]["eval_loader"]
        expected = {"label": "eval", "name": "finetuning", "dataset": {"hf_name": "a/b"}}
        assert (theirs, ours["label"]) == (expected, "held"), before
    for nothing in ("", " null", " []", " 3"):
        text, config = into(home, f"eval_loader:{nothing}\nseed: 1\n")
        assert [entry["label"] for entry in config["eval_loader"]] == ["held"], nothing
        assert "\n- label: held\n" in text, "on lines of its own"


ADDED = "max_seq_len: 16\ntokenizer:\n  name: new\n"
TAIL = "tokenizer:\n  name: new\ntrain_loader:\n  name: text\n"
BECOME = (  # the length is set where it is defined
    ("max_seq_len: 8\n", f"max_seq_len: 16\n{TAIL}"),
    ("max_seq_len: 16  # same\n", f"max_seq_len: 16  # same\n{TAIL}"),
    ("a: {b: 8}\nmax_seq_len: ${a.b}\n", f"a: {{b: 16}}\nmax_seq_len: ${{a.b}}\n{TAIL}"),
    ("max_seq_len: ${oc.env:LEN}\n", f"max_seq_len: 16\n{TAIL}"),
    ("run_name: x\n", f"run_name: x\nmax_seq_len: 16\n{TAIL}"),
    ("seed: 1", f"seed: 1\nmax_seq_len: 16\n{TAIL}"),  # a last line without its end
    # A section that uses an anchor is replaced as a whole.
    (
        "base: &b {x: 1}\ntrain_loader:\n  <<: *b\n  name: old\nseed: 1\n",
        f"base: &b {{x: 1}}\ntrain_loader:\n  name: text\nseed: 1\n{ADDED}",
    ),
    ("a: &b {x: 1}\ntrain_loader: *b\n", f"a: &b {{x: 1}}\ntrain_loader:\n  name: text\n{ADDED}"),
)


def test_a_section_is_set_where_it_stands_and_the_length_where_it_is_defined() -> None:
    for before, after in BECOME:
        assert became(before) == after


def test_what_cannot_be_written_into_is_left_alone() -> None:
    for text in (
        "train_loader: &t {name: old}\nother: *t\n",
        "train_loader: &t\n  name: old\nother: *t\n",
        "{max_seq_len: 1, train_loader: {}}",
        "- a\n",
        "a: [\n",
    ):
        with pytest.raises(RecipeError):
            became(text)


def test_a_symlink_is_followed_the_mode_kept_and_a_fifo_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    link.symlink_to("real.yaml")
    write_yaml(str(link), "of a file that was not there")
    (tmp_path / "other").touch()
    assert real.stat().st_mode == (tmp_path / "other").stat().st_mode
    real.chmod(0o640)
    write_yaml(str(link), "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "other", "real.yaml"]
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()), daemon=True)
    reader.start()
    write_yaml(str(fifo), "new" * 100_000)
    reader.join()
    assert (got, fifo.is_fifo()) == (["new" * 100_000], True)


def test_what_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "no/x.yaml", tmp_path):
        for refuse in (require_writable, lambda place: write_yaml(place, "new")):
            with pytest.raises(RecipeError, match="it is a folder, or there is no folder"):
                refuse(str(place))
    target = tmp_path / "x.yaml"
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(Unreachable, match="the disk is full"):
        write_yaml(str(target), "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.yaml"]
