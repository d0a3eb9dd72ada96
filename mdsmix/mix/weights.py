"""What an epoch comes to: the samples and tokens that each stream gives, exactly as Streaming computes them.

Weights count samples, never tokens: `proportion: 0.5` for short chats beside 2,048-token rows is far from half of the
tokens, so both shares are shown. Source: Stream.apply_weights in streaming/base/stream.py, 0.12 and 0.13 alike. What
the weights draw is not yet what training sees: `delivered.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdsmix.mix.delivered import METHODS, Devices, delivered
from mdsmix.mix.first_samples import per_sample
from mdsmix.mix.streams import Loader
from mdsmix.table import Column, Estimate, Table
from mdsmix.training.keys import COUNT_UNITS, in_units, is_number, whole

SHUFFLE_SEED = 9176
"Streaming's default; it decides which streams get the samples that rounding leaves over."
LARGEST_BATCH = 1 << 40
"No data set fills it; above it, sums of floats would not hold."


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One stream's part of an epoch."""

    stream: str
    samples: int
    "In the stream."
    drawn: int
    "Samples an epoch, by its weight."
    delivered: int
    "Samples an epoch that reach the training loop: all that are drawn, unless the batching method drops some."
    share: float
    "Of the epoch's samples that are delivered, 0 to 1."
    tokens: float | None
    "Tokens an epoch; None where the loader itself tokenizes."
    tokens_share: float | None
    "Of the epoch's tokens; None where a stream's are unknown."
    is_exact: bool
    "Tokens were counted, not taken from the first samples."


def draws(
    weights: Sequence[Mapping[str, Any]],
    samples: Sequence[int],
    epoch_size: int | None = None,
    seed: int = SHUFFLE_SEED,
) -> list[int]:
    """Samples that an epoch draws from each stream; ValueError where Streaming refuses the weights."""
    schemes = [next(iter(w), None) for w in weights]
    if any(len(w) > 1 for w in weights):
        raise ValueError("a stream has more than one of repeat, proportion and choose")
    if any(not is_number(v) or v < 0 for w in weights for v in w.values()):
        raise ValueError("a weight is not a number of at least 0")
    if len({s == "proportion" for s in schemes}) > 1:
        raise ValueError("proportion stands beside other weights")
    if schemes and schemes[0] == "proportion":
        shares = [float(w["proportion"]) for w in weights]
        return _relative(shares, epoch_size or sum(samples), seed)
    if epoch_size and not any(schemes):
        return _relative([float(n) for n in samples], epoch_size, seed)
    if epoch_size:
        raise ValueError("epoch_size stands beside repeat or choose")
    return [_absolute(w, n) for w, n in zip(weights, samples, strict=True)]


def _absolute(weight: Mapping[str, Any], samples: int) -> int:
    if "repeat" in weight:
        return int(weight["repeat"] * samples)
    return int(weight.get("choose", samples))


def _relative(shares: Sequence[float], total: int, seed: int) -> list[int]:
    """Rounded down; what is left over goes to streams drawn at random, one sample each."""
    if not sum(shares) > 0:
        raise ValueError("the proportions sum to 0")
    parts = np.array(shares, np.float64)
    parts /= parts.sum()
    chosen = (total * parts).astype(np.int64)
    left = int(total - chosen.sum())
    chosen[np.random.default_rng(seed).choice(len(shares), left, False)] += 1
    return [int(n) for n in chosen]


def parts(
    weights: Sequence[Mapping[str, Any]], samples: Sequence[int], epoch_size: int | None = None
) -> list[float]:
    """The streams' parts of an epoch, unrounded: those of a stratified batch. Of weights that Streaming takes."""
    if "proportion" in weights[0]:
        exact = np.array([float(w["proportion"]) for w in weights], np.float64)
    elif epoch_size:
        exact = np.array(samples, np.float64)
    else:
        exact = np.array(
            [_absolute(w, n) for w, n in zip(weights, samples, strict=True)], np.float64
        )
    return [float(part) for part in exact / max(1e-300, exact.sum())]


