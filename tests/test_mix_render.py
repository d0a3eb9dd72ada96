"""A recipe renders to the same YAML every time. Set into a config, it changes only the keys that it
sets.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
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
from mdsmix.tokenizer import card
from tests import published
from tests.published import LENGTH, SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish, write_mix

TREE = {"max_seq_len": 16, "tokenizer": {"name": "new"}, "train_loader": {"name": "text"}}


def set_tree(text: str, tree: Any = TREE) -> str:
    """Return the config with the sections of the tree set into it."""
    return set_sections(text, read_unresolved(text, "x.yaml"), tree, "x.yaml")[0]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open the tokenizer of the published streams for the run too, without a subprocess."""
    monkeypatch.setattr(card, "open_tokenizer", lambda spec: published.TOKENIZER)


HELD_OUT = {"local": "mix/held", "split": "val"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with published streams, which no test changes: web, chat, plain and flat for
    training, held for evaluation.
    """
    home = tmp_path_factory.mktemp("home")
    publish(home / "mix/web", SPLIT, [SPLIT_ROW] * 30, card={})
    publish(home / "mix/chat", TURNS, [TURNS_ROW] * 20, card={})
    publish(home / "mix/held", TURNS, [TURNS_ROW] * 10, card={}, split="val")
    publish(home / "mix/plain", published.CONCAT, [published.TOKEN_ROW] * 30, card={})
    publish(home / "flat", SPLIT, [SPLIT_ROW] * 10, card={}, split=".")
    return home


def render(home: Path, into: Path | None = None, **changes: Any) -> tuple[Mix, str]:
    """Render a recipe of web, chat and held with these changes."""
    recipe = {
        "tokenizer": "hub/tok",
        "streams": {"web": {"local": "mix/web"}, "chat": {"local": "mix/chat"}, "held": HELD_OUT},
        "mix": {"web": {"repeat": 0.5}},
        "train_loader": {"num_workers": 0, "dataset": {"packing_ratio": 2.0}},
    }
    recipe_path = str(write_mix(home, **recipe | changes))
    (rendered,) = render_recipe(recipe_path, [], str(into) if into else None)
    return rendered


def resolve(text: str) -> Any:
    """Return the keys and values of a YAML, with its variables filled in."""
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


def test_a_recipe_renders_to_this_file_which_passes_the_checks(home: Path) -> None:
    web = {"local": f"{home}/mix/web", "split": "train", "repeat": 0.5}
    chat = {"local": f"{home}/mix/chat", "split": "train"}
    held_out = {"local": f"{home}/mix/held", "split": "val"}
    train_dataset = {
        "streams": {"web": web, "chat": chat},
        "max_seq_len": LINK,
        **POLICIES,
        "shuffle": True,
        "packing_ratio": 2.0,
    }
    eval_dataset = {
        "streams": {"held": held_out},
        "max_seq_len": LINK,
        **POLICIES,
        "shuffle": False,
    }
    train = {"name": "finetuning", "dataset": train_dataset, "drop_last": True}
    evaluation = {
        "label": "held",
        "name": "finetuning",
        "dataset": eval_dataset,
        "drop_last": False,
    }
    tree = {
        "max_seq_len": 8,
        "tokenizer": {"name": "hub/tok", "kwargs": {"model_max_length": LINK}},
        "train_loader": train | NO_WORKERS,
        "eval_loader": [evaluation | NO_WORKERS],
    }
    mix, text = render(home)
    assert text == HEAD + yaml.safe_dump(tree, sort_keys=False)
    assert not is_refused(run_checks(mix))
    assert render(home)[1] == text


def test_the_mdsmix_loader_is_rendered_for_training_and_evaluation(home: Path) -> None:
    streams = {"plain": {"local": "mix/plain"}, "chat": {"local": "mix/chat"}, "held": HELD_OUT}
    dataset = {"eos_token_id": 0, "shuffle": True, "epoch_size": 9}
    loader = {"name": "mdsmix", "accept_changed": True, "dataset": dataset}
    mix, text = render(home, streams=streams, mix={}, train_loader=loader)
    assert {f.id for f in run_checks(mix)} == {"changed-accepted"}
    train = resolve(text)["train_loader"]
    evaluation = resolve(text)["eval_loader"][0]
    assert (train["name"], train["accept_changed"]) == ("mdsmix", True)
    assert (evaluation["name"], "accept_changed" in evaluation) == ("mdsmix", False)
    assert train["dataset"]["eos_token_id"] == evaluation["dataset"]["eos_token_id"] == 0
    assert (evaluation["dataset"]["shuffle"], "epoch_size" in evaluation["dataset"]) == (
        False,
        False,
    )


def test_a_section_names_the_folders_where_a_stream_is_read_and_cached(home: Path) -> None:
    """The cache folder is named after the index. A stream without a folder for its split has no
    split.
    """
    remote = str(home / "mix/web")
    streams = {"web": {"remote": remote, "local": "cache/web"}, "flat": {"local": "flat"}}
    web, flat = render(home, streams=streams, mix={})[0].streams
    cache = str(home / "cache" / f"web-{web.index.hash[:8]}")
    assert web.settings == {"local": cache, "remote": remote, "split": "train"}
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

# after all
optimizer: {lr: 3.0e-3}
precision: ~
"""
SET = ("variables", "tokenizer", "  name", "      old", " " * 8, "    max_seq_len", "    packing")
"How lines begin that the recipe sets."
OTHER_DATA = (
    *("remote: s3://theirs/mix", "local: /cache/theirs", "split: val", "processor: theirs"),
    *("hf_name: theirs/chat", "hf_kwargs: {a: 1}", "preprocessing_fn: theirs:read"),
    *("safe_load: true", "allowed_dataset_keys: [a]", "target_prompts: all"),
    "decoder_only_format: false",
)
"""Keys that decide which data is read. If one of them stayed, the loader would read other data: for
example, a stream without a split takes that of its dataset.
"""
KEPT_DATASET = {"eos_token_id": 0, "shuffle": False, "shuffle_seed": 17}


def render_into(home: Path, text: str, **changes: Any) -> tuple[str, Any]:
    """Set the recipe into the config `text`. Return the new text, and its keys and values."""
    config = home / "config.yaml"
    config.write_text(text)
    new_text = render(home, config, **changes)[1]
    return strip_head(new_text), resolve(new_text)


def test_into_keeps_comments_and_keys_that_the_recipe_does_not_set(home: Path) -> None:
    """Wrong keys too: a key that the loader does not accept is a finding."""
    other_data = "".join(f"    {line}\n" for line in OTHER_DATA)
    before = COMMENTED.replace("    eos_token_id", f"{other_data}    eos_token_id")
    packed = {"train_loader": {"dataset": {"packing_ratio": 2.0}}}
    text, config = render_into(home, before, **packed)
    assert all("".join(line.partition("#")[1:]) in text for line in COMMENTED.splitlines())
    unset_lines = [line for line in COMMENTED.splitlines() if not line.startswith(SET)]
    new_lines = text.partition("eval_loader:")[0].splitlines()
    assert [line for line in new_lines if line in unset_lines] == unset_lines
    assert text.startswith("variables: {max_seq_len: 8, seed: 17}  # one line\n")
    assert "    max_seq_len: ${max_seq_len}   # short\n" in text
    dataset = config["train_loader"].pop("dataset")
    workers = {"num_workers": 4, "prefetch_factor": 16, "timeout": 0}
    assert config["train_loader"] == {"name": "finetuning", "drop_last": True} | workers
    assert list(dataset.pop("streams")) == ["web", "chat"]
    (evaluation,) = config["eval_loader"]
    assert evaluation | {"num_workers": 4, "prefetch_factor": 16, "drop_last": False} == evaluation
    assert dataset == KEPT_DATASET | POLICIES | {"max_seq_len": LENGTH, "packing_ratio": 2.0}
    file_of_its_own = resolve(render(home, **packed)[1])
    assert config["tokenizer"] == file_of_its_own["tokenizer"]
    assert config["max_seq_len"] == LENGTH
    mix, _ = render(home, home / "config.yaml", **packed)
    assert "eos_token_id" in str([f for f in run_checks(mix) if f.id == "key-rejected"])
    assert render_into(home, text, **packed)[0] == text, (
        "setting the recipe into it again changes nothing"
    )


ENTRIES = """\
  - label: c4   # theirs
    name:   finetuning
    dataset: {hf_name: a/b, split: 'val'}

  # an older rendering
  - label: held
    name: text
  - {label: last, name: finetuning, dataset: {hf_name: c/d}}
"""
RENDERED = "  - label: held\n    name: finetuning\n    dataset:\n      streams:\n        held:\n"


def test_into_replaces_only_the_evaluations_with_its_labels(home: Path) -> None:
    old = "  - label: held\n    name: text\n"
    for tail in ("", "\n# Optimization\nseed: 17\n"):
        first, last = ENTRIES.split(old)
        for before, entry, after, labels in (
            (first, old, last, ["c4", "held", "last"]),
            (first + last, "", "", ["c4", "last", "held"]),
        ):
            config_text = f"eval_loader:\n{before}{entry}{after}{tail}"
            text, config = render_into(home, config_text)
            assert [entry["label"] for entry in config["eval_loader"]] == labels
            assert text.startswith(f"eval_loader:\n{before}{RENDERED}")
            assert f"{after}{tail}" in text
            assert render_into(home, text)[0] == text, (
                "setting the recipe into it again changes nothing"
            )


LONE = (
    "eval_loader:\n  name: finetuning\n  dataset: {hf_name: a/b}\nseed: 1\n",
    "eval_loader:\n    name: finetuning\n    dataset: {hf_name: a/b}\nseed: 1\n",
    "eval_loader: {name: finetuning, dataset: {hf_name: a/b}}\nseed: 1\n",
    "eval_loader: [{label: eval, name: finetuning, dataset: {hf_name: a/b}}]\n",
    "eval_loader:\n- label: eval\n  name: finetuning\n  dataset: {hf_name: a/b}",
    "x: &x {label: eval, name: finetuning, dataset: {hf_name: a/b}}\neval_loader:\n- *x\n",
)


def test_a_lone_or_oddly_written_evaluation_stays_next_to_the_recipes(home: Path) -> None:
    for before in LONE:
        old, new = render_into(home, before)[1]["eval_loader"]
        assert old == {"label": "eval", "name": "finetuning", "dataset": {"hf_name": "a/b"}}, before
        assert new["label"] == "held", before
    for empty in ("", " null", " []", " 3"):
        text, config = render_into(home, f"eval_loader:{empty}\nseed: 1\n")
        assert [entry["label"] for entry in config["eval_loader"]] == ["held"], empty
        assert "\n- label: held\n" in text, "on lines of its own"


BATCH = "global_train_batch_size: {}\n"
LOADER_OF_FEW = {
    # Rows of a batch, for an epoch of 35 samples -> keys of the loader.
    36: {"drop_last": False, **NO_WORKERS},
    35: {"drop_last": True, **NO_WORKERS},
    5: {"drop_last": True, **NO_WORKERS},
    4: {"drop_last": True, "num_workers": 8},
}


def test_an_epoch_with_few_samples_gets_a_batch_and_no_workers(home: Path) -> None:
    """The next rendering, of more data or of smaller batches, takes none of it for the user's."""
    config = home / "few.yaml"
    config.write_text(BATCH.format(1))
    for batch, keys in LOADER_OF_FEW.items():
        workers = {key: value for key, value in keys.items() if key != "drop_last"}
        config.write_text(
            re.sub(r"(global_train_batch_size:) .*", rf"\1 {batch}", config.read_text())
        )
        for _ in range(2):
            mix, text = render(home, config, train_loader={})
            config.write_text(text)
            tree = resolve(text)
            del tree["train_loader"]["dataset"]
            assert tree["train_loader"] == {"name": "finetuning", **keys}, batch
            (evaluation,) = tree["eval_loader"]
            assert evaluation | workers | {"drop_last": False} == evaluation
            assert not is_refused(run_checks(mix)), batch


def test_what_few_samples_change_is_told_once(home: Path) -> None:
    config = home / "told.yaml"
    config.write_text(BATCH.format(36))
    mix, text = render(home, config, train_loader={})
    change = "train_loader.drop_last: not set -> false (an epoch has 35 samples, a batch 36)"
    assert change not in mix.changed, "the whole loader is new"
    config.write_text(BATCH.format(36) + "train_loader: {name: text}\n")
    assert change in render(home, config, train_loader={})[0].changed
    line = "# mdsmix: set for an epoch with few samples: drop_last, num_workers, prefetch_factor"
    assert line in text


KEYS_OF_ITS_OWNER = (
    ({"drop_last": True}, {}),
    ({}, {"drop_last": True}),
)


@pytest.mark.parametrize(("of_config", "of_recipe"), KEYS_OF_ITS_OWNER)
def test_few_samples_never_change_a_key_of_the_user(
    of_config: dict[str, Any], of_recipe: dict[str, Any], home: Path
) -> None:
    """Then the mix is refused, as before."""
    config = home / "owned.yaml"
    workers = {"num_workers": 3}
    config.write_text(yaml.safe_dump({"global_train_batch_size": 36, "train_loader": of_config}))
    mix, text = render(home, config, train_loader=of_recipe | workers)
    loader = resolve(text)["train_loader"]
    assert (loader["drop_last"], loader["num_workers"]) == (True, 3)
    assert "persistent_workers" not in loader
    assert "epoch-too-small" in {finding.id for finding in run_checks(mix)}
    assert "few samples" not in text


def test_a_loader_with_a_timeout_keeps_its_workers(home: Path) -> None:
    """Torch refuses a timeout without workers."""
    config = home / "timeout.yaml"
    config.write_text(BATCH.format(35) + "train_loader: {timeout: 5}\n")
    mix, text = render(home, config, train_loader={})
    assert resolve(text)["train_loader"]["num_workers"] == 8
    assert not is_refused(run_checks(mix))


def test_a_key_that_was_changed_after_rendering_is_the_users(home: Path) -> None:
    config = home / "edited.yaml"
    config.write_text(BATCH.format(36))
    text = render(home, config, train_loader={})[1]
    config.write_text(text.replace("num_workers: 0", "num_workers: 2"))
    loader = resolve(render(home, config, train_loader={})[1])["train_loader"]
    assert (loader["num_workers"], loader["drop_last"]) == (2, False)


MODEL = {"name": "mpt_causal_lm", "max_seq_len": LINK, "vocab_size": 100}
VOCABULARIES = (
    # Keys of the config -> the vocabulary of the model. The tokenizer has 512 tokens.
    ({"model": MODEL}, 512),
    ({"model": MODEL | {"vocab_size": 511}}, 512),
    ({"model": MODEL | {"vocab_size": 513}}, 513),
    ({"model": MODEL, "load_path": "old.pt"}, 100),
    ({"model": MODEL | {"name": "hf_causal_lm"}}, 100),
    ({"model": MODEL | {"vocab_size": "${size}"}, "size": 100}, 100),
)


@pytest.mark.parametrize(("keys", "size"), VOCABULARIES)
def test_a_model_from_scratch_gets_the_tokens_of_the_tokenizer(
    keys: dict[str, Any], size: int, home: Path
) -> None:
    """A model that may load weights keeps its own, and the check id-vocabulary refuses it."""
    before = yaml.safe_dump({"max_seq_len": 4} | keys, sort_keys=False)
    text, config = render_into(home, before)
    assert config["model"]["vocab_size"] == size
    assert config["model"]["max_seq_len"] == LENGTH
    unset = [line for line in before.splitlines() if "vocab_size" not in line]
    assert [line for line in text.splitlines() if line in unset] == [
        line for line in unset if line != "max_seq_len: 4"
    ]


def test_a_vocabulary_is_rounded_up_to_a_multiple_of_64(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = replace(published.TOKENIZER, vocab_size=513)
    monkeypatch.setattr(card, "open_tokenizer", lambda spec: tokenizer)
    _, config = render_into(home, yaml.safe_dump({"model": MODEL, "max_seq_len": 4}))
    assert config["model"]["vocab_size"] == 576


ADDED = "max_seq_len: 16\ntokenizer:\n  name: new\n"
TAIL = "tokenizer:\n  name: new\ntrain_loader:\n  name: text\n"
SET_INTO = (
    # A config -> the config with TREE set into it. The length is set where it is defined.
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


def test_a_section_is_replaced_in_its_place_and_the_length_where_it_is_defined() -> None:
    for before, after in SET_INTO:
        assert set_tree(before) == after


def test_a_config_that_cannot_be_written_into_is_refused() -> None:
    for text in (
        "train_loader: &t {name: old}\nother: *t\n",
        "train_loader: &t\n  name: old\nother: *t\n",
        "{max_seq_len: 1, train_loader: {}}",
        "- a\n",
        "a: [\n",
    ):
        with pytest.raises(RecipeError):
            set_tree(text)


def test_writing_follows_symlinks_keeps_the_mode_and_writes_into_a_fifo(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    link = tmp_path / "link.yaml"
    link.symlink_to("real.yaml")
    write_yaml(str(link), "a file that was not there")
    (tmp_path / "other").touch()
    assert real.stat().st_mode == (tmp_path / "other").stat().st_mode
    real.chmod(0o640)
    write_yaml(str(link), "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "other", "real.yaml"]
    fifo = tmp_path / "fifo"
    received = list[str]()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()), daemon=True)
    reader.start()
    write_yaml(str(fifo), "new" * 100_000)
    reader.join()
    assert (received, fifo.is_fifo()) == (["new" * 100_000], True)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, reason in (
        (tmp_path / "no/x.yaml", rf"there is no folder {tmp_path}/no; make it"),
        (tmp_path, "it is a folder; name a file in it"),
    ):
        for refuse in (require_writable, lambda path: write_yaml(path, "new")):
            with pytest.raises(RecipeError, match=reason):
                refuse(str(path))
    target = tmp_path / "x.yaml"
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(Unreachable, match="the disk is full"):
        write_yaml(str(target), "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.yaml"]
