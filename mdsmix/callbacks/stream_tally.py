"""Counts per stream: samples, tokens, trained positions and the sum of their losses, of every
microbatch of a run on all ranks.

A microbatch is counted on its device, without waiting for the device. After a step the ranks add
their counts by one small all_reduce, so that every rank has the counts of all, and a checkpoint of
any rank is complete. Numbers are float64: whole numbers are exact up to 2^53, and the order of
additions is that of the steps, so a resumed run has the sums of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from mdsmix.callbacks.stream_figures import StreamCount
from mdsmix.errors import RecipeError
from mdsmix.load.collate import STREAM_ID, STREAM_SAMPLES
from mdsmix.shards.token_ids import IGNORED_LABEL

ROWS = ("samples", "tokens", "trained", "loss")
"The rows of a table of counts. Its columns are the streams."
MOST_LOGITS_CPU = 1 << 19
"""The most logits that are worked on at a time on a CPU: 2 MB, so that they stay in its cache. 67
million logits take 0.14 s of one core in such pieces, and 0.35 s in one piece.
"""
MOST_LOGITS = 1 << 25
"The same on an accelerator. A piece and one copy of it take at most 256 MB."


class StreamKeys(NamedTuple):
    """The keys that a loader with stream ids adds to a batch, taken out of it."""

    ids: torch.Tensor
    "int64 [rows] or [rows, n]: the number of a row's or of a token's stream; -1 for padding."
    samples: torch.Tensor | None
    """int64 [rows, streams]: how many samples of each stream a row was packed from; None if a row
    is one sample.
    """


def take_stream_keys(batch: MutableMapping[str, Any]) -> StreamKeys | None:
    """Remove the batch's keys that say from which streams its rows are, and return them. Return
    None if the batch has no such keys.
    """
    ids = batch.pop(STREAM_ID, None)
    samples = batch.pop(STREAM_SAMPLES, None)
    return None if ids is None else StreamKeys(ids, samples)


def find_logits(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the logits in what a model returned: [rows, n, vocabulary].

    Raises RecipeError if there are none, or if they have other rows or positions than the labels.

    Args:
        outputs: the logits, or a mapping or an object with `logits`, or a tuple that contains them.
        labels: int64 [rows, n].
    """
    logits = outputs
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        logits = outputs.logits
    elif isinstance(outputs, (tuple, list)):
        three = [o for o in outputs if isinstance(o, torch.Tensor) and o.dim() == 3]
        logits = next(iter(three), None)
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != labels.shape:
        what = f"{type(outputs).__name__} without logits"
        if isinstance(logits, torch.Tensor):
            what = f"logits of the shape {tuple(logits.shape)}"
        raise RecipeError(
            f"The model returned {what} for labels of the shape {tuple(labels.shape)}, so the "
            "losses of its streams cannot be computed: let the model return one row of logits for "
            "each position (no fused loss that keeps them), or set losses: false to count samples "
            "and tokens alone."
        )
    return logits


