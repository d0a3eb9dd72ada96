"""`build_loader`: streams of every column layout in one loader, packed batches and their state, and
settings of which no loader can be built.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from streaming.base.shared import prefix
from streaming.base.shuffle import get_shuffle

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.load import TokenIds, build_loader, loader
from mdsmix.load.collate import Packer
from mdsmix.load.loader_settings import read_settings
from mdsmix.load.training_rows import RowRules, TrainingRow
from mdsmix.mix.epoch.draws import SMALLEST_BLOCKS
from mdsmix.mix.plan.plan import PlanOptions, make_plan, resolve_for_plan
from tests.converting import pairs, run_ok, write_jsonl, write_recipe
from tests.preloaded import PreloadedPython
from tests.test_extensions import converted  # noqa: F401
from tests.with_torch.load_streams import (
    EOS,
    IDS,
    PAD,
    PAIR,
    config,
    first_tokens,
    loaded,
    run_ranks,
    write_stream,
    write_tokens,
)

X = -100
pytestmark = pytest.mark.usefixtures("_release_loaders")

ROW = np.arange(10, 18, dtype=np.uint16)
CHUNK = {"input_ids": "ndarray:uint16:1", "labels": "ndarray:uint16:7"}
CUT = {"input_ids": ROW[:1] + 30, "labels": ROW[1:] + 30}
TURN = {"input_ids": ROW[:2] + 40, "labels": ROW[2:3] + 40}
CHAT = [{"input_ids": [60, 61], "labels": [62]}, {"input_ids": [63], "labels": [64, EOS]}]
PACKED = {"input_ids": "ndarray:uint16", "starts": "ndarray:int32"}
DOCUMENTS = {"input_ids": ROW[:4] + 60, "starts": np.int32([0, 2])}
LAYOUTS: tuple[tuple[dict[str, str], dict[str, Any], list[int], list[int]], ...] = (
    # Columns, a sample, and the ids and labels of its row before padding.
    ({"tokens": "ndarray:uint16:8"}, {"tokens": ROW}, [*range(10, 18)], [*range(10, 18)]),
    ({"tokens": "ndarray:int32"}, {"tokens": np.int32([20, EOS])}, [20, EOS], [20, EOS]),
    ({"tokens": "bytes"}, {"tokens": np.int64([30, 31]).tobytes()}, [30, 31], [30, 31]),
    (CHUNK, CUT, [*range(40, 48)], [X, *range(41, 48)]),
    (PAIR, TURN, [50, 51, 52, EOS], [X, X, 52, EOS]),
    ({"turns": "json"}, {"turns": CHAT}, [60, 61, 62, 63, 64, EOS], [X, X, X, X, 64, EOS]),
    (PACKED, DOCUMENTS, [70, 71, 72, 73], [X, 71, X, 73]),
)
"Their rows begin with different tokens."


def test_streams_of_every_layout_are_read_by_one_loader(tmp_path: Path) -> None:
    for number, (columns, sample, *_) in enumerate(LAYOUTS):
        write_stream(tmp_path / str(number), columns, [sample])
    streams = {str(number): {"local": f"{tmp_path}/{number}"} for number in range(len(LAYOUTS))}
    batches = list(loaded(streams))
    columns = {key: torch.cat([batch[key] for batch in batches]).tolist() for key in batches[0]}
    assert {batch[key].dtype for batch in batches for key in batch} == {torch.int64}
    assert "sequence_id" in columns, (
        "a stream is packed, and attention must not cross its documents"
    )
    expected = {ids[0]: (ids, labels) for _, _, ids, labels in LAYOUTS}
    assert sorted(ids[0] for ids in columns["input_ids"]) == sorted(expected)
    rows = (columns[key] for key in ("input_ids", "labels", "attention_mask"))
    for ids, labels, mask in zip(*rows, strict=True):
        row, row_labels = expected[ids[0]]
        padding = 8 - len(row)
        assert ids == row + [PAD] * padding
        assert labels == row_labels + [X] * padding
        assert mask == [1] * len(row) + [0] * padding


def test_a_profiler_records_each_batch(tmp_path: Path) -> None:
    """Without a profiler the record is left out; the batches and the state are the same."""
    loader = loaded({"a": {"local": str(write_tokens(tmp_path, 10))}}, 4, drop_last=False)
    batches = [*loader]
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": 0, "sample_in_epoch": 0})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = [*loader]
    assert first_tokens(profiled) == first_tokens(batches) == [*range(10, 90, 8)]
    assert loader.state_dict() == state
    counts = [event.count for event in profile.key_averages() if "DataLoader" in event.key]
    assert counts == [len(batches) + 1]  # the last finds the end of the epoch


def test_the_state_counts_the_samples_that_packed_batches_drew(tmp_path: Path) -> None:
    rows = [{"input_ids": ROW[:1] + i, "labels": np.uint16([5, EOS])} for i in range(11)]
    streams = {"a": {"local": str(write_stream(tmp_path / "a", PAIR, rows))}}
    settings = config(streams, packing_ratio=2)
    first = build_loader(settings, 2, ids=IDS, position_ids=True)
    batch = next(iter(first))
    assert batch["input_ids"].shape == (2, 8)
    assert batch["sequence_id"][0].tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    state = first.state_dict()
    assert state["sample_in_epoch"] == 4
    resumed = build_loader(settings, 2, ids=IDS)
    resumed.load_state_dict(state)
    ids = [int(token) for batch in resumed for token in batch["input_ids"].flatten()]
    assert sorted(token for token in ids if token >= 10) == list(range(14, 21))
    for _ in zip(range(3), first, strict=False):
        state = first.state_dict()
    assert state["sample_in_epoch"] == 11, "the last batch drew fewer"
    fractional = loaded(streams, 3, "finetuning", packing_ratio=1.9)
    assert fractional.batch_size == 5, "5.7, rounded down as in LLM-Foundry"


KEYS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # Loader, keys of its dataset, and their values in the rules of rows and in the collator.
    ("finetuning", {"target_prompts": "all"}, {"target_prompts": "all"}, {}),
    ("finetuning", {"target_responses": "all"}, {"target_responses": "all"}, {}),
    ("finetuning", {"decoder_only_format": False}, {"decoder_only_format": False}, {}),
    ("finetuning", {}, {"max_seq_len": 8}, {"with_sequence_id": True, "packer": None}),
    ("finetuning", {"pad_to_longest": True}, {}, {"pad_to_longest": True}),
    ("finetuning", {"allow_pad_trimming": True}, {}, {"allow_pad_trimming": True}),
    (
        "finetuning",
        {"packing_ratio": 2, "max_leftover_bins_to_keep": 0},
        {},
        {"packer": Packer(bins=2, max_seq_len=8, keep=0)},
    ),
    (
        "text",
        {"token_encoding_type": "uint16"},
        {"token_encoding_type": "uint16"},
        {"with_sequence_id": False},
    ),
    (
        "text",
        {"eos_token_id": 0},
        {"separator": 0, "separator_starts": False},
        {"with_sequence_id": True},
    ),
    (
        "text",
        {"bos_token_id": 5},
        {"separator": 5, "separator_starts": True},
        {"with_sequence_id": True},
    ),
]


def test_the_keys_of_the_yaml_reach_the_rules_and_the_collator() -> None:
    for name, dataset, rows, batches in KEYS:
        settings = read_settings(config({"a": {"local": "a"}}, name, **dataset))
        rules = loader.make_row_rules(settings, TokenIds(eos=EOS, pad=PAD, bos=5))
        collate = loader.make_collate(settings, rules, 2 if "packing_ratio" in dataset else None)
        assert {key: getattr(rules, key) for key in rows} == rows
        assert {key: getattr(collate, key) for key in batches} == batches


def test_all_ranks_use_the_smallest_of_their_packing_ratios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank computes a ratio from rows of its own, and all need batches of one size."""
    settings = config({"a": {"local": "a"}}, packing_ratio="auto") | {"max_seq_len": 200}
    row = TrainingRow(np.full(100, 9), np.full(100, 9))
    opened = SimpleNamespace(end=lambda: None, released_if_refused=nullcontext)
    monkeypatch.setattr(loader, "_open_dataset", lambda *_, **keywords: opened)
    monkeypatch.setattr(loader, "islice", lambda dataset, count: [row] * 1600)
    rules = RowRules(ids=IDS, max_seq_len=200)
    assert loader._find_packing_ratio(read_settings(settings), rules, 8) == 2
    run = torch.distributed
    monkeypatch.setattr(run, "is_initialized", lambda: True)
    monkeypatch.setattr(run, "get_world_size", lambda: 2)
    monkeypatch.setattr(run, "all_gather_object", lambda ratios, own: ratios.append(own - 0.5))
    assert loader._find_packing_ratio(read_settings(settings), rules, 8) == 1.5


