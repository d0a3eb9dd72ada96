"""What an epoch draws is what Streaming draws, for every scheme of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming import Stream

from mdsmix.mix.draws import draws
from mdsmix.mix.epoch import epoch_of, epoch_table
from mdsmix.mix.resolve import mix_of
from mdsmix.table import Estimate, as_json, is_known
from tests.published import CONCAT, LENGTH, TOKEN_ROW, TURNS, TURNS_ROW, publish


def _cases() -> list[Any]:
    """Schemes x sizes x epoch sizes x seeds, odd on purpose: 3,000 cases that do not change."""
    rng = np.random.default_rng(3)
    cases = []
    for number in range(3000):
        n = int(rng.integers(1, 6))
        samples = [int(x) for x in rng.integers(1, 1000, n)]
        scheme = ("proportion", "repeat", "choose", "none", "mixed")[number % 5]
        weights = [_weight(scheme, rng) for _ in range(n)]
        epoch_size = int(rng.integers(1, 5000)) if rng.random() < 0.4 else None
        cases.append([weights, samples, epoch_size, int(rng.integers(0, 10000))])
    return cases


def _weight(scheme: str, rng: Any) -> dict[str, Any]:
    kind = ("repeat", "choose", "none", "proportion")[rng.integers(0, 4)]
    kind = kind if scheme == "mixed" else scheme
    if kind == "none":
        return {}
    return {kind: int(rng.integers(1, 50)) if kind == "choose" else round(rng.random() * 3, 3)}


def _ours(case: Any) -> list[int] | None:
    weights, samples, epoch_size, seed = case
    try:
        return draws(weights, samples, epoch_size, seed)
    except ValueError:
        return None


def _theirs(case: Any) -> list[int] | None:
    weights, samples, epoch_size, seed = case
    try:
        streams = [Stream(local="x", **weight) for weight in weights]
        Stream.apply_weights(streams, np.array(samples, np.int64), epoch_size, seed)
    except ValueError:
        return None
    return [int(stream.choose) for stream in streams]


def test_an_epoch_draws_what_streaming_draws() -> None:
    cases = _cases()
    theirs = [_theirs(case) for case in cases]
    assert 500 < sum(answer is None for answer in theirs) < 1500, (
        "both kinds of answer are compared"
    )
    assert [_ours(case) for case in cases] == theirs


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.01, 10)), min_size=1, max_size=6),
    st.integers(1, 10**7),
)
def test_proportions_fill_the_epoch_exactly(
    streams: list[tuple[int, float]], epoch_size: int
) -> None:
    drawn = draws([{"proportion": p} for _, p in streams], [n for n, _ in streams], epoch_size)
    total = sum(p for _, p in streams)
    assert sum(drawn) == epoch_size
    assert all(
        abs(n - epoch_size * p / total) < 1.001 for n, (_, p) in zip(drawn, streams, strict=True)
    )


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([{"repeat": 1, "choose": 1}], "refuses"),
        ([{"repeat": "1"}], "refuses"),
        ([{"repeat": -1}], "refuses"),
        ([{"proportion": 1}, {}], "refuses"),
        ([{"proportion": 0}], "sum to 0"),
    ],
)
def test_what_streaming_refuses_is_refused(weights: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draws(weights, [10] * len(weights))


def test_rounding_is_down() -> None:
    assert draws([{"repeat": 0.29}, {"repeat": 0.05}], [100, 10]) == [28, 0]


def test_shares_are_told_in_samples_and_in_tokens(tmp_path: Path) -> None:
    publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 30, card={})
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 30)
    streams = {
        "web": {"local": str(tmp_path / "web"), "split": "train", "repeat": 0.5},
        "chat": {"local": str(tmp_path / "chat"), "split": "train"},
    }
    section = {"name": "text", "dataset": {"streams": streams, "max_seq_len": LENGTH}}
    epoch = epoch_of(mix_of({"train_loader": section}, "x").train)
    web, chat = epoch
    assert (web.samples, web.drawn, web.tokens) == (30, 15, 15 * LENGTH)
    assert (chat.drawn, chat.tokens) == (30, 30 * 4)
    assert [isinstance(each.tokens, Estimate) for each in epoch] == [False, True]
    rows = as_json(epoch_table(epoch))["rows"]
    assert (rows[0]["share_of_samples"], rows[0]["share_of_tokens"]) == (pytest.approx(1 / 3), 0.5)


def test_where_one_streams_tokens_are_not_known_no_share_of_them_is(tmp_path: Path) -> None:
    publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 30, card={})
    publish(tmp_path / "raw", {"text": "str"}, [{"text": "a b"}] * 10)
    streams = {name: {"local": str(tmp_path / name), "split": "train"} for name in ("web", "raw")}
    section = {"name": "text", "dataset": {"streams": streams, "max_seq_len": LENGTH}}
    epoch = epoch_of(mix_of({"train_loader": section}, "x").train)
    web, raw = epoch
    assert (raw.drawn, is_known(raw.tokens), web.tokens) == (10, False, 30 * LENGTH)
    rows = as_json(epoch_table(epoch))["rows"]
    assert [row["share_of_tokens"] for row in rows] == [None, None]
    assert rows[1]["share_of_samples"] == 0.25
