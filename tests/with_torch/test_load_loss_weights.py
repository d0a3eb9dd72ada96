"""Batches have the loss weights of rows, next to their labels: 0 where nothing is trained, and 1
for the trained labels of streams without weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from mdsmix.errors import MixRefused
from mdsmix.load import build_loader
from tests.with_torch.load_streams import EOS, IDS, PAIR, config, write_stream

TURN = {"input_ids": [10, 11], "labels": [20, 21]}
LATER = {"input_ids": [12], "labels": [22]}
TURNS = {"turns": "json", "loss_weights": "ndarray:float32"}
PACKED = {
    "input_ids": "ndarray:uint16",
    "loss_mask": "ndarray:uint8",
    "loss_weights": "ndarray:float32",
    "starts": "ndarray:int32",
}


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


WEIGHTED = {"turns": [TURN, LATER], "loss_weights": floats(0, 0, 0.5, 0.25, 0, 2)}
PACKED_ROW = {
    "input_ids": np.array([10, 11, 12, 13, 14], np.uint16),
    "loss_mask": np.array([0, 1, 1, 1, 1], np.uint8),
    "loss_weights": floats(0, 0.5, 1, 0.75, 0.25),
    "starts": np.array([0, 3], np.int32),
}
PLAIN = {"input_ids": np.array([10], np.uint16), "labels": np.array([20, 21], np.uint16)}


@pytest.fixture
def streams(tmp_path: Path) -> dict[str, dict[str, str]]:
    write_stream(tmp_path / "turns", TURNS, [WEIGHTED] * 2)
    write_stream(tmp_path / "packed", PACKED, [PACKED_ROW] * 2)
    write_stream(tmp_path / "plain", PAIR, [PLAIN] * 2)
    names = ("turns", "packed", "plain")
    return {name: {"local": str(tmp_path / name)} for name in names}


def batch_of(streams: Any, batch: int = 2, **dataset: Any) -> dict[str, torch.Tensor]:
    """Return the only batch of an unshuffled loader."""
    settings = {"shuffle": False, "num_workers": 0, "target_responses": "all"} | dataset
    (made,) = build_loader(config(streams, "mdsmix", **settings), batch, ids=IDS)
    return made


def only(streams: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: streams[name]}


def test_weights_are_at_the_positions_of_the_labels(streams: Any) -> None:
    turns = batch_of(only(streams, "turns"))
    assert turns["loss_weights"].dtype == torch.float32
    # The EOS that is appended has the weight of the token before it.
    assert turns["input_ids"][0].tolist()[:7] == [10, 11, 20, 21, 12, 22, EOS]
    assert turns["loss_weights"][0].tolist() == [0, 0, 0.5, 0.25, 0, 2, 2, 0]
    packed = batch_of(only(streams, "packed"))
    # Nothing predicts the first token of a document.
    assert packed["labels"][0].tolist()[:5] == [-100, 11, 12, -100, 14]
    assert packed["loss_weights"][0].tolist() == [0, 0.5, 1, 0, 0.25, 0, 0, 0]


def test_the_target_policy_decides_what_is_trained(streams: Any) -> None:
    last = batch_of(only(streams, "turns"), target_responses="last")
    assert last["loss_weights"][0].tolist() == [0, 0, 0, 0, 0, 2, 2, 0]


def test_streams_without_weights_have_the_weight_1(streams: Any) -> None:
    mixed = batch_of(streams, 6)
    for labels, weights in zip(mixed["labels"], mixed["loss_weights"], strict=True):
        assert torch.equal(weights > 0, labels != -100)
    plain = [
        weights.tolist()
        for ids, weights in zip(mixed["input_ids"], mixed["loss_weights"], strict=True)
        if ids[1] == 20
    ]
    assert plain == [[0, 1, 1, 1, 0, 0, 0, 0]] * 2
    assert "loss_weights" not in batch_of(only(streams, "plain"))


def test_padding_on_the_left_and_cut_rows(streams: Any) -> None:
    settings = config(only(streams, "turns"), "mdsmix", shuffle=False, num_workers=0)
    settings["train_loader"]["dataset"]["target_responses"] = "all"
    left = type(IDS)(eos=IDS.eos, pad=IDS.pad, padding_side="left")
    (batch,) = build_loader(settings, 2, ids=left)
    assert batch["loss_weights"][0].tolist() == [0, 0, 0, 0.5, 0.25, 0, 2, 2]
    settings["train_loader"]["dataset"]["max_seq_len"] = 4
    with pytest.warns(UserWarning, match="cuts rows"):
        (batch,) = build_loader(settings, 2, ids=IDS)
    assert batch["loss_weights"][0].tolist() == [0, 0, 0.5, 0.25]


@pytest.mark.filterwarnings("ignore:The loader cuts rows")
@pytest.mark.parametrize(("prompt", "response"), [(1, 9), (5, 4), (5, 11)])
def test_a_pair_that_is_cut_keeps_its_first_weights(
    tmp_path: Path, prompt: int, response: int
) -> None:
    ids = np.arange(10, 10 + prompt + response, dtype=np.uint16)
    weights = np.arange(1, 1 + prompt + response, dtype=np.float32)
    pair = {"input_ids": ids[:prompt], "labels": ids[prompt:], "loss_weights": weights}
    write_stream(tmp_path, PAIR | {"loss_weights": "ndarray:float32"}, [pair])
    batch = batch_of({"pairs": {"local": str(tmp_path)}}, 1)
    assert batch["input_ids"][0].tolist() == ids[:8].tolist()
    untrained = [0] * prompt
    assert batch["loss_weights"][0].tolist() == [*untrained, *weights[prompt:8]]


def test_rows_that_the_loader_packs_keep_their_weights(streams: Any) -> None:
    both = {name: streams[name] for name in ("turns", "plain")}
    batch = batch_of(both, 2, packing_ratio=2.0, max_seq_len=16)
    seen = set[tuple[int, float, float]]()
    for ids, labels, weights in zip(
        batch["input_ids"], batch["labels"], batch["loss_weights"], strict=True
    ):
        assert torch.equal(weights > 0, labels != -100)
        for position in (ids == 20).nonzero().flatten().tolist():
            first, second = weights[position : position + 2].tolist()
            seen.add((int(ids[position - 1]), first, second))
    assert seen == {(11, 0.5, 0.25), (10, 1.0, 1.0)}


def test_wrong_weights_and_encoder_decoders_are_refused(tmp_path: Path, streams: Any) -> None:
    short = WEIGHTED | {"loss_weights": floats(0, 1, 1)}
    write_stream(tmp_path / "short", TURNS, [short] * 2)
    with pytest.raises(MixRefused, match="loss_weights of this row has 3 values for 7 tokens"):
        batch_of({"short": {"local": str(tmp_path / "short")}})
    with pytest.raises(MixRefused, match="loss weights, which rows of an encoder-decoder"):
        batch_of(only(streams, "turns"), decoder_only_format=False, target_responses="last")


def weighted_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of docs/loading.md."""
    labels = batch["labels"][:, 1:]
    weights = batch["loss_weights"][:, 1:]
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    return (losses * weights).sum() / weights.sum()


def test_a_weighted_loss_with_the_weight_1_is_the_loss(streams: Any) -> None:
    batch = batch_of(streams, 6)
    torch.manual_seed(0)
    logits = torch.randn(*batch["labels"].shape, 32)
    ones = batch | {"loss_weights": (batch["labels"] != -100).float()}
    plain = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert torch.allclose(weighted_loss(logits, ones), plain)
    assert not torch.allclose(weighted_loss(logits, batch), plain)
    # By hand: each trained label counts its own loss times its weight.
    total, divisor = 0.0, 0.0
    log_probabilities = logits.log_softmax(-1)
    for row, (labels, weights) in enumerate(
        zip(batch["labels"].tolist(), batch["loss_weights"].tolist(), strict=True)
    ):
        for position in range(1, len(labels)):
            if labels[position] != -100:
                loss = -log_probabilities[row, position - 1, labels[position]].item()
                total += weights[position] * loss
                divisor += weights[position]
    assert weighted_loss(logits, batch).item() == pytest.approx(total / divisor, rel=1e-5)