RATIO_OF_A_RANK = """
import json, os, sys
from mdsmix.load import loader
from mdsmix.load.loader_settings import read_settings
from tests.with_torch.load_streams import IDS
loader.list_ratios = lambda *_: [1.0]
loader.find_best_ratio = lambda *_: 1.5 + float(os.environ["RANK"])
settings = read_settings(json.loads(sys.argv[1]))
print(loader._find_packing_ratio(settings, loader.make_row_rules(settings, IDS), 8))
"""


def test_ranks_agree_on_a_ratio_before_the_training_loop_opens_a_group(
    programs: PreloadedPython,
) -> None:
    """Ranks of different ratios would draw different numbers of samples for a batch."""
    tree = config({"a": {"local": "a"}}, packing_ratio="auto") | {"max_seq_len": 200}
    results = run_ranks(programs, RATIO_OF_A_RANK, json.dumps(tree))
    assert [float(result.stdout) for result in results] == [1.5, 1.5]


LOADERS_OF_A_RANK = """
import json, os, sys, time
import torch.distributed as dist
from mdsmix.load import build_loader
from tests.with_torch.load_streams import IDS, first_tokens
slow_rank, *trees = json.loads(sys.argv[1])
close = dist.destroy_process_group

def close_late():
    if os.environ["RANK"] == slow_rank:
        time.sleep(0.5)
    close()

dist.destroy_process_group = close_late
loaders = [build_loader(tree, 2, ids=IDS) for tree in trees]
dist.init_process_group("gloo")  # the training loop's own
print(json.dumps([first_tokens(loader) for loader in loaders]))
dist.barrier()
close()
"""


