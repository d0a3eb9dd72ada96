"""The phases of a recipe: each is a mix of its own, max_repeat counts over all of them, and each
gets a YAML and a lock. The plan has what a phase draws that earlier phases have drawn; that it is
what Streaming draws is in with_torch/test_mix_plan.py.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

import mdsmix
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.mix.epoch import repeats
from mdsmix.mix.epoch.repeats import count_repeated_draws
from mdsmix.mix.render.phase_keys import list_phase_remarks, make_phase_keys
from mdsmix.mix.streams.mix import PhaseOfMix
from mdsmix.mix.streams.resolve import open_phase_mixes
from mdsmix.shards.index import read_index
from mdsmix.shards.shard_samples import read_all_samples
from mdsmix.storage import locate
from mdsmix.table import Estimate
from mdsmix.tokenizer import card as pretrained
from tests import published
from tests.converting import mdsmix as command
from tests.converting import run_ok
from tests.published import CONCAT, LENGTH, PAIR, publish, write_mix

SAMPLES = {"web": 400, "books": 100}
PHASES: dict[str, Any] = {
    "main": {"budget": "2000 tokens", "mix": {"web": "80%", "books": "20%"}},
    "anneal": {"budget": "800 tokens", "mix": {"web": "50%", "books": "50%"}},
}
"Samples have 8 tokens: main draws 200 of web and 50 of books, the anneal 50 of each."
MACHINES = {"gpus": 1, "batch": 10}


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "open_tokenizer", lambda spec: published.TOKENIZER)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the streams of SAMPLES, whose rows are all different."""
    home = tmp_path_factory.mktemp("phases")
    for first, (name, count) in enumerate(SAMPLES.items()):
        rows = [{"tokens": [first + 2, *divmod(i, 500), 7, 8, 9, 10, 0]} for i in range(count)]
        publish(home / name, CONCAT, rows, card={}, shards=4)
    return home


def write(home: Path, phases: Any = None, **keys: Any) -> str:
    loader = {"name": "text", "num_workers": 0, "dataset": {"shuffle_seed": 5}}
    return str(
        write_mix(home, *SAMPLES, **{"train_loader": loader, "phases": phases or PHASES} | keys)
    )


def change(name: str, **keys: Any) -> dict[str, Any]:
    """Return PHASES with these keys of one phase."""
    return PHASES | {name: PHASES[name] | keys}


def list_draws(path: str, *overrides: str) -> list[dict[str, int]]:
    """Return what each phase draws of its streams, as its YAML has it."""
    mixes = open_phase_mixes(path, overrides)
    return [{s.name: s.weight["choose"] for s in mix.train.streams} for mix in mixes]


def test_each_phase_draws_its_share_of_its_budget(home: Path) -> None:
    both = [{"web": 200, "books": 50}, {"web": 50, "books": 50}]
    path = write(home)
    assert list_draws(path) == both
    assert list_draws(path, "phase=anneal") == both[1:]
    parts = change("main", budget="5/7") | {"anneal": PHASES["anneal"] | {"budget": "2/7"}}
    assert list_draws(write(home, parts, budget="2800 tokens")) == both
    alone = change("anneal", mix={"books": {"share": 1}})
    assert list_draws(write(home, alone))[1] == {"books": 100}, "web is not drawn, nor rendered"


