"""Shares are converted to whole samples by largest remainder, and agree with exact fractions. The
shares of published streams are rendered as `choose` and shown with their samples. Shares that the
streams cannot fill are refused in one sentence.
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
    limit_passes,
    round_to_whole,
    set_target_shares,
)
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.recipe.amounts import Budget
from mdsmix.tokenizer import card as pretrained
from tests import published
from tests.converting import mdsmix, run_ok
from tests.published import CARD, LENGTH, SPLIT, TURNS, publish

IDEAL_COUNTS = st.lists(st.fractions(0, 10**6, max_denominator=10**4), min_size=1, max_size=8)
FEW = settings(max_examples=25)
HALF = Fraction(1, 2)


def make_share(
    samples: int, tokens: Fraction, trained: Fraction, written: Fraction | None
) -> StreamShare:
    """Return the share of a stream.

    Args:
        samples: samples of the stream.
        tokens: tokens of a sample.
        trained: the share of these that is trained, 0 to 1.
        written: the share that the recipe gives the stream.
    """
    return StreamShare(
        stream="",
        is_exact=True,
        written=written,
        samples=samples,
        share_units=tokens,
        budget_units=tokens * trained,
        max_passes=Fraction(4),
    )


STREAMS = st.builds(
    make_share,
    st.integers(1, 10**6),
    st.fractions(1, 4096, max_denominator=1000),
    st.fractions(Fraction(1, 100), 1, max_denominator=100),
    st.fractions(Fraction(1, 1000), 5, max_denominator=1000),
)
"A stream of 1 to 10^6 samples of 1 to 4,096 tokens on average, with a share."
MIXES = st.lists(STREAMS, min_size=1, max_size=5).map(
    lambda shares: set_target_shares(
        [replace(share, stream=f"s{i}") for i, share in enumerate(shares)]
    )
)
AMOUNTS = st.fractions(1, 10**12, max_denominator=100)


@FEW
@given(IDEAL_COUNTS)
def test_counts_are_rounded_by_largest_remainder(ideal: list[Fraction]) -> None:
    counts = round_to_whole(ideal)
    assert abs(sum(counts) - sum(ideal)) <= HALF
    remainders: dict[int, list[Fraction]] = {0: [], 1: []}
    for count, exact in zip(counts, ideal, strict=True):
        remainders[count - math.floor(exact)].append(exact - math.floor(exact))
    assert min(remainders[1], default=1) >= max(remainders[0], default=0)


def test_the_first_of_equal_remainders_is_rounded_up_and_absolute_counts_one_by_one() -> None:
    assert round_to_whole([HALF, HALF]) == [1, 0]
    assert round_to_whole([HALF]) == round_to_whole([HALF], is_absolute=True) == [1]
    assert round_to_whole([Fraction(1, 3)] * 3, is_absolute=True) == [0, 0, 0]


@FEW
@given(MIXES, AMOUNTS)
def test_an_epoch_has_the_tokens_of_its_budget_in_the_target_shares(
    shares: Shares, budget: Fraction
) -> None:
    ideal = compute_ideal_samples(shares, Budget(amount=budget, unit="tokens"))
    assert sum(share.target for share in shares) == 1
    assert sum(n * share.budget_units for n, share in zip(ideal, shares, strict=True)) == budget
    tokens = [n * share.share_units for n, share in zip(ideal, shares, strict=True)]
    assert [count / sum(tokens) for count in tokens] == [share.target for share in shares]
    assert all(abs(n - exact) < 1 for n, exact in zip(round_to_whole(ideal), ideal, strict=True))


@FEW
@given(MIXES, st.lists(st.fractions(Fraction(1, 2), 6, max_denominator=8), min_size=5), AMOUNTS)
def test_what_max_repeat_leaves_over_goes_to_the_others_in_proportion(
    mix: Shares, limits: list[Fraction], amount: Fraction
) -> None:
    """The definition, and not the way to it: an epoch has its budget, no stream is above its limit,
    and streams below their limits keep the proportions of their shares.
    """
    shares = tuple(
        replace(share, max_passes=limit) for share, limit in zip(mix, limits, strict=False)
    )
    possible = sum(share.max_samples * share.budget_units for share in shares)
    budget = Budget(amount=amount * possible / 10**12, unit="tokens")  # always possible
    unlimited = compute_ideal_samples(shares, budget)
    drawn = limit_passes(shares, unlimited, budget, "tokens")
    tokens = [count * share.budget_units for count, share in zip(drawn, shares, strict=True)]
    assert sum(tokens) == budget.amount
    factors = list[Fraction]()
    for share, count, before in zip(shares, drawn, unlimited, strict=True):
        assert count <= share.max_samples
        if count < share.max_samples:
            factors.append(count / before)
    assert len(set(factors)) <= 1
    largest = max(factors, default=Fraction(1))
    for share, count, before in zip(shares, drawn, unlimited, strict=True):
        if count == share.max_samples:
            assert before * largest >= count, "a stream at its limit would get more without it"
    with pytest.raises(MixRefused, match="the streams are too small for a budget of"):
        limit_passes(
            shares,
            compute_ideal_samples(shares, replace(budget, amount=possible + 1)),
            replace(budget, amount=possible + 1),
            "tokens",
        )


def test_equal_shares_under_max_repeat_are_unimax() -> None:
    """Compared with the algorithm of Chung et al. 2023 (arXiv 2304.09151, algorithm 1): languages
    in the order of their sizes, each gets an equal part of what is left, or all its epochs.
    """
    sizes = [30, 1000, 7, 250, 4000]
    budget, epochs = 6000, 3
    expected = dict[int, Fraction]()
    remaining = Fraction(budget)
    for done, size in enumerate(sorted(sizes)):
        expected[size] = min(remaining / (len(sizes) - done), Fraction(epochs * size))
        remaining -= expected[size]
    streams = [make_share(size, Fraction(1), Fraction(1), Fraction(1)) for size in sizes]
    shares = set_target_shares([replace(share, max_passes=Fraction(epochs)) for share in streams])
    asked_for = Budget(amount=Fraction(budget), unit="tokens")
    unlimited = compute_ideal_samples(shares, asked_for)
    assert limit_passes(shares, unlimited, asked_for, "tokens") == [
        expected[size] for size in sizes
    ]
    assert expected[7] == 21
    assert expected[4000] == Fraction(6000 - 21 - 90 - 750) / 2 == expected[1000]


def test_a_stream_whose_passes_are_the_budget_keeps_them() -> None:
    """Each of the three has a third: 2 passes of `a` are 200 tokens, and 600 are drawn. `b` has
    only 80 of its 200 in two passes, so 120 more come from `c`.
    """
    one = Fraction(1)
    streams = [
        replace(make_share(size, one, one, one), stream=name, max_passes=Fraction(2))
        for name, size in (("a", 100), ("b", 40), ("c", 4000))
    ]
    shares = set_target_shares(streams)
    budget = Budget(amount=Fraction(2), stream="a")
    unlimited = compute_ideal_samples(shares, budget)
    assert unlimited == [200, 200, 200]
    assert limit_passes(shares, unlimited, budget, "tokens") == [200, 80, 320]


@FEW
@given(MIXES, st.integers(1, 20))
def test_temperature_flattens_shares_and_keeps_their_order(mix: Shares, degrees: int) -> None:
    shares = set_target_shares([replace(share, written=None) for share in mix], Fraction(degrees))
    assert abs(float(sum(share.target for share in shares) - 1)) < 1e-30
    largest = max(shares, key=lambda share: share.size)
    total = sum(share.size for share in shares)
    for share in shares:
        expected = float(largest.size / share.size) ** (1 / degrees)
        assert float(largest.target / share.target) == pytest.approx(expected, rel=1e-9)
        assert degrees > 1 or share.target == share.size / total


def test_streams_without_a_written_share_divide_the_remainder_by_size() -> None:
    def list_targets(*written: Fraction | None) -> list[Fraction]:
        streams = [
            make_share(samples, Fraction(2), Fraction(1), share)
            for samples, share in zip((10, 30, 5), written, strict=True)
        ]
        return [share.target for share in set_target_shares(streams)]

    zero = Fraction(0)
    assert list_targets(None, None, Fraction(3, 5)) == [Fraction(n, 10) for n in (1, 3, 6)]
    assert list_targets(zero, Fraction(7), zero) == [0, 1, 0]
    assert not any(list_targets(zero, zero, zero))


CHATS = [{"turns": [{"input_ids": [5], "labels": [7] * n + [0]}]} for n in (1, 2, 3, 4)]
"Chats of 3, 4, 5 and 6 tokens. 2, 3, 4 and 5 of them are trained."
ONCE = {"web": {"share": "50%"}, "chat": {"share": "50%", "max_repeat": 0.5}}
HALVES = {"web": {"share": "50%"}, "chat": {"share": 0.5}}
TENTH = {"web": {"share": "10%"}, "chat": {"share": "5%"}}
UNKNOWN = {"docs": {"share": 0.5}}


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "open_tokenizer", lambda spec: published.TOKENIZER)


def make_totals(times: int, **counted: int) -> dict[str, Any]:
    """Return the totals of a manifest of the four chats, so many times."""
    counts = {"tokens": 18 * times, "loss_tokens": 14 * times, "longest": 6} | counted
    return {"totals": {"lengths": {"2^1": times, "2^2": 3 * times}} | counts}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three streams: web (4,000 rows of 8 tokens), chat (4,000 of 4.5 tokens
    on average) and docs (2,000 pairs of 4 tokens, without a manifest).
    """
    home = tmp_path_factory.mktemp("published")
    counted = {"totals": {"loss_tokens": 28000}}
    publish(home / "web", SPLIT, [published.SPLIT_ROW] * 4000, card=counted)
    publish(home / "chat", TURNS, CHATS * 1000, card=make_totals(1000))
    publish(home / "docs", published.PAIR, [published.PAIR_ROW] * 2000)
    return home