@pytest.mark.parametrize("slow_rank", ["0", "1"])
def test_a_rank_is_slow_between_two_loaders(
    tmp_path: Path, programs: PreloadedPython, slow_rank: str
) -> None:
    """Such as those of training and evaluation, before the training loop opens a process group. A
    group of Streaming's own is found by the faster rank when it opens the second loader.
    """
    folders = [write_tokens(tmp_path / name, 8) for name in ("train", "eval")]
    trees = [config({"a": {"local": str(folder)}}, "text") for folder in folders]
    results = run_ranks(programs, LOADERS_OF_A_RANK, json.dumps([slow_rank, *trees]))
    first, second = (json.loads(result.stdout) for result in results)
    for tokens_of_ranks in zip(first, second, strict=True):
        assert sorted(chain(*tokens_of_ranks)) == [10 + 8 * row for row in range(8)]


DOCUMENTS_OF_A_RANK = """
import json, sys
from mdsmix.load import build_loader
from tests.with_torch.load_streams import IDS
from tests.with_torch.test_load_loader import list_documents
passes = []
for tree in json.loads(sys.argv[1]):
    loader = build_loader(tree, 2, ids=IDS)
    first = list_documents(loader)
    # Once more, from the middle.
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "sample_in_epoch": 16})
    passes.append([first, list_documents(loader)])
    loader.end()
print(json.dumps(passes))
"""
Documents = list[tuple[list[int], list[int]]]


