"""Batches that are written from the bytes of samples are those that rows give one by one. The
oracle is a bare StreamingDataset with the same arguments, whose samples `make_training_row` and the
collator turn into batches.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming import Stream, StreamingDataset
from torch.utils.data import DataLoader

from mdsmix.errors import MdsmixError
from mdsmix.load import MixLoader, TokenIds, build_loader, collate, direct_batch, training_rows
from mdsmix.load.stored_rows import find_id_columns_of
from mdsmix.load.training_rows import make_training_row
from tests.with_torch.load_streams import EOS, PAD, PAIR, config, write_stream

pytestmark = pytest.mark.usefixtures("_release_loaders")
WIDTH = 24
Batch = dict[str, torch.Tensor]
Samples = list[dict[str, Any]]


def draw_ids(draw: Any, low: int, high: int, dtype: Any) -> Any:
    """Draw a row of ids, among which are EOS and padding tokens."""
    return draw.integers(0, 9, draw.integers(low, high, endpoint=True)).astype(dtype)


def plain_rows(draw: Any, dtype: Any) -> Samples:
    """Rows of which some are longer than the batch, and are cut."""
    return [{"tokens": draw_ids(draw, 1, WIDTH + 3, dtype), "id": f"row {n}"} for n in range(30)]


def full_rows(draw: Any, dtype: Any) -> Samples:
    return [{"tokens": draw_ids(draw, WIDTH, WIDTH, dtype)} for _ in range(30)]


def pairs(draw: Any, dtype: Any) -> Samples:
    samples = []
    for _ in range(30):
        response = draw_ids(draw, 1, WIDTH // 2, dtype)
        response[-1] = EOS
        samples.append({"input_ids": draw_ids(draw, 1, WIDTH // 2, dtype), "labels": response})
    return samples


def open_pairs(draw: Any, dtype: Any) -> Samples:
    """Pairs to which EOS is added, if they do not fill the row. Some have loss weights."""
    samples = []
    for length in (WIDTH, *draw.integers(2, WIDTH, 28, endpoint=True), WIDTH - 1):
        ids = draw.integers(2, 9, length).astype(dtype)
        cut = int(draw.integers(1, length))
        weights = draw.random(length, np.float32)
        samples.append({"input_ids": ids[:cut], "labels": ids[cut:], "loss_weights": weights})
    return samples


def conversations(draw: Any, _: Any) -> Samples:
    """Conversations of one to three turns, some with EOS at the end, and their loss weights."""
    samples = []
    for number in range(30):
        turns = []
        for _ in range(number % 3 + 1):
            prompt, response = (draw.integers(0, 9, draw.integers(1, 5)).tolist() for _ in "pr")
            turns.append({"input_ids": prompt, "labels": response})
        count = sum(len(turn["input_ids"]) + len(turn["labels"]) for turn in turns)
        samples.append({"turns": turns, "loss_weights": draw.random(count, np.float32)})
    filling = [{"input_ids": [3] * 10, "labels": [4] * (WIDTH - 10)}]
    samples.append({"turns": filling, "loss_weights": draw.random(WIDTH, np.float32)})
    return samples


def long_pairs(draw: Any, dtype: Any) -> Samples:
    """Pairs of which most are cut, at any place of the response."""
    samples = []
    for length in draw.integers(WIDTH - 4, 3 * WIDTH, 30):
        ids = draw.integers(0, 9, length).astype(dtype)
        cut = int(draw.integers(1, WIDTH))
        samples.append({"input_ids": ids[:cut], "labels": ids[cut:]})
    return samples


def long_chats(draw: Any, _: Any) -> Samples:
    """Conversations that are cut in any prompt or response after the first answer."""
    samples = []
    for _ in range(30):
        turns = [
            {side: draw.integers(0, 9, draw.integers(2, WIDTH // 2)).tolist() for side in PAIR}
            for _ in range(4)
        ]
        samples.append({"turns": turns})
    return samples


def packed_rows(draw: Any, dtype: Any, has_mask: bool = True) -> Samples:
    samples = []
    for _ in range(30):
        ids = draw_ids(draw, 4, WIDTH, dtype)
        inner = np.flatnonzero(draw.integers(0, 3, len(ids) - 3) == 0) + 1
        starts = np.array([0, *inner], np.int32)
        sample = {"input_ids": ids, "starts": starts}
        if has_mask:
            sample["loss_mask"] = draw.integers(0, 2, len(ids)).astype(np.uint8)
            sample["loss_mask"][-1] = 1
        sample["loss_weights"] = draw.random(len(ids), np.float32)
        samples.append(sample)
    return samples


def full_packed_rows(draw: Any, dtype: Any) -> Samples:
    """Full packed rows, with columns that are not read."""
    samples = []
    for number in range(30):
        ids = draw_ids(draw, WIDTH, WIDTH, dtype)
        starts = np.array([0, *range(number % 5 + 1, WIDTH, 7)], np.int32)
        samples.append({"input_ids": ids, "starts": starts, "id": number, "note": "n" * number})
    return samples


PACKED = {"starts": "ndarray:int32", "loss_mask": "ndarray:uint8"}
WEIGHTS = {"loss_weights": "ndarray:float32"}
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "plain": (plain_rows, {"id": "str", "tokens": "ndarray:{}"}),
    "full": (full_rows, {"tokens": f"ndarray:{{}}:{WIDTH}"}),
    "pairs": (pairs, {"input_ids": "ndarray:{}", "labels": "ndarray:{}"}),
    "packed": (packed_rows, {"input_ids": "ndarray:{}", **PACKED}),
    "all trained": (
        partial(packed_rows, has_mask=False),
        {"input_ids": "ndarray:{}", "starts": "ndarray:int32"},
    ),
    "full packed": (
        full_packed_rows,
        {
            "id": "int",
            "input_ids": f"ndarray:{{}}:{WIDTH}",
            "note": "str",
            "starts": "ndarray:int32",
        },
    ),
    "weighted": (packed_rows, {"input_ids": "ndarray:{}", **PACKED, **WEIGHTS}),
    "open pairs": (open_pairs, {"input_ids": "ndarray:{}", "labels": "ndarray:{}"}),
    "weighted pairs": (open_pairs, {"input_ids": "ndarray:{}", "labels": "ndarray:{}", **WEIGHTS}),
    "chats": (conversations, {"turns": "json"}),
    "long pairs": (long_pairs, {"input_ids": "ndarray:{}", "labels": "ndarray:{}"}),
    "long chats": (long_chats, {"turns": "json"}),
    "weighted chats": (conversations, {"turns": "json", **WEIGHTS}),
}
LEFT = TokenIds(eos=EOS, pad=PAD, bos=2, padding_side="left")
RIGHT = TokenIds(eos=EOS, pad=PAD, bos=2)
CASES: list[tuple[list[str], str, TokenIds, dict[str, Any]]] = [
    (["plain"], "text", RIGHT, {}),
    (["plain", "full"], "text", LEFT, {"eos_token_id": EOS}),
    (["plain"], "text", RIGHT, {"bos_token_id": 2}),
    (["plain"], "text", TokenIds(eos=EOS), {}),
    (["full"], "text", TokenIds(eos=EOS, pad=EOS), {}),
    (["pairs"], "finetuning", RIGHT, {}),
    (["pairs"], "finetuning", LEFT, {"target_prompts": "all"}),
    (["pairs"], "finetuning", RIGHT, {"target_prompts": "length>=5", "pad_to_longest": True}),
    (["pairs"], "finetuning", LEFT, {"allow_pad_trimming": True}),
    (["packed"], "mdsmix", RIGHT, {}),
    (["packed", "all trained"], "mdsmix", LEFT, {}),
    (["full packed"], "mdsmix", RIGHT, {}),
    (["full packed", "weighted"], "mdsmix", LEFT, {}),
    (["packed", "plain", "pairs", "full"], "mdsmix", RIGHT, {"eos_token_id": EOS}),
    (["packed", "plain", "pairs", "full"], "mdsmix", LEFT, {"allow_pad_trimming": True}),
    (["plain"], "text", TokenIds(eos=EOS), {"eos_token_id": EOS}),
    (["plain", "packed"], "mdsmix", LEFT, {"bos_token_id": 2}),
    (["open pairs"], "finetuning", RIGHT, {}),
    (["chats"], "finetuning", RIGHT, {}),
    (["chats", "open pairs"], "finetuning", LEFT, {"target_responses": "all"}),
    (["chats"], "finetuning", TokenIds(eos=None, pad=PAD), {"target_prompts": "length>=3"}),
    (["weighted", "packed"], "mdsmix", LEFT, {}),
    (["long pairs"], "finetuning", RIGHT, {}),
    (["long pairs", "plain"], "mdsmix", LEFT, {"target_prompts": "length>=5"}),
    (["long chats"], "finetuning", RIGHT, {"target_responses": "all"}),
    (["long chats", "long pairs"], "finetuning", LEFT, {"target_prompts": "all"}),
    (["long chats", "packed"], "mdsmix", RIGHT, {"target_responses": "all"}),
    (["weighted chats", "weighted pairs"], "mdsmix", RIGHT, {"target_responses": "all"}),
    (["weighted chats", "weighted", "plain", "chats"], "mdsmix", RIGHT, {"eos_token_id": EOS}),
]


def write(folder: Path, name: str, dtype: str) -> Path:
    make_samples, columns = LAYOUTS[name]
    samples = make_samples(np.random.default_rng(len(name)), dtype)
    samples = [{column: sample[column] for column in columns} for sample in samples]
    columns = {column: encoding.format(dtype) for column, encoding in columns.items()}
    return write_stream(folder, columns, samples, size_limit=800)


def read_bare(loader: MixLoader, copies: Sequence[Path], weights: Any) -> Iterator[Batch]:
    """Yield the batches of a bare StreamingDataset whose rows are made one by one."""
    rules = loader.collate_fn.rules
    make_batch = copy.deepcopy(loader.collate_fn)
    dataset = StreamingDataset(
        streams=[
            Stream(local=str(folder), **weight)
            for folder, weight in zip(copies, weights, strict=True)
        ],
        batch_size=loader.batch_size,
        shuffle=True,
    )
    yield from DataLoader(
        dataset,
        batch_size=loader.batch_size,
        collate_fn=lambda samples: make_batch([make_training_row(s, rules) for s in samples]),
        drop_last=loader.drop_last,
    )


def compare(left: Batch, right: Batch) -> None:
    assert list(left) == list(right)
    for key in left:
        assert left[key].dtype == right[key].dtype, key
        assert torch.equal(left[key], right[key]), key


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each batch that was tried, whether it was written directly."""
    tried: list[bool] = []

    def write_and_note(*arguments: Any) -> Any:
        batch = write_batch(*arguments)
        tried.append(batch is not None)
        return batch

    write_batch = direct_batch.write_batch
    monkeypatch.setattr(collate, "write_batch", write_and_note)
    return tried