def write_recipe(home: Path, *streams: str, **keys: Any) -> str:
    names = streams or ("web", "chat")
    return str(published.write_mix(home, *names, **{"train_loader": {"num_workers": 0}} | keys))


def choose_by_recipe(path: str, may_estimate: bool = False) -> dict[str, int]:
    """Return the samples that an epoch draws from each stream of a recipe, and check that the mix
    renders them and states the shares that they reach.
    """
    mix = resolve_mix([path], may_estimate)
    shares = mix.shares.streams
    assert [s.weight for s in mix.train.streams] == [{"choose": s.choose} for s in shares]
    units = [share.choose * share.share_units for share in shares]
    reached = [share.reached for share in shares]
    assert mix.shares.is_absolute or reached == [count / sum(units) for count in units]
    return {share.stream: share.choose for share in shares}


COUNTS: tuple[tuple[dict[str, Any], int, int], ...] = (
    ({"budget": "36k tokens"}, 2250, 4000),
    ({"budget": "144,000 tokens"}, 9000, 16000),  # the largest without max_repeat
    ({"budget": "144,008 tokens"}, 9001, 16000),
    ({"budget": "200,000 tokens"}, 16000, 16000),  # the largest: see REFUSED
    ({"budget": "36k tokens", "mix": ONCE}, 3375, 2000),
    ({"budget": "28k loss_tokens", "mix": ONCE}, 3000, 2000),
    ({"budget": "36k tokens", "count": "samples", "mix": ONCE}, 3375, 2000),
    (
        {"budget": "36k tokens", "mix": ONCE | {"web": {"share": "50%", "max_repeat": 9}}},
        3375,
        2000,
    ),
    ({"budget": "120k tokens", "mix": {"chat": {"max_repeat": 1}}}, 12750, 4000),
    ({"budget": "28k loss_tokens"}, 2000, 4000),
    ({"budget": "36k tokens", "count": "samples"}, 2880, 2880),
    ({"budget": "1 pass of chat"}, 2250, 4000),
    ({"budget": "1 pass of chat", "count": "loss_tokens"}, 2000, 4000),
    ({"budget": "1.5 passes of web"}, 6000, 10667),
    ({}, 2250, 4000),
    ({"max_repeat": 0.5}, 1125, 2000),
    ({"mix": {}, "budget": "50k tokens"}, 4000, 4000),
    ({"mix": {"chat": {"share": "36%"}}}, 4000, 4000),
    ({"mix": {"chat": {"share": 0}}}, 4000, 0),
    ({"mix": TENTH, "absolute": True, "budget": "100k tokens"}, 1250, 1111),
)
"Keys of a recipe of web and chat -> the samples of each that an epoch draws, computed by hand."