def list_documents(batches: Iterable[Any]) -> Documents:
    """Return the ids and labels of each document in batches of packed rows."""
    documents = []
    for batch in batches:
        for ids, labels, numbers in zip(
            batch["input_ids"], batch["labels"], batch["sequence_id"], strict=True
        ):
            for number in range(int(numbers.max()) + 1):
                is_document = numbers == number
                documents.append((ids[is_document].tolist(), labels[is_document].tolist()))
    return documents


def make_packed_sample(i: int) -> dict[str, Any]:
    """Return a row of two documents, of 1 to 4 tokens and of 2, which no other row has."""
    size = 3 + i % 4
    mask = np.array([i % 2] * (size - 1) + [1], np.uint8)
    starts = np.array([0, size - 2], np.int32)
    ids = np.arange(10 + 8 * i, 10 + 8 * i + size, dtype=np.uint16)
    return {"input_ids": ids, "starts": starts, "loss_mask": mask}


def make_short_pair(i: int) -> dict[str, Any]:
    """Return a pair of 3 or 4 tokens with its EOS: two always fill a row of 8."""
    ids = np.arange(10 + 8 * i, 11 + 8 * i + i % 2, dtype=np.uint16)
    return {"input_ids": ids, "labels": np.array([14 + 8 * i], np.uint16)}