def epoch_size(loader: Loader) -> int | None:
    """The epoch size that the YAML sets; 0 and null are none."""
    value = loader.dataset.get("epoch_size")
    return in_units(value, COUNT_UNITS) if value else None


def draws_of(loader: Loader) -> list[int] | None:
    """Samples an epoch draws from each stream, None where Streaming refuses the weights (checks say why)."""
    seed = loader.dataset.get("shuffle_seed", SHUFFLE_SEED)
    if not isinstance(seed, int) or seed < 0:
        return None
    weights = [stream.weight for stream in loader.streams]
    try:
        return draws(weights, [s.index.samples for s in loader.streams], epoch_size(loader), seed)
    except ValueError:
        return None


def batching(loader: Loader) -> str:
    return str(loader.dataset.get("batching_method") or "random")


def devices_of(loader: Loader, batch: int | None) -> Devices | None:
    """One device that draws the whole global batch; None where the batch, or what is packed into it, is not known."""
    ratio = loader.dataset.get("packing_ratio") or 1
    if not batch or batch < 1 or not is_number(ratio) or ratio < 1:
        return None
    canonical = max(0, whole(loader.dataset.get("num_canonical_nodes")) or 0)
    if not canonical and loader.dataset.get("shuffle_algo") in ("py1s", "py2s"):
        canonical = 64
    return Devices(
        batch=int(min(batch * ratio, LARGEST_BATCH)),
        canonical_nodes=canonical or None,
        is_shuffled=bool(loader.dataset.get("shuffle")),
    )


def delivered_of(loader: Loader, batch: int | None) -> list[int] | None:
    """Samples of each stream that an epoch delivers in global batches of this size; None where that is not known.

    Where one is 0, Streaming cannot put its batches together and the epoch fails.
    """
    drawn, devices = draws_of(loader), devices_of(loader, batch)
    if not drawn or batching(loader) not in METHODS:
        return drawn
    if devices is None or not sum(drawn):
        return None
    weights, samples = zip(*((s.weight, s.index.samples) for s in loader.streams), strict=True)
    return delivered(batching(loader), drawn, parts(weights, samples, epoch_size(loader)), devices)


def shares_of(loader: Loader, batch: int | None = None) -> list[Share]:
    """What an epoch of the loader comes to, one Share a stream; empty where Streaming refuses the weights.

    `batch`: samples that all devices draw together at a time. Without it, nothing is taken to be dropped.
    """
    drawn = draws_of(loader) or []
    came = delivered_of(loader, batch) or drawn
    means = [per_sample(stream, loader) for stream, _ in zip(loader.streams, drawn, strict=False)]
    tokens = [None if m is None else m.tokens * n for m, n in zip(means, came, strict=True)]
    total = None if None in tokens else sum(t or 0.0 for t in tokens)
    return [
        Share(
            stream=stream.name,
            samples=stream.index.samples,
            drawn=drawn[i],
            delivered=came[i],
            share=came[i] / max(1, sum(came)),
            tokens=count,
            tokens_share=None if total is None or count is None else count / max(1.0, total),
            is_exact=mean is not None and mean.is_exact,
        )
        for i, (stream, mean, count) in enumerate(zip(loader.streams, means, tokens, strict=False))
    ]


EPOCH = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("an epoch", key="delivered"),
    Column("share", "share", key="share_of_samples"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
)


def epoch_table(shares: Sequence[Share]) -> Table:
    """A row a stream, and the sum."""
    rows = [
        (s.stream, s.samples, s.delivered, s.share, _figure(s.tokens, s.is_exact), s.tokens_share)
        for s in shares
    ]
    tokens = None if any(s.tokens is None for s in shares) else sum(s.tokens or 0 for s in shares)
    figure = _figure(tokens, all(s.is_exact for s in shares))
    total = (sum(s.samples for s in shares), sum(s.delivered for s in shares), 1.0, figure)
    return Table(columns=EPOCH, rows=rows, total=("all", *total, 1.0 if tokens else None))


def _figure(tokens: float | None, is_exact: bool) -> float | None:
    return tokens if tokens is None or is_exact else Estimate(tokens)
