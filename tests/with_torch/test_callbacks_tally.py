"""The counts of streams equal those of a loop over single tokens, whatever the size of the pieces
of logits is; and the stream ids of a loader are those of the rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mdsmix.callbacks import stream_tally
from mdsmix.callbacks.stream_figures import StreamCount
from mdsmix.callbacks.stream_tally import StreamKeys, StreamTally, find_logits, take_stream_keys
from mdsmix.errors import RecipeError
from mdsmix.load import build_loader
from tests.with_torch.load_streams import IDS, PAIR, config, pair, write_stream, write_tokens

pytestmark = pytest.mark.usefixtures("_release_loaders")
ROWS, LENGTH, IDS_KNOWN = 5, 12, 17
NAMES = ("a", "b", "c")


def make_batch(is_seq2seq: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a batch with padding and untrained positions, and the logits of a model."""
    torch.manual_seed(5)
    ids = torch.randint(0, IDS_KNOWN, (ROWS, LENGTH))
    mask = (torch.arange(LENGTH) < torch.tensor([[12], [5], [1], [9], [12]])).long()
    labels = ids.masked_fill((mask == 0) | (ids % 3 == 0), -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if is_seq2seq:
        batch["decoder_input_ids"] = ids
        batch["decoder_attention_mask"] = labels != -100
    return batch, torch.randn(ROWS, LENGTH, IDS_KNOWN) * 3


def count_by_loop(batch: Any, logits: torch.Tensor, stream_at: Any, first: int) -> list[Any]:
    """Count each stream token by token: tokens, trained positions, sum of losses.

    Args:
        stream_at: (row, position) -> number of the stream.
        first: positions from a label to the logits that predict it, backwards.
    """
    totals = [[0, 0, 0.0] for _ in NAMES]
    for row in range(ROWS):
        for place in range(LENGTH):
            label = int(batch["labels"][row, place])
            if batch["attention_mask"][row, place]:
                totals[stream_at(row, place)][0] += 1
            if "decoder_attention_mask" in batch:
                totals[stream_at(row, place)][0] += int(label != -100)
            if label == -100 or place < first:
                continue
            scores = [math.exp(score) for score in logits[row, place - first].tolist()]
            totals[stream_at(row, place)][1] += 1
            totals[stream_at(row, place)][2] -= math.log(scores[label] / sum(scores))
    return totals


@pytest.mark.parametrize("logits_at_a_time", [1, 40, 1 << 19])
@pytest.mark.parametrize("form", ["rows", "packed", "encoder-decoder"])
def test_counts_equal_a_loop_over_tokens(
    monkeypatch: pytest.MonkeyPatch, form: str, logits_at_a_time: int
) -> None:
    monkeypatch.setattr(stream_tally, "MOST_LOGITS_CPU", logits_at_a_time)
    batch, logits = make_batch(form == "encoder-decoder")
    of_rows = torch.tensor([2, 0, 2, 1, 0])
    samples = None
    ids = of_rows
    if form == "packed":
        # The stream changes within a row, and padding has none.
        ids = (of_rows[:, None] + torch.arange(LENGTH) // 4) % 3
        ids = ids.masked_fill(batch["attention_mask"] == 0, -1)
        samples = torch.tensor([[1, 1, 1], [0, 2, 0], [0, 0, 1], [1, 1, 1], [1, 4, 1]])

    def stream_at(row: int, place: int) -> int:
        return int(ids[row]) if ids.dim() == 1 else int(ids[row, place])

    tally = StreamTally(NAMES)
    outputs = SimpleNamespace(logits=logits)
    tally.add(StreamKeys(ids, samples), batch, outputs)
    tally.discard()
    for start in (0, 3):  # two microbatches
        rows = slice(start, start + 3)
        cut = {key: value[rows] for key, value in batch.items()}
        part = None if samples is None else samples[rows]
        tally.add(StreamKeys(ids[rows], part), cut, {"logits": logits[rows]})
    tally.commit()
    expected = count_by_loop(batch, logits, stream_at, int(form != "encoder-decoder"))
    counted = [3, 8, 4] if form == "packed" else [2, 1, 2]
    for name, number, (tokens, trained, loss) in zip(NAMES, counted, expected, strict=True):
        count = tally.counts()[name]
        assert (count.samples, count.tokens, count.trained) == (number, tokens, trained), name
        assert count.loss == pytest.approx(loss, rel=1e-5), name


def test_counts_add_up_and_are_restored_by_name() -> None:
    batch, logits = make_batch(False)
    keys = StreamKeys(torch.tensor([0, 1, 2, 0, 1]), None)
    tally = StreamTally(NAMES, replication=2)
    for _ in range(4):
        tally.add(keys, batch, logits)
        tally.commit()
    counts = tally.counts()
    assert [count.samples for count in counts.values()] == [4, 4, 2], "two ranks have each row"
    other = StreamTally(("c", "new"))
    other.restore(counts)
    assert other.counts() == {
        "c": counts["c"],
        "new": StreamCount(),
        "a": counts["a"],
        "b": counts["b"],
    }
    other.add(StreamKeys(torch.tensor([0, 0, 1, 1, 1]), None), batch, logits)
    other.commit()
    assert other.counts()["c"].samples == 4
    assert other.counts()["new"].samples == 3
    assert other.counts()["a"] == counts["a"]
    alone = StreamTally(NAMES, losses=False)
    alone.add(keys, batch)
    alone.commit()
    assert alone.counts()["a"].loss == 0
    assert alone.counts()["a"].trained > 0


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"loss": 1}, "dict without logits"),
        (SimpleNamespace(logits=None), "SimpleNamespace without logits"),
        ((torch.zeros(()),), "tuple without logits"),
        (torch.zeros(2, 7, 3), r"shape \(2, 7, 3\)"),
    ],
)
def test_outputs_without_logits_are_refused(outputs: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        find_logits(outputs, torch.zeros(2, 8))
    logits = torch.zeros(2, 8, 3)
    assert find_logits((torch.zeros(()), logits), torch.zeros(2, 8)) is logits


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_the_stream_of_each_row(tmp_path: Path, workers: int) -> None:
    """Also after it was read without stream ids, whose workers are still there."""
    chats = [{key: ids + 1000 for key, ids in pair(n).items()} for n in range(15)]
    mixed = {
        "web": {"local": str(write_tokens(tmp_path / "web", 20))},
        "chat": {"local": str(write_stream(tmp_path / "chat", PAIR, chats))},
    }
    keys = {"shuffle": True, "drop_last": False, "num_workers": workers}
    if workers:
        keys |= {"persistent_workers": True, "prefetch_factor": 2}
    loader = build_loader(config(mixed, "mdsmix", **keys), 4, ids=IDS)
    assert all(take_stream_keys(batch) is None for batch in loader)
    loader.add_stream_ids()
    counts = [0, 0]
    for batch in loader:
        taken = take_stream_keys(batch)
        assert taken is not None
        assert taken.samples is None
        assert taken.ids.dtype == torch.int64
        assert {"stream_id", "stream_samples"}.isdisjoint(batch)
        is_chat = (batch["input_ids"] >= 1000).any(dim=1).long()
        assert taken.ids.tolist() == is_chat.tolist()
        for stream in taken.ids.tolist():
            counts[stream] += 1
    assert counts == [20, 15]
