"""A preview shows the rows that the loader's batches contain, packed or not, as text and JSON."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.errors import MixRefused, RecipeError, Unreachable
from mdsmix.load import build_loader
from mdsmix.load.layout import SamplePlace
from mdsmix.mix.epoch.draws import Machines
from mdsmix.mix.streams.mix import Mix
from mdsmix.mix.streams.resolve import make_mix
from mdsmix.preview.epoch_windows import Preview, list_preview_warnings
from mdsmix.preview.options import PreviewOptions
from mdsmix.preview.preview import preview
from mdsmix.preview.shard_reader import ShardReader
from mdsmix.preview.step_rows import COUNTED, Step
from mdsmix.shards.token_ids import IGNORED_LABEL
from tests.converting import chats, documents, mdsmix, run_ok, run_recipe, write_jsonl, write_recipe
from tests.corpus import docstrings
from tests.published import CARD
from tests.with_torch.load_streams import IDS, PAIR, config, pair, write_stream, write_tokens

TOKENS = {"tokens": "ndarray:uint16"}
PACKED = {"input_ids": "ndarray:uint16", "starts": "ndarray:int32"}
pytestmark = pytest.mark.usefixtures("_release_loaders")


def turns(i: int) -> dict[str, Any]:
    first, last = ([5, 10 + i % 9], [6]), ([7] * (i % 5), [8, 9, 0][: 1 + i % 3])
    return {"turns": [{"input_ids": ids, "labels": labels} for ids, labels in (first, last)]}


def packed(i: int) -> dict[str, Any]:
    """One to three documents of two tokens."""
    starts = np.arange(0, 2 * (1 + i % 3), 2, dtype=np.int32)
    return {"input_ids": np.arange(30, 30 + 2 * len(starts), dtype=np.uint16), "starts": starts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write streams of rows of one length, of documents between separators, of pairs and
    conversations (some are cut), and of packed rows.
    """
    root = tmp_path_factory.mktemp("streams")
    docs = [{"tokens": np.array([9, 0, 9, 9, 0, 9][: 2 + i % 5], np.uint16)} for i in range(70)]
    write_tokens(root / "web", 60, size_limit=500)
    write_stream(root / "docs", TOKENS, docs, size_limit=500, compression="zstd")
    write_stream(root / "faq", PAIR, map(pair, range(80)), size_limit=500)
    write_stream(root / "packed", PACKED, map(packed, range(40)), size_limit=500)
    write_stream(root / "chat", {"turns": "json"}, map(turns, range(50)), size_limit=900)
    return root


def training_config(
    folder: Path, names: str = "web docs faq chat", **dataset: Any
) -> dict[str, Any]:
    weights: Mapping[str, Any] = {"faq": {"repeat": 0.5}, "chat": {"repeat": 2}}
    streams = {n: {"local": str(folder / n), **weights.get(n, {})} for n in names.split()}
    return config(streams, **{"shuffle": True, **dataset})


def mix(settings: dict[str, Any]) -> Mix:
    return dataclasses.replace(make_mix(settings, "train.yaml"), tokenizer=CARD)


def preview_of(settings: dict[str, Any], batch: int, gpus: int = 1, **options: Any) -> Preview:
    workers = settings["train_loader"].get("num_workers", 0)
    world = Machines(nodes=1, gpus=gpus, workers=workers, batch=batch)
    return preview(mix(settings), PreviewOptions(world=world, **options))


def batches(settings: dict[str, Any], size: int, steps: int) -> list[dict[str, Any]]:
    """Return the loader's own first batches."""
    return list(islice(build_loader(settings, size, ids=IDS), steps))


def batch_counts(batch: dict[str, Any]) -> list[int]:
    """Return a batch's rows, positions, tokens and trained tokens. Both sides of an encoder-decoder
    are counted.
    """
    mask, labels = batch["attention_mask"], batch["labels"]
    if "decoder_input_ids" not in batch:
        return [
            len(mask),
            mask.numel(),
            int(mask.sum()),
            int((labels[:, 1:] != IGNORED_LABEL).sum()),
        ]
    trained = int((labels != IGNORED_LABEL).sum())
    return [len(mask), mask.numel() + labels.numel(), int(mask.sum()) + trained, trained]


def step_counts(step: Step) -> list[int]:
    assert step.counts is not None
    counts = dict(zip(COUNTED, step.counts.sum(axis=0).tolist(), strict=True))
    return [step.rows, step.slots, counts["tokens"], counts["trained"]]


WORKERS = {"drop_last": True, "num_workers": 2, "persistent_workers": False}
POLICIES = {"target_responses": "all", "target_prompts": "length>=2"}
CASES: list[dict[str, Any]] = [
    {},
    {"packing_ratio": 2.6, "max_leftover_bins_to_keep": 1, **WORKERS, **POLICIES},
    {"packing_ratio": "auto", "max_seq_len": 300},
    {"allow_pad_trimming": True, "max_seq_len": 64},
    {"pad_to_longest": True, "max_seq_len": 64, "batching_method": "per_stream"},
    {"names": "faq chat", "decoder_only_format": False},
]


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_every_step_counts_as_the_loaders_batch_does(folder: Path, keys: dict[str, Any]) -> None:
    settings = training_config(folder, **{"names": "web faq chat packed", "num_workers": 0, **keys})
    steps = 2 if keys.get("packing_ratio") == "auto" else 9
    result = preview_of(settings, 8, steps=steps)
    assert [step_counts(step) for step in result.steps] == [
        batch_counts(b) for b in batches(settings, 8, steps)
    ]
    assert len(result.steps) == min(steps, len(result.ids)) >= 2
    assert (result.ratio > 1) == ("packing_ratio" in keys)


