"""The lock next to a rendered YAML: it changes with what decides which samples come, and with
nothing else.
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


class Lab(Project):
    """A recipe of two streams and an evaluation, converted and rendered."""

    def __init__(self, folder: Path, tokenizer: Path, **settings: Any) -> None:
        super().__init__(folder, tokenizer, pytest.MonkeyPatch())
        self.config = folder / "train.yaml"
        asked = [{"prompt": f"which {n}?", "response": "that one"} for n in range(10)]
        faq = pairs(self.write_source(asked, "faq.jsonl"))
        streams = {"web": documents(["a.jsonl", "b.jsonl"]), "faq": faq}
        streams["held"] = faq | {"split": "val"}
        self.configure(**{"streams": streams, "mix": {"faq": {"repeat": 2}}} | settings)
        self.publish()
        self.lock = self.render()

    def publish(self, version: str = "") -> None:
        texts = [f"{n} one two three four five six seven" for n in range(40)]
        self.write_source(texts[:20])
        self.write_source([version + texts[20], *texts[21:]], "b.jsonl")
        self.convert_ok()

    def render(self, name: str = "train.yaml") -> Path:
        """The lock next to the YAML."""
        told = run_ok("render-yaml", self.recipe, "-o", self.folder / name, "--json").out
        assert json.loads(told)["lock"] == f"{self.folder / name}.mix.lock"
        return Path(f"{self.folder / name}.mix.lock")

    def now(self, **changes: Any) -> Lock:
        """The lock of the YAML with other values at these keys; `__` is a dot."""
        tree, other = OmegaConf.create(self.config.read_text()), self.folder / "changed.yaml"
        for key, value in changes.items():
            OmegaConf.update(tree, key.replace("__", "."), value, force_add=True)
        other.write_text(OmegaConf.to_yaml(tree))
        return make_lock(resolve_mix([str(other)]))

    @property
    def locked(self) -> Lock:
        return parse_lock(Lock, self.lock.read_bytes(), "the lock", "")

    def check(self, *options: object) -> Answer:
        return mdsmix("check", "--lock", self.config, *options)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Lab:
    return Lab(tmp_path_factory.mktemp("rendered"), tokenizer_folder)


def test_what_is_published_is_what_was_planned(rendered: Lab) -> None:
    answer = rendered.check()
    assert answer.code == 0
    for words in ("faq as planned 10 20", "held as planned 10 10"):
        assert words in " ".join(answer.out.split())
    assert rendered.now() == rendered.locked, "of the recipe and of its YAML"
    assert {"tokenizer", "chat_template"} <= rendered.locked.loaders[TRAIN].settings.keys()
    assert rendered.lock.stat().st_size < 5000
    other = rendered.render("same.yaml")
    assert other.read_bytes() == rendered.lock.read_bytes(), "of the same mix"


def test_changed_data_is_told_and_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    lab = Lab(tmp_path, tokenizer_folder)
    lab.publish("some words more than before, ")
    answer = lab.check()
    assert answer.code == 3
    (error,) = [line for line in answer.out.splitlines() if line.startswith("error")]
    assert error.startswith("error lock-differs [web]: train_loader: web was ")
    assert "repeats samples and skips others" in error
    assert re.search(r"web +not as planned", answer.out)
    report = json.loads(lab.check("--json").out)
    assert not report["may_be_mixed"]
    states = {each["stream"]: each["state"] for each in report["lock"]["streams"]}
    assert states == {"web": "not as planned", "faq": "as planned", "held": "as planned"}
    lab.render()
    assert lab.check().code == 0, "rendered again, what is there is planned"


def test_versions_stay_as_they_were_locked(tmp_path: Path, tokenizer_folder: Path) -> None:
    lab = Lab(tmp_path, tokenizer_folder, publish="versioned")
    lab.publish("another, ")
    assert lab.check().code == 0
    assert lab.render("next.yaml").read_bytes() != lab.lock.read_bytes()
    assert lab.check().code == 0


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
    ({f"{DATASET}shuffle_seed": 9176}, ""), ({REPEAT: 2.0}, ""),
    ({f"{DATASET}predownload": 64, f"{DATASET}download_retry": 4}, ""),
)  # fmt: skip
"Values of the YAML, and what is said of them; nothing of those that change no sample."


def test_what_decides_the_samples_is_locked_and_nothing_else(rendered: Lab) -> None:
    for change, said in CHANGES:
        found, _ = compare_locks(rendered.locked, rendered.now(**change))
        told = [each.message for each in found if each.id == "lock-differs"]
        assert [said in each for each in told] == [True] * bool(said), change
    eight, four = (rendered.now(global_train_batch_size=batch) for batch in (8, 4))
    assert "batch was 8 and is 4" in compare_locks(eight, four)[0][0].message
    assert not compare_locks(rendered.locked, eight)[0], "it was not known"


def locked(drawn: int, shards: str = "a3") -> LoaderLock:
    """Of a stream of these shards, each by its content and its samples."""
    held = [LockedShard(int(n), "", 0, {"xxh64": content}) for content, n in shards.split()]
    return LoaderLock(streams=[lock_stream("web", drawn, held)])


def test_what_differs_is_an_error_where_it_is_trained_on_and_not_accepted() -> None:
    was = Lock(loaders={TRAIN: locked(3)})
    now = Lock(loaders={TRAIN: locked(4), "eval_loader more": locked(3)})
    for is_accepted, severity in ((False, "error"), (True, "warning")):
        findings, table = compare_locks(was, now, is_accepted)
        found = [(each.id, each.severity) for each in findings]
        assert found == [("lock-differs", severity), ("lock-eval-differs", "warning")]
        assert [row[2] for row in table.rows] == ["not as planned", "not as planned"]


SHARDS = '{"name": "web", "drawn": 3, "samples": 3, "shards": "0123456789ab*3"}'
NO_LOCKS = (
    (None, "train.yaml has no lock: there is no train.yaml.mix.lock next to it"),
    ("{", "is not a lock of a mix: "), ("[1]", "is not a lock of a mix: "),
    ('{"version": 3}', "is not a lock of a mix: loaders is missing"),
    ('{"version": 7, "more": {}}', "by a newer mdsmix (version 7, and this one reads 3)"),
    (
        f'{{"version": 3, "loaders": {{"train_loader": {{"streams": [{SHARDS}]}}}}}}',
        "is not a lock of a mix: loaders.train_loader.streams[0].shards is",
    ),
)  # fmt: skip


def test_a_lock_that_says_nothing_of_the_yaml_is_one_sentence(rendered: Lab) -> None:
    before = rendered.lock.read_bytes()
    for content, sentence in NO_LOCKS:
        rendered.lock.unlink() if content is None else rendered.lock.write_text(content)
        answer = rendered.check()
        rendered.lock.write_bytes(before)
        assert (answer.code, answer.err.count("\n"), sentence in answer.err) == (2, 1, True)