def compute_token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each position in nats, float32 [rows, n]; 0 where the target is
    ignored.

    The logits are worked on in pieces: a copy of all of them would double the largest tensor of a
    step.

    Args:
        logits: any float dtype [rows, n, vocabulary].
        targets: int64 [rows, n], the id that each position predicts; -100 where nothing is trained.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    flat_targets = targets.reshape(-1)
    losses = torch.zeros(flat_targets.shape, dtype=torch.float32, device=logits.device)
    on_cpu = logits.device.type == "cpu"
    piece = max(1, (MOST_LOGITS_CPU if on_cpu else MOST_LOGITS) // flat.shape[-1])
    for start in range(0, len(flat), piece):
        targets_of_piece = flat_targets[start : start + piece]
        # An accelerator would have to wait for the answer.
        if on_cpu and bool((targets_of_piece == IGNORED_LABEL).all()):
            continue
        losses[start : start + piece] = torch.nn.functional.cross_entropy(
            flat[start : start + piece].float(),
            targets_of_piece,
            ignore_index=IGNORED_LABEL,
            reduction="none",
        )
    return losses.view(targets.shape)


def _predicted(values: torch.Tensor, last: int) -> torch.Tensor:
    """Move each value to the position that predicts it: [rows, n]. The last position of a row
    predicts nothing, and gets `last`. The logits stay in place, since to cut off a position would
    copy all of them.
    """
    moved = torch.full_like(values, last)
    moved[:, :-1] = values[:, 1:]
    return moved


class StreamTally:
    """The counts of a run.

    `add` is called for each microbatch, and `commit` after the last one of a step. `discard` drops
    what was added since, for a step that is begun again with smaller microbatches.
    """

    def __init__(self, streams: Sequence[str], replication: int = 1, losses: bool = True) -> None:
        """Begin with counts of 0.

        Args:
            streams: the streams' names, in the order of their numbers.
            replication: ranks that receive the same rows; their counts are divided by it.
            losses: whether `add` gets the outputs of the model.
        """
        self.streams = tuple(streams)
        self.replication = replication
        self.losses = losses
        self.totals = torch.zeros(len(ROWS), len(streams), dtype=torch.float64)
        "float64 [ROWS, streams]: what all ranks have counted in whole steps."
        self.pending: torch.Tensor | None = None
        "The same of this rank, since the last whole step; on the device of its batches."
        self.gone: dict[str, StreamCount] = {}
        "What a checkpoint has counted of streams that the run no longer has."

    @torch.no_grad()
    def add(self, keys: StreamKeys, batch: Mapping[str, Any], outputs: Any = None) -> None:
        """Count a microbatch.

        Raises RecipeError if the model returned no logits, and if the batch has no labels.

        Args:
            keys: its streams, from `take_stream_keys`.
            batch: `labels`, `attention_mask` and so on, as `build_loader` makes them.
            outputs: what the model returned for it; not read without losses.
        """
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            raise RecipeError(
                "The batch that the model got has no labels, so what is trained on each stream is "
                "unknown. Trainer removes them if label_smoothing_factor or compute_loss_func is "
                "set: set neither, or leave the callback out."
            )
        is_seq2seq = "decoder_input_ids" in batch
        # Metal has no float64.
        home = torch.device("cpu") if labels.device.type == "mps" else labels.device
        ids = keys.ids.to(home)

        # Tokens of the rows.
        mask = batch.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(batch["input_ids"])
        tokens = mask.to(home).double()
        if is_seq2seq:
            decoder_tokens = batch["decoder_attention_mask"].to(home).sum(dim=1)
            tokens = tokens.sum(dim=1) + decoder_tokens

        # Positions that give a loss, and their losses. The logits of a position predict the next
        # one, except in a decoder of its own, whose input is shifted already.
        targets = labels
        ids_of_targets = ids
        if not is_seq2seq:
            targets = _predicted(labels, IGNORED_LABEL)
            ids_of_targets = ids if ids.dim() == 1 else _predicted(ids, -1)
        trained = (targets != IGNORED_LABEL).to(home).double()
        losses = torch.zeros_like(trained)
        if self.losses:
            logits = find_logits(outputs, labels)
            losses = compute_token_losses(logits, targets).to(home).double()

        # Sums per stream. A target belongs to the stream of its own position.
        if keys.samples is None:
            samples = self._sum(torch.ones_like(ids, dtype=torch.float64), ids)
        else:
            samples = keys.samples.to(home).sum(dim=0).double()
        added = torch.stack(
            [
                samples,
                self._sum(tokens, ids),
                self._sum(trained, ids_of_targets),
                self._sum(losses, ids_of_targets),
            ]
        )
        self.pending = added if self.pending is None else self.pending + added

    def _sum(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Add up the values of each stream: float64 [streams].

        Args:
            values: [rows] or [rows, n].
            ids: the stream of each row or value; -1 for none.
        """
        if ids.dim() == 1 and values.dim() == 2:
            values = values.sum(dim=1)
        # Padding has the number -1: it is summed into a column of its own, which is dropped.
        count = len(self.streams)
        columns = torch.where(ids < 0, count, ids).reshape(-1)
        sums = torch.zeros(count + 1, dtype=torch.float64, device=values.device)
        return sums.index_add_(0, columns, values.reshape(-1))[:count]

    def discard(self) -> None:
        """Drop what was added since the last `commit`."""
        self.pending = None

    def commit(self) -> None:
        """Add the counts of all ranks since the last `commit` to the totals. All ranks call it."""
        pending = self.pending
        self.pending = None
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if pending is None and is_alone:
            return
        if pending is None:  # this rank had no batch
            pending = torch.zeros_like(self.totals)
        if not is_alone:
            torch.distributed.all_reduce(pending)
        self.totals = self.totals.to(pending.device) + pending / self.replication

    def counts(self) -> dict[str, StreamCount]:
        """Return what was counted in whole steps, by the streams' names. It includes the counts of
        streams that an earlier part of the run had and this one does not have (`gone`).
        """
        counts = {}
        for name, column in zip(self.streams, self.totals.T.tolist(), strict=True):
            samples, tokens, trained, loss = column
            counts[name] = StreamCount(
                samples=round(samples), tokens=round(tokens), trained=round(trained), loss=loss
            )
        return counts | self.gone

    def restore(self, counts: Mapping[str, StreamCount]) -> None:
        """Continue from the counts of a checkpoint. Those of streams that the run no longer has are
        kept as they are.
        """
        columns = []
        for name in self.streams:
            count = counts.get(name, StreamCount())
            columns.append([getattr(count, row) for row in ROWS])
        self.totals = torch.tensor(columns, dtype=torch.float64).T.contiguous()
        self.gone = {name: count for name, count in counts.items() if name not in self.streams}
        self.pending = None