def test_ranks_share_the_documents_of_packed_rows(
    tmp_path: Path, programs: PreloadedPython
) -> None:
    """Of rows that the conversion packed, and of pairs that the loader packs. Two ranks of two
    workers each read what one process reads: every document once, with the same ids and labels. So
    they do from the 16th sample on.
    """
    with_mask = PACKED | {"loss_mask": "ndarray:uint8"}
    stored = write_stream(
        tmp_path / "stored", with_mask, map(make_packed_sample, range(48)), size_limit=300
    )
    pairs = write_stream(tmp_path / "pairs", PAIR, map(make_short_pair, range(48)), size_limit=300)
    common = {"shuffle": True, "shuffle_seed": 3, "drop_last": False}
    cases: list[tuple[Path, dict[str, Any], int]] = [
        # Stream, keys of its loader, and documents of a sample.
        (stored, common, 2),
        (pairs, common | {"packing_ratio": 2}, 1),
    ]
    workers = {"num_workers": 2, "prefetch_factor": 2}
    trees = [
        config({"a": {"local": str(folder)}}, "mdsmix", **keys, **workers)
        for folder, keys, _ in cases
    ]
    results = run_ranks(programs, DOCUMENTS_OF_A_RANK, json.dumps(trees))
    passes_of_ranks = [json.loads(result.stdout) for result in results]
    for (folder, keys, documents), *passes in zip(cases, *passes_of_ranks, strict=True):
        alone = loaded({"a": {"local": str(folder)}}, 2, "mdsmix", **keys)
        expected = [[ids, labels] for ids, labels in list_documents(alone)]
        assert len({ids[0] for ids, _ in expected}) == len(expected) == 48 * documents
        shares = [first for first, _ in passes]
        assert len(shares[0]) == len(shares[1])
        assert sorted(shares[0] + shares[1]) == sorted(expected)
        for first, later in passes:
            assert later == first[16 // 2 * documents :]


def test_settings_of_which_no_loader_can_be_built_are_refused_in_one_sentence(
    tmp_path: Path,
) -> None:
    local = {"local": str(write_tokens(tmp_path, 4))}
    for stream, dataset, message in (
        ({"repeat": 2}, {"epoch_size": 10}, "but repeat or choose of"),
        ({"remote": "ftp://x"}, {}, "Streaming refuses it: Unsupported remote path"),
        ({}, {"batching_method": "any"}, "set it to random or stratified"),
        ({}, {"eos_token_id": 9}, "eos_token_id of train_loader is 9, but the tokenizer's is"),
    ):
        with pytest.raises(RecipeError, match=message):
            loaded({"a": local | stream}, **dataset)
    with pytest.raises(RecipeError, match="neither a padding nor an EOS token"):
        build_loader(config({"a": local}), 1, ids=TokenIds(eos=None))
    encoder_decoder = config({"a": local}, decoder_only_format=False)
    with pytest.raises(RecipeError, match="call build_loader without position_ids"):
        build_loader(encoder_decoder, 1, ids=IDS, position_ids=True)
    for size in (2.5, 0, -1, "8", None):
        with pytest.raises(RecipeError, match=r"^batch_size is .*: it must be a whole number of"):
            loaded({"a": local}, size)  # type: ignore[arg-type]
    assert loaded({"a": local}, np.int64(2)).batch_size == 2  # type: ignore[arg-type]


def test_an_epoch_that_fills_no_batch_is_refused(tmp_path: Path) -> None:
    """Streaming silently gives a pass without a batch, unless the last batch may be short."""
    streams = {n: {"local": str(write_tokens(tmp_path / n, 30))} for n in "ab"}
    for size, drop_last in ((200, False), (60, True)):
        assert len(list(loaded(streams, size, drop_last=drop_last))) == 1
    for dataset, size, drawn in (
        ({"drop_last": True}, 61, 61),
        ({"drop_last": False, "batching_method": "stratified"}, 61, 61),
        ({"drop_last": True, "name": "finetuning", "packing_ratio": 2.0}, 31, 62),
    ):
        with pytest.raises(RecipeError, match=rf"60 samples, but a batch needs {drawn}\b"):
            loaded(streams, size, **dataset)


def test_a_batching_method_that_cannot_fill_a_batch_is_refused_in_one_sentence(
    tmp_path: Path,
) -> None:
    """Streaming raises a bare ValueError in a worker when the first epoch begins."""
    few = str(write_tokens(tmp_path / "few", 3))
    many = str(write_tokens(tmp_path / "many", 60))
    streams = {"few": {"local": few}, "many": {"local": many}}
    for method, size, word in (
        ("stratified", 4, "larger"),
        ("per_stream", 4, "smaller"),
        ("device_per_stream", 4, "smaller"),
    ):
        problem = f"{method} cannot fill a batch of {size} samples"
        with pytest.raises(
            RecipeError, match=f"{problem} .* too few samples of few; set a {word} batch"
        ):
            loaded(streams, size, batching_method=method)
    for method, size in (("stratified", 16), ("per_stream", 2), ("device_per_stream", 2)):
        assert list(loaded(streams, size, batching_method=method, drop_last=True)), method


def test_shuffle_blocks_that_are_too_small_are_refused_in_one_sentence(tmp_path: Path) -> None:
    """Streaming raises a bare ValueError when the first epoch begins. The smallest size that is
    taken gives all batches.
    """
    few = str(write_tokens(tmp_path / "few", 12))
    many = str(write_tokens(tmp_path / "many", 36))
    streams = {"few": {"local": few}, "many": {"local": many}}
    for algo, method, size in (
        ("py1br", "random", 2),
        ("py1br", "per_stream", 8),
        ("py1br", "stratified", 8),
        ("py1e", "per_stream", 4),
        ("py1e", "stratified", 4),
        ("naive", "device_per_stream", 4),
    ):
        keys = {"shuffle": True, "shuffle_algo": algo, "batching_method": method}
        names = "the parts of few in " if method != "random" else ""
        start = f"^train_loader: {names}shuffle_block_size: {size - 1} are too small"
        with pytest.raises(RecipeError, match=f"{start} for shuffle_algo: {algo} "):
            loaded(streams, 4, **keys, shuffle_block_size=size - 1, num_canonical_nodes=1)
        taken = loaded(streams, 4, **keys, shuffle_block_size=size, num_canonical_nodes=1)
        assert len(list(taken)) == 12, (algo, method)
    for algo, smallest in SMALLEST_BLOCKS.items():
        with pytest.raises(ValueError, match="high <= 0"):
            get_shuffle(algo, np.array([5, 7]), 1, 0, 0, smallest - 1)
    for algo, method in (("naive", "per_stream"), ("py1s", "stratified")):
        keys = {"shuffle": True, "shuffle_algo": algo, "batching_method": method}
        taken = loaded(streams, 4, **keys, shuffle_block_size=1, num_canonical_nodes=1)
        assert len(list(taken)) == 12, (algo, method)


def test_fewer_samples_than_canonical_nodes_are_refused_in_one_sentence(tmp_path: Path) -> None:
    """By py1e alone. Streaming raises a bare ValueError when the first epoch begins, and the other
    ranks of the node wait. The drawn samples count, not those of the stream.
    """
    folder = str(write_tokens(tmp_path / "a", 20))
    for weight, drawn in (({"choose": 9}, 9), ({"repeat": 1.5}, 30)):
        mixed = {"a": {"local": folder, **weight}}
        keys: dict[str, Any] = {"shuffle": True, "num_canonical_nodes": drawn + 1}
        with pytest.raises(RecipeError, match=f"an epoch draws {drawn} samples, fewer than"):
            loaded(mixed, **keys)
        for algo in ("py1br", "py1s", "py2s", "naive"):
            assert list(loaded(mixed, **keys, shuffle_algo=algo)), algo
        assert len(first_tokens(loaded(mixed, **keys | {"num_canonical_nodes": drawn}))) == drawn
        with pytest.raises(ValueError, match="canonical node is 0"):
            get_shuffle("py1e", np.array([drawn]), drawn + 1, 0, 0, 99)


COUNT_BATCHES = """
import json, logging, sys
from mdsmix.load import TokenIds, build_loader

logging.basicConfig(format="%(message)s", level=logging.WARNING)
loader = build_loader(json.loads(sys.argv[1]), 4, ids=TokenIds(eos=0, pad=1))
print(sum(1 for _ in loader))
"""


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_node_is_warned_once_of_devices_with_a_batch_less(
    programs: PreloadedPython, tmp_path: Path, drop_last: bool
) -> None:
    """Two real ranks count their batches."""
    many = {"local": str(write_tokens(tmp_path / "many", 50))}
    for other, counts in ((37, ["11", "10"]), (40, ["11", "11"])):
        few = {"local": str(write_tokens(tmp_path / str(other), other))}
        keys = {"batching_method": "device_per_stream", "num_canonical_nodes": 1}
        tree = config({"many": many, "few": few}, "text", drop_last=drop_last, **keys)
        ranks = run_ranks(programs, COUNT_BATCHES, json.dumps(tree))
        assert [rank.stdout.strip() for rank in ranks] == counts
        warned = "".join(rank.stderr for rank in ranks).count("1 of 2 devices have no batch")
        assert warned == (counts[0] != counts[1])


def test_a_packing_ratio_that_is_too_high_is_a_warning(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """About as many samples are untrained as `check` estimates."""
    texts = [f"{n} " + "one two three four " * (n % 4 + 2) for n in range(400)]
    records = [{"prompt": text, "response": text[:20]} for text in texts]
    streams = {"faq": pairs(write_jsonl(tmp_path / "faq.jsonl", records))}
    settings = {"streams": streams, "max_seq_len": 64, "train_loader": {"num_workers": 0}}
    recipe = write_recipe(tmp_path, tokenizer_folder, **settings)
    train = tmp_path / "train.yaml"
    run_ok("convert", recipe)
    keys = ("train_loader.name=mdsmix", "train_loader.dataset.packing_ratio=4.0")
    run_ok("render-yaml", recipe, "-o", train, *keys)
    answer = run_ok("check", train)
    match = re.search(r"packing-high.* about ([\d,]+) of 400 samples", answer.out)
    assert match, answer.out
    estimate = int(match[1])
    plan = make_plan(resolve_for_plan([str(train)]), PlanOptions(gpus=1, batch=8))
    loader = build_loader(str(train), batch_size=8)
    batches = list(loader)
    trained = sum(int(row.max()) + 1 for batch in batches for row in batch["sequence_id"])
    positions = sum(batch["input_ids"].numel() for batch in batches)
    assert plan.epoch.tokens <= 1.000001 * positions, "no more than fit the batches"
    assert sum(stream.tokens for stream in plan.streams) <= 1.000001 * 64 * 400 / 4
    assert "packing_ratio 4 draws more tokens" in " ".join(plan.notes)
    assert estimate > 100
    assert 0.8 * estimate < 400 - trained < 1.2 * estimate
    run_ok("render-yaml", recipe, "-o", train, keys[0], "train_loader.dataset.packing_ratio=1.2")
    assert "packing-high" not in run_ok("check", train).out


def test_a_loader_that_was_refused_leaves_its_folders(tmp_path: Path) -> None:
    """Also while somebody keeps the error, as a notebook does."""
    source = write_tokens(tmp_path / "a", 40, size_limit=300)
    mixed = {"a": {"remote": str(source), "local": str(tmp_path / "copy")}}
    kept = list[BaseException]()
    encoder = config(mixed, decoder_only_format=False)
    for tree, keys in (
        (config(mixed, cache_limit=3000), {}),  # when the streams are open
        (config(mixed, drop_last=True, batching_method="per_stream", epoch_size=1), {}),
        (encoder, {"position_ids": True}),  # when the loader is made
    ):
        with pytest.raises(RecipeError) as refused:
            build_loader(tree, 2, ids=IDS, **keys)
        assert "in use" not in str(refused.value)
        kept.append(refused.value)
    assert len(first_tokens(loaded(mixed))) == 40


def test_a_local_folder_in_use_is_refused_until_its_loader_is_deleted(tmp_path: Path) -> None:
    remote = write_tokens(tmp_path / "remote", 4)
    streams = {"a": {"remote": str(remote), "local": f"{tmp_path}/local"}}
    first = loaded(streams)
    with pytest.raises(RecipeError, match="is in use"):
        loaded(streams)
    assert len(first_tokens(first)) == 4, "the first loader still works"
    del first
    gc.collect()
    assert len(first_tokens(loaded(streams))) == 4


@pytest.mark.parametrize("times", [1, 2, 9])
def test_runs_that_begin_at_the_same_moment_get_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Streaming finds a number for a dataset, and another run takes it before its files are made.

    Args:
        times: how often another run is faster.
    """
    folders = [write_tokens(tmp_path / name, 8) for name in "ab"]
    other = loaded({"a": {"local": str(folders[0])}})
    taken = other.dataset._shm_prefix_int
    find = prefix._check_and_find_retrying
    finds = count()

    def find_taken(*arguments: Any, **settings: Any) -> int:
        is_late = next(finds) >= times * len(prefix.SHM_TO_CLEAN)
        number: int = find(*arguments, **settings) if is_late else taken
        return number

    monkeypatch.setattr(prefix, "_check_and_find_retrying", find_taken)
    monkeypatch.setattr("mdsmix.load.loader.TRIES_TO_OPEN", 3)
    monkeypatch.setattr("mdsmix.load.loader.SECONDS_TO_NEXT_TRY", 0.01)
    streams = {"b": {"local": str(folders[1]), "repeat": 0.5}}
    if times < 3:
        assert len(first_tokens(loaded(streams))) == 4
    else:
        with pytest.raises(Unreachable, match="another run on this machine began"):
            loaded(streams)
    assert len(first_tokens(other)) == 8


def test_a_new_kind_with_a_new_codec_is_loaded(converted: Path) -> None:  # noqa: F811
    train = converted.with_name("train.yaml")
    run_ok("render-yaml", converted, "-o", train, "train_loader.num_workers=0")
    (batch,) = build_loader(str(train), batch_size=2)
    assert sorted(row[:2].tolist() for row in batch["input_ids"]) == [[3, 5], [5, 5]]
