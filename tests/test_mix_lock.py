"""The lock next to a rendered YAML. It changes with the data and the settings that decide which
samples are drawn, and with nothing else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mdsmix.foundry_yaml.lock import LoaderLock, Lock, LockedShard, lock_stream, parse_lock
from mdsmix.mix.lock_check import TRAIN, compare_locks, make_lock
from mdsmix.mix.streams.resolve import resolve_mix
from tests.converting import Answer, Project, documents, mdsmix, pairs, run_ok


class RenderedMix(Project):
    """A recipe of two streams and an evaluation, converted, and rendered to train.yaml."""

    def __init__(self, folder: Path, tokenizer: Path, **settings: Any) -> None:
        super().__init__(folder, tokenizer, pytest.MonkeyPatch())
        self.config = folder / "train.yaml"
        questions = [{"prompt": f"which {n}?", "response": "that one"} for n in range(10)]
        faq = pairs(self.write_source(questions, "faq.jsonl"))
        streams = {"web": documents(["a.jsonl", "b.jsonl"]), "faq": faq}
        streams["held"] = faq | {"split": "val"}
        self.configure(**{"streams": streams, "mix": {"faq": {"repeat": 2}}} | settings)
        self.convert_web()
        self.lock = self.render()

    def convert_web(self, prefix: str = "") -> None:
        """Write the documents of web and convert all streams. One document begins with the
        prefix.
        """
        texts = [f"{n} one two three four five six seven" for n in range(40)]
        self.write_source(texts[:20])
        self.write_source([prefix + texts[20], *texts[21:]], "b.jsonl")
        self.convert_ok()

    def render(self, name: str = "train.yaml") -> Path:
        """Render the recipe, and return the path of the lock."""
        output = run_ok("render-yaml", self.recipe, "-o", self.folder / name, "--json").out
        lock = f"{self.folder / name}.mix.lock"
        assert json.loads(output)["lock"] == lock
        return Path(lock)

    def make_changed_lock(self, **changes: Any) -> Lock:
        """Return the lock of the YAML with other values at these keys; `__` is a dot."""
        tree = OmegaConf.create(self.config.read_text())
        for key, value in changes.items():
            OmegaConf.update(tree, key.replace("__", "."), value, force_add=True)
        changed = self.folder / "changed.yaml"
        changed.write_text(OmegaConf.to_yaml(tree))
        return make_lock(resolve_mix([str(changed)]))

    def read_lock(self) -> Lock:
        return parse_lock(Lock, self.lock.read_bytes(), "the lock", "")

    def check(self, *options: object) -> Answer:
        return mdsmix("check", "--lock", self.config, *options)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> RenderedMix:
    return RenderedMix(tmp_path_factory.mktemp("rendered"), tokenizer_folder)


def test_an_unchanged_mix_is_as_planned(rendered: RenderedMix) -> None:
    answer = rendered.check()
    assert answer.code == 0
    for words in ("faq as planned 10 20", "held as planned 10 10"):
        assert words in " ".join(answer.out.split())
    assert rendered.make_changed_lock() == rendered.read_lock(), "recipe and YAML have one lock"
    assert {"tokenizer", "chat_template"} <= rendered.read_lock().loaders[TRAIN].settings.keys()
    assert rendered.lock.stat().st_size < 5000
    same = rendered.render("same.yaml")
    assert same.read_bytes() == rendered.lock.read_bytes(), "locks of one mix are equal"


def test_changed_data_is_reported_and_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    mix = RenderedMix(tmp_path, tokenizer_folder)
    mix.convert_web("some words more than before, ")
    answer = mix.check()
    assert answer.code == 3
    (error,) = [line for line in answer.out.splitlines() if line.startswith("error")]
    assert error.startswith("error lock-differs [web]: train_loader: stream web was ")
    assert "repeats samples and skips others" in error
    assert re.search(r"web +not as planned", answer.out)
    report = json.loads(mix.check("--json").out)
    assert not report["may_be_mixed"]
    states = {row["stream"]: row["state"] for row in report["lock"]["streams"]}
    assert states == {"web": "not as planned", "faq": "as planned", "held": "as planned"}
    mix.render()
    assert mix.check().code == 0, "rendering again locks the new data"


def test_a_published_version_stays_as_it_was_locked(tmp_path: Path, tokenizer_folder: Path) -> None:
    mix = RenderedMix(tmp_path, tokenizer_folder, publish="versioned")
    mix.convert_web("another, ")
    assert mix.check().code == 0
    assert mix.render("next.yaml").read_bytes() != mix.lock.read_bytes()
    assert mix.check().code == 0


DATASET = "train_loader__dataset__"
REPEAT = f"{DATASET}streams__faq__repeat"
CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({f"{DATASET}shuffle_seed": 3}, "shuffle_seed was 9176 and is 3"),
    ({f"{DATASET}shuffle": False}, "shuffle was true and is false"),
    ({REPEAT: 3}, "faq was 20 samples an epoch of 10 in shards "),
    ({"max_seq_len": 12}, "max_seq_len was 16 and is 12"),
    ({f"{DATASET}packing_ratio": 2}, "packing_ratio was null and is 2"),
    ({f"{DATASET}num_canonical_nodes": 4}, "num_canonical_nodes was null and is 4"),
    ({f"{DATASET}target_prompts": "all"}, "target_prompts was none and is all"),
    ({"optimizer": {"name": "adam", "lr": 0.1}}, ""),
    ({"model": {"name": "mpt_causal_lm", "d_model": 64}}, ""),
    ({"train_loader__num_workers": 3}, ""),
    ({f"{DATASET}{key}": 1 for key in ("packing_ratio", "replication")}, ""),
    ({f"{DATASET}shuffle_seed": 9176}, ""),
    ({REPEAT: 2.0}, ""),
    ({f"{DATASET}predownload": 64, f"{DATASET}download_retry": 4}, ""),
)
"Changes of the YAML -> words of the finding; empty for changes that do not affect samples."


def test_only_settings_that_decide_the_samples_are_locked(rendered: RenderedMix) -> None:
    for change, words in CHANGES:
        comparison = compare_locks(rendered.read_lock(), rendered.make_changed_lock(**change))
        messages = [f.message for f in comparison.findings if f.id == "lock-differs"]
        if words:
            (message,) = messages
            assert words in message, change
        else:
            assert not messages, change


def test_a_batch_is_compared_only_if_both_locks_have_one(rendered: RenderedMix) -> None:
    eight = rendered.make_changed_lock(global_train_batch_size=8)
    four = rendered.make_changed_lock(global_train_batch_size=4)
    assert "batch was 8 and is 4" in compare_locks(eight, four).findings[0].message
    assert not compare_locks(rendered.read_lock(), eight).findings


def make_loader_lock(drawn: int) -> LoaderLock:
    """Return the lock of a loader that draws so many samples from a stream of 3."""
    shard = LockedShard(3, "", 0, {"xxh64": "a"})
    return LoaderLock(streams=[lock_stream("web", drawn, [shard])])


def test_a_difference_is_an_error_in_training_unless_it_is_accepted() -> None:
    old = Lock(loaders={TRAIN: make_loader_lock(3)})
    new = Lock(loaders={TRAIN: make_loader_lock(4), "eval_loader more": make_loader_lock(3)})
    for is_accepted, severity in ((False, "error"), (True, "warning")):
        comparison = compare_locks(old, new, is_accepted)
        ids = [(finding.id, finding.severity) for finding in comparison.findings]
        assert ids == [("lock-differs", severity), ("lock-eval-differs", "warning")]
        states = [row[2] for row in comparison.table.rows]
        assert states == ["not as planned", "not as planned"]


SHARDS = '{"name": "web", "drawn": 3, "samples": 3, "shards": "0123456789ab*3"}'
BAD_LOCKS = (
    (None, "train.yaml has no lock: there is no train.yaml.mix.lock next to it"),
    ("{", "settings of a run: "),
    ("[1]", "settings of a run: "),
    ('{"version": 3}', "settings of a run: loaders is missing"),
    (
        '{"version": 7, "more": {}}',
        "by a newer mdsmix: it has version 7, but this mdsmix reads only version 3",
    ),
    (
        f'{{"version": 3, "loaders": {{"train_loader": {{"streams": [{SHARDS}]}}}}}}',
        "settings of a run: loaders.train_loader.streams[0].shards is",
    ),
)
"The content of a lock's file (None: no file) -> words of the message."


def test_a_missing_or_damaged_lock_is_refused_in_one_sentence(rendered: RenderedMix) -> None:
    before = rendered.lock.read_bytes()
    for content, words in BAD_LOCKS:
        if content is None:
            rendered.lock.unlink()
        else:
            rendered.lock.write_text(content)
        answer = rendered.check()
        rendered.lock.write_bytes(before)
        assert (answer.code, answer.err.count("\n")) == (2, 1), content
        assert words in answer.err