def test_shares_are_converted_to_the_counts_computed_by_hand(home: Path) -> None:
    for keys, project, chat in COUNTS:
        path = write_recipe(home, **{"mix": HALVES} | keys)
        assert choose_by_recipe(path) == {"web": project, "chat": chat}, keys
    shorter = write_recipe(home, "web", mix={}, budget="1 pass of web", max_seq_len=LENGTH // 2)
    assert choose_by_recipe(shorter) == {"web": 4000}, "rows of one length are counted for any"
    mix = resolve_mix([write_recipe(home, mix={"chat": {"share": 0}})])
    assert not [f for f in run_checks(mix) if f.id == "weights-off"]


def test_shares_are_rendered_and_shown_as_a_table_and_as_json(home: Path) -> None:
    path = write_recipe(home, mix=HALVES, budget="36k tokens")
    text = mdsmix("render-yaml", path).out
    streams = yaml.safe_load(text)["train_loader"]["dataset"]["streams"]
    assert {n: s["choose"] for n, s in streams.items()} == {"web": 2250, "chat": 4000}
    assert "# mdsmix: shares of an epoch's tokens; budget: 36,000 tokens" in text
    row = "web 4,000 2,250 0.56 50.00% 50.00%"
    assert row in " ".join(run_ok("check", path).out.split())
    assert f"# mdsmix: {row}" in " ".join(text.split())
    tree = orjson.loads(mdsmix("check", path, "--json").out)["shares"]
    assert (tree["count"], tree["budget"], tree["is_exact"]) == ("tokens", "36,000 tokens", True)
    counts = {"samples": 4000, "choose": 4000, "passes": 1.0, "asked": 0.5, "reached": 0.5}
    assert tree["rows"][1] == {"stream": "chat"} | counts


def test_what_max_repeat_moves_is_told_with_its_numbers(home: Path) -> None:
    """Half of 36,000 tokens is 18,000: chat has 9,000 in half a pass, and web gives 9,000 more."""
    path = write_recipe(home, mix=ONCE, budget="36k tokens")
    lines = (
        "chat is limited by max_repeat 0.5: it gives 9,000 tokens of the 18,000 tokens of its "
        "share (2,000 of 4,000 samples)",
        "the other 9,000 tokens go to the other streams, in whole samples and in proportion to "
        "their shares: web (+9,000)",
    )
    tree = orjson.loads(mdsmix("check", path, "--json").out)
    assert tree["shares"]["notes"] == [*lines]
    assert [row["reached"] for row in tree["shares"]["rows"]] == [0.75, 0.25]
    (finding,) = (finding for finding in tree["findings"] if finding["id"] == "shares-limited")
    assert (finding["severity"], finding["streams"]) == ("warning", ["chat"])
    assert finding["message"].startswith("; ".join(lines))
    rendered = mdsmix("render-yaml", path)
    assert "1 warning" in rendered.err
    assert all(f"{line}\n" in rendered.err for line in lines)
    assert all(f"# mdsmix:   {line}" in rendered.out for line in lines)
    planned = orjson.loads(mdsmix("plan", path, "--batch", "8", "--gpus", "1", "--json").out)
    assert planned["notes"][:2] == [*lines]
    enough = write_recipe(home, mix=ONCE, budget="18k tokens")
    assert "is limited by" not in mdsmix("check", enough).out


UNCOUNTED = (
    "were not counted, because the stream has no manifest that belongs to its index: convert it."
)
REFUSED = {
    "web chat | budget=1M tokens": (
        "the streams are too small for a budget of 1,000,000 tokens: within max_repeat an epoch "
        "can draw at most web 128,000, chat 72,000 tokens. The largest budget that fits is 200,000 "
        "tokens;"
    ),
    "web chat | budget=200001 tokens": "The largest budget that fits is 200,000 tokens;",
    "web chat | mix={web: {share: 5%}, chat: {share: 10%}} | absolute=true | budget=2M tokens": (
        "the share of chat, 10% under a budget of 2,000,000 tokens, comes to 200,000 tokens, but "
        "the stream has only 18,000 tokens. An epoch would read it 11.11 times, and max_repeat "
        "allows 4. The largest budget that fits is 720,000 tokens;"
    ),
    "web chat | budget=4.0005 passes of chat": "The largest budget that fits is 4 passes of chat;",
    "web chat | mix.web.share=0.1 | mix.chat.share=0.9 | budget=4 passes of web": (
        "within max_repeat an epoch can draw at most chat 72,000 tokens. The largest budget that "
        "fits is 0.25 passes of web;"
    ),
    "web chat | max_repeat=1.5 | budget=5 passes of chat": "that fits is 1.5 passes of chat;",
    "web chat | mix={web: {share: 99.999%}, chat: {share: 0.001%}} | budget=30k tokens": (
        "the share of chat, 0.001%, is less than one sample of the stream, which has about 4 "
        "tokens: set a larger budget"
    ),
    "web chat | mix={web: {share: 0}} | budget=2 passes of web": (
        "budget: 2 passes of web counts how often an epoch reads stream web, but the share of "
        "web is 0"
    ),
    "web docs": (
        f"the tokens of docs {UNCOUNTED} Its first samples suggest 4.0 tokens a sample: --estimate"
    ),
    "web raw": f"the tokens of raw {UNCOUNTED} They cannot be estimated, since the loader itself",
    "web chat | count=loss_tokens | target_prompts=all": (
        "the loss_tokens of chat were not counted, because the stream was converted with other "
        "target_prompts or target_responses than the loader has: convert it with the loader's."
    ),
    "web mute | count=loss_tokens": "mute must be 50% of an epoch's loss_tokens, and has none",
}
"""Streams and keys of the recipe -> words of the message. The second stream has a share of one half
unless a key sets it.
"""


def test_shares_that_the_streams_cannot_fill_are_refused_in_one_sentence(home: Path) -> None:
    publish(home / "raw", {"messages": "json"}, [{"messages": []}] * 9)
    publish(home / "mute", TURNS, CHATS, card={"totals": {"loss_tokens": 0}})
    for line, words in REFUSED.items():
        names, *keys = line.split(" | ")
        streams = names.split()
        if "mix=" not in line:
            keys.insert(0, f"mix.{streams[1]}.share=0.5")
        answer = mdsmix("render-yaml", write_recipe(home, *streams), *keys)
        assert (answer.code, answer.out, answer.err.count("\n")) == (3, "", 1), line
        assert words in answer.err


def test_tokens_are_estimated_only_on_request_and_marked_as_estimates(home: Path) -> None:
    path = write_recipe(home, "web", "docs", mix=UNKNOWN)
    assert choose_by_recipe(path, may_estimate=True) == {"web": 1000, "docs": 2000}
    output = mdsmix("check", path, "--estimate").out
    assert "~50.00%" in output
    assert "~ docs: estimated from the first samples (--estimate)" in output
    assert "~ docs" in mdsmix("render-yaml", path, "--estimate").out
    assert mdsmix("check", path).code == 3
    tree = orjson.loads(mdsmix("check", path, "--estimate", "--json").out)["shares"]
    assert not tree["is_exact"]
    by_samples = write_recipe(home, "web", "docs", mix=UNKNOWN, count="samples")
    assert choose_by_recipe(by_samples) == {"web": 2000, "docs": 2000}, "samples are always counted"


def test_tokens_counted_for_another_length_are_refused_if_rows_were_cut_or_are_longer(
    home: Path,
) -> None:
    long = {"max_seq_len": 2 * LENGTH}
    for count, counts in product(
        ("tokens", "loss_tokens"), ({"cut_rows": 1, "cut_tokens": 1}, {"longest": LENGTH + 1})
    ):
        path = write_recipe(home, "long", mix={}, count=count, budget="3 passes of long")
        publish(home / "long", TURNS, CHATS, card=long | make_totals(1, **counts))
        with pytest.raises(MixRefused, match=f"the {count} of long were not counted"):
            resolve_mix([path])
        publish(home / "long", TURNS, CHATS, card=long | make_totals(1))
        assert choose_by_recipe(path) == {"long": 12}, "no sample is longer than the shorter length"


def test_trained_tokens_are_unknown_if_the_text_loader_masks_eos_as_padding(home: Path) -> None:
    """The text loader removes every padding token from the loss, so conversion counted more tokens
    than are trained.
    """
    loader = {"name": "text", "num_workers": 0}
    keys: dict[str, Any] = {"mix": {}, "count": "loss_tokens", "train_loader": loader}
    for pad, name in ((CARD.eos_id, "same"), (CARD.pad_id, "own")):
        card = {"tokenizer": replace(CARD, pad_id=pad), "totals": {"loss_tokens": 70}}
        publish(home / name, published.CONCAT, [published.TOKEN_ROW] * 10, card=card)
    assert choose_by_recipe(write_recipe(home, "own", budget="3 passes of own", **keys)) == {
        "own": 30
    }
    with pytest.raises(MixRefused, match="because its tokenizer pads with EOS"):
        choose_by_recipe(write_recipe(home, "same", budget="3 passes of same", **keys))