def test_max_repeat_counts_what_earlier_phases_draw(home: Path) -> None:
    """Main draws half of the books, so 0.75 passes leave a quarter, 25 samples, for the anneal."""
    limited = {"web": 75, "books": 25}
    assert list_draws(write(home, max_repeat=0.75))[1] == limited
    assert list_draws(write(home, change("anneal", max_repeat=0.75)))[1] == limited
    one = {"web": "50%", "books": {"share": "50%", "max_repeat": 0.75}}
    path = write(home, change("anneal", mix=one))
    assert list_draws(path)[1] == limited
    (checked,) = mdsmix.check_phases(path, ["phase=anneal"]).phases.values()
    (finding,) = (finding for finding in checked if finding.id == "shares-limited")
    assert (
        "books is limited by max_repeat 0.75 (earlier phases draw 50 samples): it gives 200 tokens "
        "of the 400 tokens of its share (25 of 50 samples)"
    ) in finding.message
    used_up = {"web": "50%", "books": {"share": "50%", "max_repeat": 0.5}}
    assert list_draws(write(home, change("anneal", mix=used_up)))[1] == {"web": 100, "books": 0}
    with pytest.raises(MixRefused) as refusal:
        list_draws(write(home, change("anneal", max_repeat=0.6)))
    assert str(refusal.value).startswith(
        "phase anneal: the streams are too small for a budget of 800 tokens: within max_repeat "
        "after the earlier phases this phase can draw at most web 320, books 80 tokens. The "
        "largest budget that fits is 400 tokens;"
    )
    with pytest.raises(MixRefused) as refusal:
        list_draws(write(home, change("anneal", max_repeat=0.5)))
    assert str(refusal.value).endswith(
        "can draw at most web 0, books 0 tokens. Raise max_repeat, or add data."
    ), "a budget of 0 is no advice"
    with pytest.raises(MixRefused) as refusal:
        list_draws(write(home, change("anneal", max_repeat=0.75), absolute=True))
    assert str(refusal.value).startswith(
        "phase anneal: the share of books, 50% under a budget of 800 tokens, comes to 400 tokens, "
        "but the stream has only 800 tokens. This phase and those before it would read it 1.00 "
        "times, and max_repeat allows 0.75. The largest budget that fits is 400 tokens;"
    )


def test_the_plan_counts_on_from_phase_to_phase(home: Path) -> None:
    planned = mdsmix.plan_phases(write(home), **MACHINES)
    main, anneal = planned.phases
    assert (main.steps_before, main.plan.run.steps) == (0, 25)
    assert (anneal.steps_before, anneal.plan.run.steps) == (25, 10)
    assert (planned.steps, planned.tokens) == (35, 2800)
    passes = [{s.stream: s.passes for s in phase.streams} for phase in planned.phases]
    assert passes == [{"web": 0.5, "books": 0.5}, {"web": 0.625, "books": 1.0}]
    assert not any(stream.repeated for stream in main.streams)
    drawn = {stream.stream: stream.repeated for stream in anneal.streams}
    # A part of a pass is drawn at random: of 50 draws about half were drawn before.
    assert all(12 < count < 38 for count in drawn.values())
    assert [s.repeated_tokens for s in anneal.streams] == [8 * n for n in drawn.values()]
    tree = orjson.loads(command("plan", write(home), "--batch", 10, "--gpus", 1, "--json").out)
    assert tree["phases"][1]["streams"][1]["repeated"] == drawn["books"]
    estimated = {path.rpartition(".")[2] for path in tree["estimated"]}
    assert estimated == {"hours"}, "everything else is exact"
    rows = " ".join(str(planned).split())
    assert f"anneal books 50 400 50.0% 1.00 {drawn['books']} {8 * drawn['books']}" in rows
    assert "anneal 800 tokens 10 35 800" in rows


def test_the_third_phase_counts_both_phases_before_it(home: Path) -> None:
    thirds = {name: {"budget": "30 samples", "mix": {"books": "100%"}} for name in "abc"}
    path = write(home, {**thirds, "d": PHASES["anneal"]})
    planned = mdsmix.plan_phases(path, **MACHINES)
    assert [phase.steps_before for phase in planned.phases] == [0, 3, 6, 9]
    seen = set[int]()
    for number, (mix, phase) in enumerate(
        zip(open_phase_mixes(path), planned.phases[:3], strict=False)
    ):
        (copies,) = repeats.draw_epoch(mix.train, number)
        drawn = set(np.flatnonzero(copies).tolist())
        assert phase.streams[0].repeated == len(drawn & seen)
        seen |= drawn
    assert 55 < len(seen) < 78, "of 100 books; three draws of 30 leave 34 on average"