def test_samples_come_in_the_batchs_order_with_their_rows(folder: Path) -> None:
    (batch,) = batches(training_config(folder), 8, 1)
    (step,) = preview_of(training_config(folder), 8, steps=1, samples=8).steps
    (rank,) = step.ranks
    assert len({row.place.stream for row in step.shown[:3]}) == 3, "streams differ first"
    rows = {row.place: row for row in step.shown}
    for number, sample_place in enumerate(rank.places):
        is_token = batch["attention_mask"][number].bool()
        for key in ("input_ids", "labels"):
            assert (
                getattr(rows[sample_place], key).tolist() == batch[key][number][is_token].tolist()
            )
    (step,) = preview_of(training_config(folder), 16, gpus=4, steps=1).steps
    assert [(rank.rank, len(rank.ids)) for rank in step.ranks] == [(n, 4) for n in range(4)]
    assert len({n for rank in step.ranks for n in rank.ids}) == step.rows == 16


def test_at_most_the_allowed_bytes_are_read_and_a_warning_tells_of_the_rest(folder: Path) -> None:
    whole = preview_of(training_config(folder), 32, steps=2)
    bytes_read = whole.loaders.reader.read
    result, none = (
        preview_of(training_config(folder), 32, steps=2, read=read) for read in (bytes_read - 1, 0)
    )
    assert [step.is_unread for step in result.steps] == [False, True]
    assert 0 == none.loaders.reader.read < result.loaders.reader.read < bytes_read
    assert result.steps[1].counts is result.steps[1].padding is None
    assert any(
        "1 step from step 1 on were not read" in line for line in list_preview_warnings(result)
    )
    drawn = [
        [rank.ids for step in preview.steps for rank in step.ranks] for preview in (none, whole)
    ]
    assert drawn[0] == drawn[1]
    # A step beyond the limit ends the reading: its rows would wait in the packer of later steps.
    reader = ShardReader(mix(training_config(folder, "web")).train.streams, 1100)
    assert reader.samples([SamplePlace(0, 0, n) for n in range(3)])
    assert reader.samples([SamplePlace(0, shard, 0) for shard in range(3)]) is None
    assert reader.samples([SamplePlace(0, 0, 0)]) is None


def test_text_that_the_loader_tokenizes_is_drawn_and_not_counted(folder: Path) -> None:
    write_stream(folder / "raw", {"text": "str"}, [{"text": "a b c"}] * 40)
    result = preview_of(training_config(folder, "web raw", name="text"), 10, steps=1)
    assert result.windows.unit == "samples"
    assert any(
        line.startswith("raw: the loader tokenizes") for line in list_preview_warnings(result)
    )
    assert result.steps[0].drawn == 10 > result.steps[0].rows
    (alone,) = preview_of(training_config(folder, "raw", name="text"), 10, steps=1).steps
    assert (alone.counts, alone.padding, alone.is_unread) == (None, None, False)


def test_a_mix_that_cannot_be_previewed_is_refused_in_one_sentence(
    folder: Path, tmp_path: Path
) -> None:
    without = dataclasses.replace(mix(training_config(folder)), tokenizer=None)
    with pytest.raises(RecipeError, match="cannot be opened"):
        preview(without, PreviewOptions(world=Machines(batch=8)))
    long = {"input_ids": np.full(9, 5, np.uint16), "labels": np.full(2, 6, np.uint16)}
    write_stream(tmp_path / "long", PAIR, [long] * 9)
    named = r"Step 0, rank 0: stream long, shard shard.00000.mds, row \d: .*nothing left"
    with pytest.raises(MixRefused, match=named):
        preview_of(training_config(tmp_path, "long"), 4)
    next((tmp_path / "long").glob("*.mds")).unlink()
    with pytest.raises(Unreachable, match=r"long/shard.00000.mds"):
        preview_of(training_config(tmp_path, "long"), 4)
    with pytest.raises(RecipeError, match="first batch is not full"):
        preview_of(training_config(folder, "web", drop_last=True), 90)


CHAT = {"role": "user", "content": "Which \x1b[31mone?"}, {"role": "assistant", "content": "This."}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("previewed")
    docs = documents(write_jsonl(folder / "docs.jsonl", list(docstrings(30))))
    talks = chats(write_jsonl(folder / "chat.jsonl", [{"messages": CHAT}] * 40))
    loader = {"name": "finetuning", "num_workers": 0, "dataset": {"shuffle": True}}
    keys = {"max_seq_len": 32, "train_loader": loader}
    path = write_recipe(folder, tokenizer_folder, streams={"docs": docs, "chat": talks}, **keys)
    run_recipe(path)
    return path