@pytest.fixture(autouse=True)
def last_warned(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The max_seq_len that the loader has warned of: none at the beginning of each test."""
    nothing = torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(training_rows, "last_warned", nothing)
    return nothing


@pytest.mark.parametrize("number", range(len(CASES)))
def test_batches_are_those_of_a_bare_dataset(
    number: int, tmp_path: Path, written: list[bool], last_warned: torch.Tensor
) -> None:
    last_warned.fill_(WIDTH)
    names, loader_name, ids, keys = CASES[number]
    dtypes = ("uint16", "uint32", "int32", "uint8")
    drop_last = bool(number % 2)
    weights: list[dict[str, Any]] = [{"repeat": 1.5}, {"repeat": 0.5}, {}, {"repeat": 2}][
        : len(names)
    ]
    streams = {}
    copies = []
    for place, (name, weight) in enumerate(zip(names, weights, strict=True)):
        # Every second case mixes dtypes.
        dtype = dtypes[(number + place * (number % 2)) % 4]
        folder = write(tmp_path / name, name, dtype)
        copies.append(Path(shutil.copytree(folder, tmp_path / "copies" / name)))
        streams[name] = {"local": str(folder), **weight}
    tree = config(streams, loader_name, shuffle=True, drop_last=drop_last, **keys)
    tree["max_seq_len"] = WIDTH
    loader = build_loader(tree, 7, ids=ids, position_ids=number % 3 == 0)
    expected = [*read_bare(loader, copies, weights)]
    batches = [*loader]
    assert len(batches) == len(expected) > 5
    for batch, wanted in zip(batches, expected, strict=True):
        compare(batch, wanted)
    assert written == [True] * len(batches)
    assert len(batches[-1]["labels"]) == 7 or not drop_last


def test_samples_that_need_more_are_made_one_by_one(tmp_path: Path, written: list[bool]) -> None:
    """They give the batch or the error that a row gives."""
    pair = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    packed = {"input_ids": "ndarray:int32", **PACKED}

    def make_pair(prompt: list[int], response: list[int]) -> dict[str, Any]:
        return {"input_ids": np.array(prompt, np.int32), "labels": np.array(response, np.int32)}

    def make_packed(starts: list[int], mask: list[int], first_id: int = 5) -> dict[str, Any]:
        return {
            "input_ids": np.array([first_id, 6, 7, 8], np.int32),
            "starts": np.array(starts, np.int32),
            "loss_mask": np.array(mask, np.uint8),
        }

    many = [2] * WIDTH
    for number, (columns, sample, message) in enumerate(
        [
            (pair, make_pair([5, 6, 7], [*many[3:], EOS]), ""),  # has one token too many
            (pair, make_pair([5, -100], [EOS]), "row 0: this row contains the token id -100"),
            (pair, make_pair(many, [EOS]), "row 0: .* nothing left to train on"),
            (
                packed,
                make_packed([0, 2, 1], [1, 1, 1, 1]),
                "the column `starts` of this packed row",
            ),
            (
                packed,
                make_packed([0, 2, 2], [1, 1, 1, 1]),
                "the column `starts` of this packed row",
            ),
            (packed, make_packed([1, 2], [1, 1, 1, 1]), "the column `starts` of this packed row"),
            (packed, make_packed([0, 4], [1, 1, 1, 1]), "the column `starts` of this packed row"),
            (packed, make_packed([0, 5], [1, 1, 1, 1]), "the column `starts` of this packed row"),
            (packed, make_packed([0, -1], [1, 1, 1, 1]), "the column `starts` of this packed row"),
            # more documents than the batch is wide
            (
                packed,
                make_packed([*range(30)], [1, 1, 1, 1]),
                "the column `starts` of this packed row",
            ),
            (packed, make_packed([0, 1], [1, 1, 0, 0]), "nothing left to train on"),
            (packed, make_packed([0, 1], [1, 1, 1]), "loss_mask has 3 values"),
            (packed, make_packed([0, 1], [1, 1, 1, 1], first_id=-7), "contains the token id -7"),
            (
                packed,
                {
                    "input_ids": np.array([[5, 6, 7, 8]], np.int32),
                    "starts": np.array([0, 1], np.int32),
                    "loss_mask": np.array([1, 1, 1, 1], np.uint8),
                },
                "a row of integers",
            ),
            (
                {"tokens": "ndarray:int16"},
                {"tokens": np.array([4, -2], np.int16)},
                "this row contains the token id -2",
            ),
            ({"tokens": "ndarray:int64"}, {"tokens": np.array([4, 5], np.int64)}, ""),
            ({"tokens": "ndarray"}, {"tokens": np.array([4, 5], np.uint16)}, ""),
            (
                {"tokens": "ndarray:uint16:1,2"},
                {"tokens": np.array([[4, 5]], np.uint16)},
                "a row of integ",
            ),
            (
                {"tokens": "ndarray:uint16"},
                {"tokens": np.array([[4, 5]], np.uint16)},
                "a row of integers",
            ),
            ({"tokens": "bytes"}, {"tokens": np.array([4, 5], np.int64).tobytes()}, ""),
        ]
    ):
        folder = write_stream(tmp_path / str(number), columns, [sample])
        tree = config({"a": {"local": str(folder)}}, "mdsmix") | {"max_seq_len": WIDTH}
        loader = build_loader(tree, 1, ids=RIGHT)
        if message:
            with pytest.raises(MdsmixError, match=message):
                print(number, [*loader])
        else:
            (batch,) = loader
            rules = loader.collate_fn.rules
            compare(batch, copy.deepcopy(loader.collate_fn)([make_training_row(sample, rules)]))
    assert not any(written)


def test_the_first_row_that_is_cut_gives_the_warning(tmp_path: Path, written: list[bool]) -> None:
    """Later ones are cut in the bytes of their batch, except those that a row refuses."""
    pairs: list[tuple[list[int], list[int]]] = [
        ([5], [6] * 30),
        ([5], [7] * 30),
        # Nothing to train on is left, since the prompt is cut to fewer tokens than are trained.
        ([5] * (WIDTH + 1), [6]),
        ([5] * WIDTH, [6]),
        ([5], [6] * WIDTH + [-7]),  # the negative id is not read by a row
    ]
    samples = [
        {k: np.array(v, np.int32) for k, v in zip(PAIR, pair, strict=True)} for pair in pairs
    ]
    samples.append({key: np.array([-7, 5], np.int32) for key in PAIR})
    columns = dict.fromkeys(PAIR, "ndarray:int32")
    folder = write_stream(tmp_path, columns, samples)
    policy = {"target_prompts": f"length>={WIDTH + 1}"}
    tree = config({"a": {"local": str(folder)}}, "finetuning", shuffle=False, **policy)
    loader = build_loader(tree | {"max_seq_len": WIDTH}, 1, ids=RIGHT)
    stored = [loader.dataset.read_sample(0, number) for number in range(6)]
    with pytest.warns(UserWarning, match="The loader cuts rows"):
        loader.collate_fn(stored[:1])
    assert written == []
    batch = loader.collate_fn(stored[1:2])
    assert batch["labels"].tolist() == [[-100] + [7] * (WIDTH - 1)]
    assert written == [True]
    for number in (2, 3):
        with pytest.raises(MdsmixError, match="nothing left to train on"):
            loader.collate_fn(stored[number : number + 1])
    batch = loader.collate_fn(stored[4:5])
    assert batch["labels"].tolist() == [[-100] + [6] * (WIDTH - 1)]
    assert written == [True]
    with pytest.raises(MdsmixError, match="contains the token id -7"):
        loader.collate_fn(stored[5:])


CHATS: list[Any] = [
    [{"input_ids": [5], "labels": [6, EOS]}, {"input_ids": [], "labels": [7]}],
    [{"input_ids": [5], "labels": []}, {"input_ids": [6], "labels": [7], "name": "x"}],
    [{"input_ids": [True], "labels": [7, -0]}],
    [{"input_ids": [5], "labels": [2**31]}],
    # Not read directly.
    [{"input_ids": [5] * 20, "labels": [6] * 20}],
    [{"input_ids": [5] * WIDTH, "labels": [6]}],
    [{"input_ids": [5], "labels": []}],
    [{"input_ids": [5], "labels": [6]}, {"input_ids": [7], "labels": []}],
    [{"input_ids": [5.0], "labels": [6]}],
    [{"input_ids": [5], "labels": [-6]}],
    [{"input_ids": [5], "labels": [2**32]}],
    [{"input_ids": [5], "labels": [2**70]}],
    [{"input_ids": [[5]], "labels": [6]}],
    [{"input_ids": "", "labels": [6]}],
    [{"input_ids": ["5"], "labels": [6]}],
    [{"input_ids": [5], "labels": [None]}],
    [{"input_ids": 5, "labels": [6]}],
    [{"input_ids": [5], "labels": {}}],
    [{"input_ids": [5], "labels": [6], "x": float("nan")}],
    [{"input_ids": [5]}],
    [[5], [6]],
    {"input_ids": [5], "labels": [6]},
    "turns",
    [],
    None,
    7,
]


@pytest.mark.filterwarnings("ignore:The loader cuts rows")
def test_chats_give_the_batch_or_the_error_of_a_row(tmp_path: Path, written: list[bool]) -> None:
    folder = write_stream(tmp_path, {"turns": "json"}, [{"turns": chat} for chat in CHATS])
    tree = config({"a": {"local": str(folder)}}, "finetuning") | {"max_seq_len": WIDTH}
    loader = build_loader(tree, 1, ids=RIGHT)
    make_batch = loader.collate_fn

    def describe(make: Any) -> Any:
        """Return the batch that `make` makes as lists, or the name of its error."""
        try:
            return {key: tensor.tolist() for key, tensor in make().items()}
        except Exception as error:
            return type(error).__name__

    outcomes = []
    for number, chat in enumerate(CHATS):
        stored = loader.dataset.read_sample(0, number)
        outcomes.append(describe(partial(make_batch, [stored])))
        row = partial(stored.decode, partial(make_training_row, rules=make_batch.rules))
        assert outcomes[-1] == describe(lambda row=row: make_batch([row()])), chat
    assert written == [True] * 4
    assert [outcomes.count(name) for name in ("MixRefused", "Unreachable")] == [13, 4]


def test_padding_that_the_dtype_of_the_ids_lacks_is_written(
    tmp_path: Path, written: list[bool]
) -> None:
    """Models add their padding token after the vocabulary that ids were stored for."""
    folder = write_stream(
        tmp_path,
        {"tokens": "ndarray:uint8"},
        [{"tokens": np.array([n, 4], np.uint8)} for n in (3, 5)],
    )
    tree = config({"a": {"local": str(folder)}}, "mdsmix", shuffle=False)
    (batch,) = build_loader(tree, 2, ids=TokenIds(eos=EOS, pad=300))
    assert batch["input_ids"].tolist() == [[3, 4] + [300] * 6, [5, 4] + [300] * 6]
    assert written == [False]


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_padding_token_of_a_text_is_not_trained(
    tmp_path: Path, written: list[bool], side: str
) -> None:
    folder = write_stream(
        tmp_path,
        {"tokens": "ndarray:uint16"},
        [{"tokens": np.array(ids, np.uint16)} for ids in ([3, PAD, 4], [5, 6])],
    )
    tree = config({"a": {"local": str(folder)}}, "mdsmix", shuffle=False)
    (batch,) = build_loader(tree, 2, ids=TokenIds(eos=EOS, pad=PAD, padding_side=side))
    tokens = slice(0, 3) if side == "right" else slice(5, 8)
    assert batch["labels"][0, tokens].tolist() == [3, -100, 4]
    assert [row[row != -100].tolist() for row in batch["labels"]] == [[3, 4], [5, 6]]
    assert written == [True]


def test_damaged_bytes_are_not_read_as_ids(tmp_path: Path) -> None:
    """Whatever a sample's bytes are, either they are not read or they are as they were written."""
    shard_folder = write(tmp_path / "packed", "packed", "uint16")
    tree = config({"a": {"local": str(shard_folder)}}, "mdsmix") | {"max_seq_len": WIDTH}
    loader = build_loader(tree, 1, ids=RIGHT)
    shard = loader.dataset.shards[0]
    columns = find_id_columns_of(shard)
    assert columns
    data = shard.get_sample_data(0)
    arrays = columns.read(data)
    assert arrays
    names = ("input_ids", "starts", "loss_mask", "loss_weights")
    assert columns.read_packed(data) == tuple(arrays.get(name, b"") for name in names)

    def measure(values: dict[str, bytes] | tuple[bytes, ...]) -> list[int]:
        pieces = values.values() if isinstance(values, dict) else values
        return sorted(len(piece) for piece in pieces if piece)

    for cut in range(len(data)):
        assert columns.read(data[:cut]) is None
        assert columns.read_packed(data[:cut]) is None
    assert columns.read(data + b"0") is None
    assert columns.read_packed(data + b"0") is None
    for position in range(12 + 2):  # the sizes of the columns, and the head of the first array
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            for read in (columns.read(bytes(damaged)), columns.read_packed(bytes(damaged))):
                assert read is None or measure(read) == measure(arrays), (position, bit)


def test_batches_belong_to_the_training_loop(tmp_path: Path) -> None:
    """They can be written to, and share no memory with each other or with the shard."""
    folder = write(tmp_path / "packed", "packed", "uint32")
    tree = config({"a": {"local": str(folder)}}, "mdsmix") | {"max_seq_len": WIDTH}
    loader = build_loader(tree, 5, ids=RIGHT, position_ids=True)
    batches = [*loader]
    untouched = copy.deepcopy(batches)
    tensors = [tensor for batch in batches for tensor in batch.values()]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "sample_in_epoch": 0})
    for batch, wanted in zip(loader, untouched, strict=True):
        compare(batch, wanted)


def test_each_row_has_the_number_of_its_stream(tmp_path: Path) -> None:
    folders = {name: write(tmp_path / name, name, "uint16") for name in ("pairs", "packed")}
    rows = {}
    for name in folders:
        streams = {name: {"local": str(folders[name])}}
        tree = config(streams, "mdsmix") | {"max_seq_len": WIDTH}
        batches = [*build_loader(tree, 5, ids=RIGHT)]
        rows[name] = {tuple(row) for batch in batches for row in batch["labels"].tolist()}
        del batches
    tree = config(
        {name: {"local": str(folder)} for name, folder in folders.items()}, "mdsmix", shuffle=True
    )
    counts = [0, 0]
    for batch in build_loader(tree | {"max_seq_len": WIDTH}, 5, ids=RIGHT, stream_ids=True):
        for row, stream in zip(batch["labels"].tolist(), batch["stream_id"].tolist(), strict=True):
            assert tuple(row) in rows[("pairs", "packed")[stream]]
            counts[stream] += 1
    assert counts == [30, 30]