def test_tokens_of_repeats_are_a_mean_if_rows_differ_in_length(tmp_path: Path) -> None:
    rows = [{"input_ids": [5] * n, "labels": [6, 0]} for n in (1, 2, 3, 4)] * 10
    publish(tmp_path / "web", PAIR, rows, card={"kind": "finetuning", "layout": None})
    publish(tmp_path / "books", PAIR, rows, card={"kind": "finetuning", "layout": None})
    draws = {"mix": {"web": "50%", "books": "50%"}, "max_repeat": 9}
    phases = {
        "some": {"budget": "40 samples", **draws},
        "more": {"budget": "80 samples", **draws},
        "all": {"budget": "80 samples", **draws},
    }
    loader = {"name": "finetuning", "num_workers": 0}
    path = write_mix(tmp_path, "web", "books", phases=phases, train_loader=loader)
    some, more, last = mdsmix.plan_phases(path, **MACHINES).phases
    assert [s.repeated_tokens for s in some.streams] == [0, 0]
    for stream in more.streams:
        assert (stream.drawn, stream.repeated) == (40, 20)
        assert isinstance(stream.repeated_tokens, Estimate)
        assert stream.repeated_tokens == stream.tokens / 2
    for stream in last.streams:
        assert stream.repeated_tokens == stream.tokens == 180
        assert not isinstance(stream.repeated_tokens, Estimate)


def test_after_a_whole_pass_every_sample_was_drawn_before(home: Path) -> None:
    whole = {"web": "2000 samples", "books": "500 samples"}
    phases = {
        name: {"budget": budget, "mix": {name: "100%"}, "max_repeat": 9}
        for name, budget in whole.items()
    }
    again = {"budget": "30 samples", "mix": {"books": "100%"}, "max_repeat": 9}
    planned = mdsmix.plan_phases(write(home, {**phases, "again": again}), **MACHINES)
    (books,) = planned.phases[2].streams
    assert (books.drawn, books.repeated, books.repeated_tokens) == (30, 30, 240)
    assert books.passes == 5.3


def test_with_one_seed_a_phase_draws_the_same_again(home: Path) -> None:
    """Streaming's order of a stream depends on the seed and the epoch alone."""
    fixed = {"name": "text", "dataset": {"sampling_method": "fixed", "shuffle_seed": 5}}
    same = {
        name: {"budget": "20 samples", "mix": {"web": "50%", "books": "50%"}, "shuffle_seed": 5}
        for name in ("first", "second")
    }
    mixes = open_phase_mixes(write(home, same, train_loader=fixed))
    assert [mix.train.dataset["shuffle_seed"] for mix in mixes] == [5, 5]
    assert count_repeated_draws(mixes)[1] == {"web": (10, 10), "books": (10, 10)}
    seeds = [mix.train.dataset["shuffle_seed"] for mix in open_phase_mixes(write(home))]
    assert seeds == [5, 6], "by default each phase has a seed of its own"


def test_repeats_of_very_many_samples_are_expected_numbers(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "EXACT_SAMPLES", 499)
    main, anneal = mdsmix.plan_phases(write(home), **MACHINES).phases
    assert [s.repeated for s in main.streams] == [0, 0]
    assert [s.repeated for s in anneal.streams] == [25, 25]
    assert all(isinstance(s.repeated_tokens, Estimate) for s in anneal.streams)
    assert "~200" in str(mdsmix.plan_phases(write(home), **MACHINES))


CONFIG = {
    "max_seq_len": LENGTH,
    "model": {"name": "mpt_causal_lm"},
    "save_folder": "ckpt",
    "scheduler": {"name": "constant_with_warmup"},
    "max_duration": "20ba",
    "global_train_batch_size": 10,
}