def preview_as_json(*arguments: object) -> dict[str, Any]:
    return json.loads(run_ok("preview", *arguments, "--json").out)


def test_the_text_shows_steps_samples_and_the_epoch(recipe: Path) -> None:
    answer = run_ok("preview", recipe, "--batch", 8, "--gpus", 2, "--workers", 2, "--ids")
    assert re.search(r"^  rows_a_step +8$", answer.out, re.MULTILINE)
    assert answer.out.count("step 2: 8 samples drawn") == 1
    assert "⟦This.⟨<|im_end|>⟩" in answer.out
    assert "\x1b" not in answer.out, "nothing in a sample steers a terminal"
    assert "node 0 rank 1 worker 0: " in answer.out
    assert re.search(r"^  chat .* ~[\d,]+ ", answer.out, re.MULTILINE)
    (shard,) = (recipe.parent / "out/chat/train").glob("*.mds")
    moved = shard.rename(shard.with_suffix(".away"))
    answer = mdsmix("preview", recipe, "--batch", 8)
    moved.rename(shard)
    assert (answer.code, len(answer.err.splitlines())) == (4, 1)
    assert shard.name in answer.err


def test_nothing_is_printed_on_stderr(recipe: Path) -> None:
    """torch's libraries print 30 lines about leaks if Python does not collect garbage at exit."""
    command = [Path(sys.executable).with_name("mdsmix"), "preview", recipe, "--batch", "8"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")


def ids(answer: dict[str, Any]) -> list[list[int]]:
    return [[s["id"] for s in step["ranks"][0]["samples"]] for step in answer["steps"]]


def test_json_has_sample_ids_and_a_loaders_state_continues_them(
    recipe: Path, tmp_path: Path
) -> None:
    whole = preview_as_json(recipe, "--gpus", 1, "--batch", 8, "--steps", 5, "--windows", 3)
    assert [*map(len, ids(whole))] == [8] * 5
    assert sum(row["samples"] for row in whole["epoch"]["rows"]) == 8 * whole["steps_an_epoch"]
    assert len(whole["epoch"]["windows"]) == 3
    rendered = recipe.with_name("train.yaml")
    run_ok("render-yaml", recipe, "-o", rendered)
    loader = build_loader(rendered, 8)
    assert len(list(islice(loader, 2))) == 2
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    del loader
    gc.collect()
    continued = preview_as_json(
        rendered, "--gpus", 1, "--batch", 8, "--steps", 3, "--state", tmp_path / "state.json"
    )
    assert [step["step"] for step in continued["steps"]] == [2, 3, 4]
    assert ids(continued) == ids(whole)[2:]
    assert (
        continued["steps"]
        == preview_as_json(rendered, "--gpus", 1, "--batch", 8, "--from-step", 2)["steps"]
    )
    seed, epoch = (
        preview_as_json(recipe, "--gpus", 1, "--batch", 8, *option)
        for option in (("--seed", 5), ("--epoch", 1))
    )
    assert (seed["shuffle_seed"], epoch["epoch"]["epoch"]) == (5, 1)
    assert ids(whole)[:3] not in (ids(seed), ids(epoch))


def test_every_region_of_the_page_has_its_own_name(recipe: Path, tmp_path: Path) -> None:
    """A screen reader jumps between the regions of a page by their names."""
    options = ("mix.docs.choose=4", "mix.chat.choose=4", "--batch", 8, "--gpus", 1, "-n", 1)
    run_ok("report", recipe, *options, "-o", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text("utf-8")
    names = re.findall('role="region"[^>]*aria-label="([^"]+)"', page)
    assert len(set(names)) == len(names), names
    assert sum(name.startswith("The first batches, ") for name in names) > 3


def test_a_stream_of_weight_0_is_in_no_batch(recipe: Path, tmp_path: Path) -> None:
    for weight in ("repeat", "choose"):
        tree = preview_as_json(recipe, f"mix.docs.{weight}=0", "--batch", 8, "--gpus", 1)
        draws = [rank["samples"] for step in tree["steps"] for rank in step["ranks"]]
        streams = {sample["stream"] for samples in draws for sample in samples}
        assert streams == {"chat"}
    run_ok("report", recipe, "mix.docs.repeat=0", "--batch", 8, "-o", tmp_path / "r.html")


def test_a_phase_is_previewed_in_its_own_epoch(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_tokens(tmp_path / "web", 60)
    phase = {"budget": "20 samples", "mix": {"web": "100%"}}
    recipe = {
        "tokenizer": str(tokenizer_folder),
        "max_seq_len": 8,
        "streams": {"web": {"local": str(tmp_path / "web"), "split": "train"}},
        "phases": {"one": phase, "two": phase},
        "train_loader": {"name": "text", "num_workers": 0},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    words = ("preview", path, "phase=two", "--batch", 4, "--gpus", 1, "--steps", 0)
    for options, epoch in (((), 1), (("--epoch", 0), 0)):
        printed = run_ok(*words, *options).out
        assert f"epoch {epoch}, 5 steps" in printed
        assert "shuffle_seed         9177" in printed
