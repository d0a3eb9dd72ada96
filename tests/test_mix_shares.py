"""Shares become whole samples as exact fractions say, by largest remainder; of published streams
they are rendered as `choose`, shown with what they come to, and refused in one sentence where they
cannot be.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.errors import MixRefused
from mdsmix.mix.check import run_checks
from mdsmix.mix.epoch.apportion import (
    Shares,
    StreamShare,
    compute_ideal_samples,
    round_to_whole,
    set_asked_shares,
)
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.recipe.amounts import Budget
from mdsmix.tokenizer import card as pretrained
from tests import published as hand
from tests.converting import done, mdsmix
from tests.published import CARD, LENGTH, SPLIT, TURNS, publish

PARTS = st.lists(st.fractions(0, 10**6, max_denominator=10**4), min_size=1, max_size=8)
FEW, HALF = settings(max_examples=25), Fraction(1, 2)


def stream(samples: int, mean: Fraction, trained: Fraction, share: Fraction | None) -> StreamShare:
    counts = {"samples": samples, "counted": mean, "budgeted": mean * trained}
    return StreamShare(stream="", is_exact=True, written=share, **counts)


STREAMS = st.builds(
    stream,
    st.integers(1, 10**6),
    st.fractions(1, 4096, max_denominator=1000),
    st.fractions(Fraction(1, 100), 1, max_denominator=100),
    st.fractions(Fraction(1, 1000), 5, max_denominator=1000),
)
"A stream of 1 to 10^6 samples of 1 to 4,096 tokens on average, with a share."
MIXES = st.lists(STREAMS, min_size=1, max_size=5).map(
    lambda parts: set_asked_shares([replace(part, stream=f"s{i}") for i, part in enumerate(parts)])
)
AMOUNTS = st.fractions(1, 10**12, max_denominator=100)


@FEW
@given(PARTS)
def test_rounding_is_by_largest_remainder(ideal: list[Fraction]) -> None:
    whole = round_to_whole(ideal)
    assert abs(sum(whole) - sum(ideal)) <= HALF
    remainders: dict[int, list[Fraction]] = {0: [], 1: []}
    for n, exact in zip(whole, ideal, strict=True):
        remainders[n - math.floor(exact)].append(exact - math.floor(exact))
    assert min(remainders[1], default=1) >= max(remainders[0], default=0)


def test_of_equal_remainders_the_first_is_rounded_up_and_an_absolute_count_for_itself() -> None:
    assert round_to_whole([HALF, HALF]) == [1, 0]
    assert round_to_whole([HALF]) == round_to_whole([HALF], is_absolute=True) == [1]
    assert round_to_whole([Fraction(1, 3)] * 3, is_absolute=True) == [0, 0, 0]


@FEW
@given(MIXES, AMOUNTS)
def test_an_epoch_of_a_budget_holds_it_in_the_shares_asked(parts: Shares, budget: Fraction) -> None:
    ideal = compute_ideal_samples(parts, Budget(amount=budget, unit="tokens"))
    assert sum(part.asked for part in parts) == 1
    assert sum(n * part.budgeted for n, part in zip(ideal, parts, strict=True)) == budget
    held = [n * part.counted for n, part in zip(ideal, parts, strict=True)]
    assert [each / sum(held) for each in held] == [part.asked for part in parts]
    assert all(abs(n - x) < 1 for n, x in zip(round_to_whole(ideal), ideal, strict=True))


@FEW
@given(MIXES, st.integers(1, 20))
def test_temperature_flattens_and_keeps_the_order(found: Shares, degrees: int) -> None:
    parts = set_asked_shares([replace(part, written=None) for part in found], Fraction(degrees))
    assert abs(float(sum(part.asked for part in parts) - 1)) < 1e-30
    largest = max(parts, key=lambda part: part.size)
    for one in parts:
        expected = float(largest.size / one.size) ** (1 / degrees)
        assert float(largest.asked / one.asked) == pytest.approx(expected, rel=1e-9)
        assert degrees > 1 or one.asked == one.size / sum(part.size for part in parts)


def test_what_written_shares_leave_goes_by_size_to_the_others() -> None:
    def shares(*written: Fraction | None) -> list[Fraction]:
        sizes = zip((10, 30, 5), written, strict=True)
        return [
            p.asked
            for p in set_asked_shares([stream(n, Fraction(2), Fraction(1), w) for n, w in sizes])
        ]

    zero = Fraction(0)
    assert shares(None, None, Fraction(3, 5)) == [Fraction(n, 10) for n in (1, 3, 6)]
    assert shares(zero, Fraction(7), zero) == [0, 1, 0]
    assert not any(shares(zero, zero, zero))


TALK = [{"turns": [{"input_ids": [5], "labels": [7] * n + [0]}]} for n in (1, 2, 3, 4)]
"Chats of 3, 4, 5 and 6 tokens, of which 2, 3, 4 and 5 are trained."
HALVES = {"web": {"share": "50%"}, "chat": {"share": 0.5}}
TENTH = {"web": {"share": "10%"}, "chat": {"share": "5%"}}
UNKNOWN = {"docs": {"share": 0.5}}


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "open_tokenizer", lambda spec: hand.TOKENIZER)


def totals(times: int, **other: int) -> dict[str, Any]:
    """Of the four chats, so many times."""
    counts = {"tokens": 18 * times, "loss_tokens": 14 * times, "longest": 6} | other
    return {"totals": {"lengths": {"2^1": times, "2^2": 3 * times}} | counts}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """web: 4,000 rows of 8 tokens; chat: 4,000 of 4.5 on average; docs: 2,000 pairs of 4, made by
    others.
    """
    home = tmp_path_factory.mktemp("published")
    counted = {"totals": {"loss_tokens": 28000}}
    publish(home / "web", SPLIT, [hand.SPLIT_ROW] * 4000, card=counted)
    publish(home / "chat", TURNS, TALK * 1000, card=totals(1000))
    publish(home / "docs", hand.PAIR, [hand.PAIR_ROW] * 2000)
    return home


def write(home: Path, *streams: str, **keys: Any) -> str:
    named = streams or ("web", "chat")
    return str(hand.write_mix(home, *named, **{"train_loader": {"num_workers": 0}} | keys))


def chosen(path: str, may_estimate: bool = False) -> dict[str, int]:
    mix = resolve_mix([path], may_estimate)
    assert [s.weight for s in mix.train.streams] == [{"choose": p.choose} for p in mix.shares.parts]
    held = [part.choose * part.counted for part in mix.shares.parts]
    reached = [part.reached for part in mix.shares.parts]
    assert mix.shares.is_absolute or reached == [each / sum(held) for each in held]
    return {part.stream: part.choose for part in mix.shares.parts}


COUNTS: tuple[tuple[dict[str, Any], int, int], ...] = (
    ({"budget": "36k tokens"}, 2250, 4000),
    ({"budget": "144,000 tokens"}, 9000, 16000),  # the largest: see REFUSED
    ({"budget": "28k loss_tokens"}, 2000, 4000),
    ({"budget": "36k tokens", "count": "samples"}, 2880, 2880),
    ({"budget": "1 pass of chat"}, 2250, 4000),
    ({"budget": "1 pass of chat", "count": "loss_tokens"}, 2000, 4000),
    ({"budget": "1.5 passes of web"}, 6000, 10667), ({}, 2250, 4000),
    ({"max_repeat": 0.5}, 1125, 2000), ({"mix": {}, "budget": "50k tokens"}, 4000, 4000),
    ({"mix": {"chat": {"share": "36%"}}}, 4000, 4000), ({"mix": {"chat": {"share": 0}}}, 4000, 0),
    ({"mix": TENTH, "absolute": True, "budget": "100k tokens"}, 1250, 1111),
)  # fmt: skip


def test_shares_become_the_counts_worked_by_hand(home: Path) -> None:
    for keys, web, chat in COUNTS:
        path = write(home, **{"mix": HALVES} | keys)
        assert chosen(path) == {"web": web, "chat": chat}, keys
    shorter = write(home, "web", mix={}, budget="1 pass of web", max_seq_len=LENGTH // 2)
    assert chosen(shorter) == {"web": 4000}, "rows of one length are counted at any"
    meant = resolve_mix([write(home, mix={"chat": {"share": 0}})])
    assert not [f for f in run_checks(meant) if f.id == "weights-off"]


def test_the_shares_are_rendered_shown_and_told(home: Path) -> None:
    path = write(home, mix=HALVES, budget="36k tokens")
    text = mdsmix("render-yaml", path).out
    streams = yaml.safe_load(text)["train_loader"]["dataset"]["streams"]
    assert {n: s["choose"] for n, s in streams.items()} == {"web": 2250, "chat": 4000}
    assert "# mdsmix: shares of an epoch's tokens; budget: 36,000 tokens" in text
    seen = "web 4,000 2,250 0.56 50.00% 50.00%"
    for shown, margin in ((done("check", path).out, ""), (text, "# mdsmix: ")):
        assert margin + seen in " ".join(shown.split())
    told = orjson.loads(mdsmix("check", path, "--json").out)["shares"]
    assert (told["count"], told["budget"], told["is_exact"]) == ("tokens", "36,000 tokens", True)
    counts = {"samples": 4000, "choose": 4000, "passes": 1.0, "asked": 0.5, "reached": 0.5}
    assert told["rows"][1] == {"stream": "chat"} | counts


UNCOUNTED = "were not counted (it has no manifest, or one that is of another index, another max_seq_len, other targets, or a padding token that is not EOS), and"
REFUSED = {
    "web chat | budget=1M tokens": "the share of chat, 50% under a budget of 1,000,000 tokens, comes to 500,000 tokens, and the stream has 18,000: 27.78 passes an epoch exceed max_repeat: 4. The largest budget that fits is 144,000 tokens;",
    "web chat | budget=144001 tokens": "The largest budget that fits is 144,000 tokens;",
    "web chat | budget=4.0005 passes of chat": "The largest budget that fits is 4 passes of chat;",
    "web chat | max_repeat=1.5 | budget=5 passes of chat": "that fits is 1.5 passes of chat;",
    "web chat | mix={web: {share: 99.999%}, chat: {share: 0.001%}} | budget=30k tokens": "the share of chat, 0.001%, comes to no whole sample of about 4 tokens: set a larger budget",
    "web chat | mix={web: {share: 0}} | budget=2 passes of web": "budget is 2 passes of web, and the share of web is 0",
    "web docs": f"the tokens of docs {UNCOUNTED} its first samples suggest 4.0 a sample, which --estimate",
    "web raw": f"the tokens of raw {UNCOUNTED} the loader itself tokenizes it: convert the stream",
    "web chat | count=loss_tokens | target_prompts=all": "the loss_tokens of chat were not counted (it has no manifest, or one",
    "web mute | count=loss_tokens": "mute must be 50% of an epoch's loss_tokens, and has none",
}
"Streams, of which the second is half unless a key says otherwise."


def test_what_the_data_cannot_give_is_one_sentence_with_its_numbers(home: Path) -> None:
    publish(home / "raw", {"messages": "json"}, [{"messages": []}] * 9)
    publish(home / "mute", TURNS, TALK, card={"totals": {"loss_tokens": 0}})
    for line, words in REFUSED.items():
        streams, *keys = line.split(" | ")
        half = [f"mix.{streams[4:]}.share=0.5"] * ("mix=" not in line)
        answer = mdsmix("render-yaml", write(home, *streams.split()), *half, *keys)
        assert (answer.code, answer.out, answer.err.count("\n")) == (3, "", 1), line
        assert words in answer.err


def test_estimates_are_taken_where_they_are_asked_for_and_called_so(home: Path) -> None:
    path = write(home, "web", "docs", mix=UNKNOWN)
    assert chosen(path, may_estimate=True) == {"web": 1000, "docs": 2000}
    said = mdsmix("check", path, "--estimate").out
    assert "~50.00%" in said
    assert "~ docs: estimated from the first samples (--estimate)" in said
    assert "~ docs" in mdsmix("render-yaml", path, "--estimate").out
    assert mdsmix("check", path).code == 3
    told = orjson.loads(mdsmix("check", path, "--estimate", "--json").out)["shares"]
    assert not told["is_exact"]
    by_samples = write(home, "web", "docs", mix=UNKNOWN, count="samples")
    assert chosen(by_samples) == {"web": 2000, "docs": 2000}, "samples are always counted"


def test_what_was_counted_for_another_length_is_not_taken_for_counted(home: Path) -> None:
    long = {"max_seq_len": 2 * LENGTH}
    for count, counts in product(
        ("tokens", "loss_tokens"), ({"cut_rows": 1, "cut_tokens": 1}, {"longest": LENGTH + 1})
    ):
        path = write(home, "long", mix={}, count=count, budget="3 passes of long")
        publish(home / "long", TURNS, TALK, card=long | totals(1, **counts))
        with pytest.raises(MixRefused, match=f"the {count} of long were not counted"):
            resolve_mix([path])
        publish(home / "long", TURNS, TALK, card=long | totals(1))
        assert chosen(path) == {"long": 12}, "no sample is longer than the shorter length"


def test_the_text_loader_trains_no_eos_where_it_is_the_padding_token(home: Path) -> None:
    """It takes every padding token out of the loss, so what was counted is not what is trained."""
    loader = {"name": "text", "num_workers": 0}
    keys: dict[str, Any] = {"mix": {}, "count": "loss_tokens", "train_loader": loader}
    for pad, name in ((CARD.eos_id, "same"), (CARD.pad_id, "own")):
        card = {"tokenizer": replace(CARD, pad_id=pad), "totals": {"loss_tokens": 70}}
        publish(home / name, hand.CONCAT, [hand.TOKEN_ROW] * 10, card=card)
    assert chosen(write(home, "own", budget="3 passes of own", **keys)) == {"own": 30}
    with pytest.raises(MixRefused, match="or a padding token that is not EOS"):
        chosen(write(home, "same", budget="3 passes of same", **keys))