def test_each_phase_gets_a_yaml_and_a_lock(home: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    out = tmp_path / "train.yaml"
    printed = run_ok("render-yaml", write(home), "--into", tmp_path / "base.yaml", "-o", out).err
    names = {path.name for path in tmp_path.iterdir()}
    expected = {f"train.{phase}.yaml{end}" for phase in PHASES for end in ("", ".mix.lock")}
    assert names == expected | {"base.yaml"}
    main, anneal = (yaml.safe_load((tmp_path / f"train.{n}.yaml").read_text()) for n in PHASES)
    streams = anneal["train_loader"]["dataset"]["streams"]
    assert {name: stream["choose"] for name, stream in streams.items()} == {"web": 50, "books": 50}
    assert (main["max_duration"], anneal["max_duration"]) == ("1ep", "2ep")
    assert (main["save_folder"], anneal["save_folder"]) == ("ckpt/main", "ckpt/anneal")
    assert "load_path" not in main
    assert "load_ignore_keys" not in main
    assert anneal["load_path"] == "ckpt/main/latest-rank0.pt"
    assert anneal["load_ignore_keys"] == ["state/dataset_state"]
    assert "main: changed max_duration: 20ba -> 1ep\n" in printed
    assert "anneal: changed load_path: not set -> ckpt/main/latest-rank0.pt\n" in printed
    assert printed.count("changed train_loader: not set") == 1, "what all phases share, once"
    lock = orjson.loads((tmp_path / "train.anneal.yaml.mix.lock").read_bytes())
    locked = lock["loaders"]["train_loader"]["streams"]
    assert {stream["name"]: stream["drawn"] for stream in locked} == {"web": 50, "books": 50}
    run_ok("check", "--lock", tmp_path / "train.anneal.yaml")
    moved_lock = (tmp_path / "train.main.yaml.mix.lock").rename(tmp_path / "kept")
    unlocked = command("check", "--lock", tmp_path / "train.main.yaml")
    assert f"`mdsmix render-yaml RECIPE phase=main -o {tmp_path}/train.main.yaml`" in unlocked.err
    moved_lock.rename(tmp_path / "train.main.yaml.mix.lock")
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run_ok("render-yaml", write(home), "--into", tmp_path / "base.yaml", "-o", out)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    again = command(
        "render-yaml", write(home), "phase=main", "--into", tmp_path / "train.main.yaml"
    )
    assert again.code == 2
    assert (
        "is the YAML that was rendered for the phase main: name the config of the whole run"
        in again.err
    )
    planned = command("plan", tmp_path / "train.anneal.yaml", "--gpus", 1).out
    assert "max_duration: 2ep also counts the steps of the checkpoint in load_path" in planned


def test_phases_never_replace_the_config_of_the_whole_run(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "train.main.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    before = config.read_bytes()
    for words in (("-o", tmp_path / "train.yaml"), ("phase=main",), ("phase=anneal",)):
        answer = command("render-yaml", write(home), "--into", config, *words)
        assert (answer.code, answer.err.count("\n")) == (2, 1), words
        assert f"would replace {config}, the config of the whole run" in answer.err
    assert (list(tmp_path.iterdir()), config.read_bytes()) == ([config], before)


def test_a_folder_is_no_name_for_the_yamls_of_phases(home: Path, tmp_path: Path) -> None:
    """`-o folder/` would write `folder/.main`, which `ls` does not list."""
    answer = command("render-yaml", write(home), "-o", f"{tmp_path}/")
    assert (answer.code, "it is a folder; name a file in it" in answer.err) == (2, True)
    assert not list(tmp_path.iterdir())


def make_phase(number: int) -> PhaseOfMix:
    return PhaseOfMix(name="bcd"[number], number=number, names=("b", "c", "d"), drawn_before={})


KEYS: tuple[tuple[int, dict[str, Any], dict[str, Any], list[str]], ...] = (
    (0, {"save_folder": "a"}, {"save_folder": "a/b"}, ["set save_interval (1000ba) so that no"]),
    (
        1,
        {"save_folder": "a", "save_interval": "64sp"},
        {"save_folder": "a/c", "load_path": "a/b/latest-rank0.pt"},
        ["set save_interval (64sp) so that no"],
    ),
    (0, {"save_folder": "a", "save_interval": "1ep"}, {"save_folder": "a/b"}, []),
    (0, {"save_folder": "a", "save_interval": 2}, {"save_folder": "a/b"}, []),
    (0, {}, {}, ["set save_folder"]),
    (
        0,
        {"save_folder": "a", "save_weights_only": True},
        {"save_folder": "a/b", "save_weights_only": False},
        ["set save_interval"],
    ),
    (
        2,
        {"save_folder": "a", "save_weights_only": True},
        {"save_folder": "a/d", "load_path": "a/c/latest-rank0.pt"},
        [],
    ),
    (2, {}, {}, ["set load_path to the last checkpoint of c"]),
    (
        1,
        {"save_folder": "c/"},
        {"save_folder": "c/c", "load_path": "c/b/latest-rank0.pt"},
        ["set save_interval"],
    ),
    (
        2,
        {"save_folder": "s3://x/{run_name}", "load_weights_only": True},
        {
            "save_folder": "s3://x/{run_name}/d",
            "load_path": "s3://x/{run_name}/c/latest-rank0.pt.symlink",
            "load_weights_only": False,
        },
        [],
    ),
    (
        1,
        {"save_folder": "a", "save_latest_filename": "last", "load_ignore_keys": ["state/x"]},
        {"save_folder": "a/c", "load_ignore_keys": ["state/x", "state/dataset_state"]},
        ["set save_interval", "set load_path to the last checkpoint of b"],
    ),
    (
        1,
        {"save_folder": "a", "fsdp_config": {"state_dict_type": "sharded"}},
        {"save_folder": "a/c"},
        ["set save_interval", "set load_path to the last checkpoint of b"],
    ),
    (
        0,
        {"save_folder": "a", "scheduler": {"name": "cosine_with_warmup"}},
        {"save_folder": "a/b"},
        ["set save_interval", "set scheduler.t_max"],
    ),
    (
        0,
        {"save_folder": "a", "scheduler": {"name": "cosine_with_warmup", "t_max": "9ba"}},
        {"save_folder": "a/b"},
        ["set save_interval"],
    ),
    (
        1,
        {"save_folder": "a", "scheduler": {"name": "cosine_with_warmup", "t_max": "9ba"}},
        {"save_folder": "a/c", "load_path": "a/b/latest-rank0.pt"},
        ["set save_interval", "set max_duration to the batches"],
    ),
)
"Number of a phase, keys of the config -> keys of the phase, and what the user must set."


def test_keys_of_a_phase_begin_with_the_checkpoint_of_the_phase_before() -> None:
    for number, config, keys, remarks in KEYS:
        phase = make_phase(number)
        made = make_phase_keys(phase, config)
        expected = {"max_duration": f"{number + 1}ep"}
        if number:
            expected["load_ignore_keys"] = ["state/dataset_state"]
        assert made == expected | keys, config
        found = list_phase_remarks(phase, {**config, **made})
        assert len(found) == len(remarks), found
        for words, remark in zip(remarks, found, strict=True):
            assert remark.startswith(words)


def test_every_phase_is_checked_and_the_whole_is_refused_if_one_is(
    home: Path, tmp_path: Path
) -> None:
    path = write(home)
    answer = command("check", path)
    assert (answer.code, answer.out.count("streams may be mixed")) == (0, 2)
    assert "phase main ──" in answer.out
    wrong = ("phases.anneal.shuffle_seed=1", "train_loader.dataset.shuffle=nonsense")
    refused = command("check", path, *wrong, "--json")
    tree = orjson.loads(refused.out)
    assert (refused.code, tree["may_be_mixed"], list(tree["phases"])) == (3, False, [*PHASES])
    out = tmp_path / "train.yaml"
    answer = command("render-yaml", path, *wrong, "-o", out)
    assert (answer.code, list(tmp_path.iterdir())) == (3, [])
    assert "error: phase main: " in answer.err
    assert "nothing was rendered" in answer.err


def test_commands_for_one_mix_name_the_phases(home: Path) -> None:
    path = write(home)
    for words in (("preview", path), ("mix", path, "--out", "x"), ("leaks", path)):
        answer = command(*words)
        assert (answer.code, answer.err.count("\n")) == (2, 1), words
        assert "has the phases main, anneal, and this needs the mix of one of them" in answer.err
        assert "for example phase=anneal." in answer.err
    answer = command("render-yaml", path)
    assert (answer.code, "name the files with --out" in answer.err) == (2, True)
    answer = command("plan", path, "--tokens", "5k", "--batch", 10)
    assert (answer.code, "each phase of this recipe has a budget" in answer.err) == (2, True)
    answer = command("plan", path, "--batch", 200, "--gpus", 1)
    assert (answer.code, answer.err[:40]) == (2, "error: phase anneal: an epoch of 100 sam")
    for function in (mdsmix.check, mdsmix.plan, mdsmix.render_yaml):
        with pytest.raises(RecipeError, match="name it as an override"):
            function(path)
    one = str(write_mix(home, *SAMPLES))
    for function in (mdsmix.check_phases, mdsmix.plan_phases, mdsmix.render_phases):
        with pytest.raises(RecipeError, match="has no phases"):
            function(one)
    path = write(home)
    chosen = mdsmix.render_yaml(path, ["phase=anneal"])
    assert yaml.safe_load(chosen.yaml)["max_duration"] == "2ep"
    assert chosen.remarks[0] == "set load_path to the last checkpoint of main"
    assert mdsmix.plan(path, ["phase=anneal"], **MACHINES).run.steps == 10
    with pytest.raises(RecipeError, match="phase=anneal chooses one: remove phase"):
        mdsmix.plan_phases(path, ["phase=anneal"], **MACHINES)
    with pytest.raises(RecipeError, match=r"YAML of one phase, such as train\.main\.yaml\."):
        mdsmix.build_loader(path, 4)


def test_a_recipe_with_overrides_may_be_a_pipe(home: Path) -> None:
    read, write_end = os.pipe()
    with os.fdopen(write_end, "w") as pipe:
        pipe.write(Path(write(home)).read_text())
    try:
        answer = command("render-yaml", f"/dev/fd/{read}", "phase=anneal", f"local={home}")
    finally:
        os.close(read)
    assert answer.code == 0, answer.err
    assert yaml.safe_load(answer.out)["max_duration"] == "2ep"


def test_an_offline_mix_draws_unseen_samples_first(home: Path, tmp_path: Path) -> None:
    """Three phases of 40 of the 100 books: 40, 40, and the last 20 with 20 of the first."""
    thirds = {name: {"budget": "40 samples", "mix": {"books": "100%"}} for name in ("a", "b", "c")}
    other_keys = {"budget": "9 samples", "mix": {"web": "100%"}}
    path = write(home, {**thirds, "d": other_keys})
    drawn = dict[str, list[bytes]]()
    for name in thirds:
        printed = run_ok("mix", path, f"phase={name}", "--out", tmp_path / name).err
        folder = locate(tmp_path / name / "train")
        drawn[name] = [
            bytes(sample)
            for shard in read_index(folder).shards
            for sample in read_all_samples(folder, shard).slices()
        ]
        assert len(drawn[name]) == len({*drawn[name]}) == 40
    assert "books: 40 samples of this phase, 20 of them drawn before" in printed
    assert not {*drawn["a"]} & {*drawn["b"]}
    assert len({*drawn["c"]} - {*drawn["a"]} - {*drawn["b"]}) == 20
    times = Counter(sample for samples in drawn.values() for sample in samples)
    assert Counter(times.values()) == {1: 80, 2: 20}
    answer = command("mix", path, "phase=b", "--out", tmp_path / "a")
    assert (answer.code, "--replace" in answer.err) == (2, True), "another draw is another stream"


def test_a_phase_of_a_mix_knows_its_place(home: Path) -> None:
    main, anneal = open_phase_mixes(write(home))
    assert main.phase == PhaseOfMix(
        name="main", number=0, names=("main", "anneal"), drawn_before={}
    )
    assert anneal.phase is not None
    assert replace(anneal.phase, drawn_before={}).number == 1
    assert anneal.phase.drawn_before == {"web": 200, "books": 50}
