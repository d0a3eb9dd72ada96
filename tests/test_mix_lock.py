"""The lock beside a rendered YAML: it changes with what decides which samples come, and with nothing else."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdsmix.mix.lock_check import TRAIN, compared, lock_of
from mdsmix.mix.resolve import resolve
from mdsmix.training.lock import (
    LoaderLock,
    Lock,
    differences,
    locked_stream,
    parse_lock,
)
from tests.converting import Answer, documents, mdsmix, pairs, write_jsonl, write_recipe

SUFFIX = ".mix.lock"


class Lab:
    """A recipe of two streams and an evaluation, converted and rendered."""

    def __init__(self, folder: Path, tokenizer: Path, **settings: Any) -> None:
        self.folder, self.config = folder, folder / "train.yaml"
        self.texts = [{"text": f"{n} one two three four five six seven"} for n in range(40)]
        self.write()
        faq = [{"prompt": f"which {n}?", "response": "that one"} for n in range(10)]
        write_jsonl(folder / "faq.jsonl", faq)
        streams = {
            "web": documents([folder / "a.jsonl", folder / "b.jsonl"]),
            "faq": pairs(folder / "faq.jsonl"),
            "held": pairs(folder / "faq.jsonl", split="val"),
        }
        more = {"streams": streams, "mix": {"faq": {"repeat": 2}}} | settings
        self.recipe = write_recipe(folder, tokenizer, **more)
        self.does("convert", self.recipe)
        self.does("render-yaml", self.recipe, "-o", self.config)

    def write(self) -> None:
        write_jsonl(self.folder / "a.jsonl", self.texts[:20])
        write_jsonl(self.folder / "b.jsonl", self.texts[20:])

    def does(self, *arguments: object) -> Answer:
        done = mdsmix(*arguments)
        assert done.code == 0, done.err
        return done

    def republish(self, change: str = "another text, and some words more than before") -> None:
        self.texts[30] = {"text": change}
        self.write()
        self.does("convert", self.recipe)

    def edit(self, **keys: Any) -> None:
        """Other keys of the loader or, as `dataset`, of its dataset; of the top level with `top`."""
        tree = yaml.safe_load(self.config.read_text())
        tree.update(keys.pop("top", {}))
        for name, weight in keys.pop("weights", {}).items():
            tree["train_loader"]["dataset"]["streams"][name].update(weight)
        tree["train_loader"]["dataset"].update(keys.pop("dataset", {}))
        tree["train_loader"].update(keys)
        self.config.write_text(yaml.safe_dump(tree, sort_keys=False))

    @property
    def lock(self) -> Path:
        return Path(f"{self.config}{SUFFIX}")

    @property
    def locked(self) -> Lock:
        return parse_lock(Lock, self.lock.read_bytes(), "the lock", "")

    def check(self, *options: object) -> Answer:
        return mdsmix("check", "--lock", self.config, *options)


@pytest.fixture
def lab(tmp_path: Path, tokenizer_folder: Path) -> Lab:
    return Lab(tmp_path, tokenizer_folder)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Lab:
    """One that is not published anew."""
    return Lab(tmp_path_factory.mktemp("rendered"), tokenizer_folder)


def test_what_is_published_is_what_was_planned(rendered: Lab) -> None:
    done = rendered.check()
    assert done.code == 0
    for words in (["faq", "as", "planned", "10", "20"], ["held", "as", "planned", "10", "10"]):
        assert words in [line.split()[-len(words) :] for line in done.out.splitlines()]
    locked, other = rendered.locked, rendered.folder / "same.yaml"
    assert lock_of(resolve([str(rendered.config)])) == locked, "of the recipe and of its YAML"
    assert {"tokenizer", "chat_template"} <= locked.loaders[TRAIN].settings.keys()
    assert rendered.lock.stat().st_size < 5000
    done = rendered.does("render-yaml", rendered.recipe, "-o", other, "--json")
    assert json.loads(done.out)["lock"] == f"{other}{SUFFIX}"
    assert Path(f"{other}{SUFFIX}").read_bytes() == rendered.lock.read_bytes(), "of the same mix"


def test_a_change_of_the_data_is_told_stream_by_stream_and_refused(lab: Lab) -> None:
    lab.republish()
    done = lab.check()
    assert done.code == 3
    (error,) = [line for line in done.out.splitlines() if line.startswith("error")]
    assert error.startswith("error lock-differs [web]: train_loader: web was ")
    assert "repeats samples and leaves others out" in error
    assert re.search(r"web +not as planned", done.out)
    assert re.search(r"faq +as planned", done.out)
    report = json.loads(lab.check("--json").out)
    assert not report["may_be_mixed"]
    assert [(s["stream"], s["state"]) for s in report["lock"]["streams"]] == [
        ("web", "not as planned"),
        ("faq", "as planned"),
        ("held", "as planned"),
    ]
    lab.does("render-yaml", lab.recipe, "-o", lab.config)
    assert lab.check().code == 0, "rendered again, what is there is planned"


def test_versions_stay_as_they_were_locked(tmp_path: Path, tokenizer_folder: Path) -> None:
    lab = Lab(tmp_path, tokenizer_folder, publish="versioned")
    lab.republish()
    assert lab.check().code == 0
    lab.does("render-yaml", lab.recipe, "-o", lab.folder / "next.yaml")
    assert Path(f"{lab.folder / 'next.yaml'}{SUFFIX}").read_bytes() != lab.lock.read_bytes()
    assert lab.check().code == 0


ORDER: dict[str, tuple[dict[str, Any], str]] = {
    "a seed": ({"dataset": {"shuffle_seed": 3}}, "shuffle_seed was 9176 and is 3"),
    "an order": ({"dataset": {"shuffle": False}}, "shuffle was true and is false"),
    "a weight": (
        {"weights": {"faq": {"repeat": 3}}},
        "faq was 20 samples an epoch of 10 in shards ",
    ),
    "a length": ({"top": {"max_seq_len": 12}}, "max_seq_len was 16 and is 12"),
    "packing": ({"dataset": {"packing_ratio": 2}}, "packing_ratio was null and is 2"),
    "nodes": ({"dataset": {"num_canonical_nodes": 4}}, "num_canonical_nodes was null and is 4"),
    "targets": ({"dataset": {"target_prompts": "all"}}, "target_prompts was none and is all"),
}
ELSE: dict[str, dict[str, Any]] = {
    "a learning rate": {"top": {"optimizer": {"name": "adam", "lr": 0.1}}},
    "a model": {"top": {"model": {"name": "mpt_causal_lm", "d_model": 64}}},
    "workers": {"num_workers": 3},
    "what is the default": {
        "dataset": {"shuffle_seed": 9176, "packing_ratio": 1, "replication": 1}
    },
    "a weight of the same meaning": {"weights": {"faq": {"repeat": 2.0}}},
    "a cache": {"dataset": {"predownload": 64, "download_retry": 4}},
}


def test_what_decides_the_samples_is_locked_and_nothing_else(rendered: Lab) -> None:
    before = rendered.config.read_text()
    for name, (change, said) in (ORDER | {n: (change, "") for n, change in ELSE.items()}).items():
        rendered.edit(**copy.deepcopy(change))
        try:
            now = lock_of(resolve([str(rendered.config)]))
        finally:
            rendered.config.write_text(before)
        found, _ = compared(rendered.locked, now)
        told = [each.message for each in found if each.id == "lock-differs"]
        assert [said in each for each in told] == [True] * bool(said), name
    of = []
    for batch in (8, 4):
        rendered.edit(top={"global_train_batch_size": batch})
        of.append(lock_of(resolve([str(rendered.config)])))
        rendered.config.write_text(before)
    assert "batch was 8 and is 4" in compared(*of)[0][0].message
    assert not compared(rendered.locked, of[0])[0], "it was not known"


def locked(drawn: int, shards: str = "a3") -> LoaderLock:
    """Of a stream of these shards, each by its content and its samples."""
    held = [(int(n), "", 0, {"xxh64": content}) for content, n in shards.split()]
    return LoaderLock(streams=[locked_stream("web", drawn, held)])


def test_what_differs_is_an_error_where_it_is_trained_on_and_not_accepted() -> None:
    was = Lock(loaders={TRAIN: locked(3)})
    now = Lock(loaders={TRAIN: locked(4), "eval_loader more": locked(3)})
    for is_accepted in (False, True):
        findings, table = compared(was, now, is_accepted)
        assert [(found.id, found.severity) for found in findings] == [
            ("lock-differs", "warning" if is_accepted else "error"),
            ("lock-eval-differs", "warning"),
        ]
        assert [row[2] for row in table.rows] == ["not as planned", "not as planned"]


SHARDS = '{"name": "web", "drawn": 3, "samples": 3, "shards": "0123456789ab*3"}'
NO_LOCKS = (
    (None, "train.yaml has no lock: there is no train.yaml.mix.lock beside it"),
    ("{", "is no lock of a mix: "),
    ("[1]", "is no lock of a mix: "),
    ('{"version": 3}', "is no lock of a mix: loaders is missing"),
    ('{"version": 7, "more": {}}', "by a newer mdsmix (version 7, and this one reads 3)"),
    (
        f'{{"version": 3, "loaders": {{"train_loader": {{"streams": [{SHARDS}]}}}}}}',
        "is no lock of a mix: loaders.train_loader.streams[0].shards is",
    ),
)


def test_a_lock_that_says_nothing_of_the_yaml_is_one_sentence(rendered: Lab) -> None:
    before = rendered.lock.read_bytes()
    for content, sentence in NO_LOCKS:
        rendered.lock.unlink() if content is None else rendered.lock.write_text(content)
        done = rendered.check()
        rendered.lock.write_bytes(before)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert sentence in done.err


def test_shards_are_compared_with_their_order_and_number() -> None:
    was = locked(7, "a3 b4")
    assert not [*differences(was, locked(7, "a3 b4"))]
    for shards in ("b4 a3", "a3", "a3 b4 b4", "c3 b4", "a4 b3"):
        now = locked(7, shards)
        ((told, names),) = differences(was, now)
        assert (told, names) == (f"web was {was.streams[0]} and is {now.streams[0]}", ["web"])
        assert "7 samples an epoch of 7 in shards " in told
