"""A budget decides how much of each source is converted: enough for its share, no more than a step too much, and said."""

from __future__ import annotations

import random
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.kinds import open_recipe
from mdsmix.recipe import read_share
from mdsmix.recipe.amounts import DEVIATIONS, MARGIN, STEPS, step_above, taken
from mdsmix.recipe.rules import tokens_wanted, with_budget
from mdsmix.shards.manifest import Manifest
from mdsmix.words import percent
from tests.converting import (
    documents,
    files,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    times,
    token_rows,
    write_jsonl,
    write_recipe,
)

SHARES = {"commoncrawl": "52.2%", "c4": "26.7%", "github": "5.2%", "book": "4.2%", "arxiv": "4.6%", "wiki": "3.8%", "stackexchange": "3.3%"}  # fmt: skip
"Of a published mixture."
SIZES = {"commoncrawl": 900, "c4": 400, "github": 60, "book": 40, "arxiv": 40, "wiki": 60, "stackexchange": 60}  # fmt: skip
WORDS = ["the", "of", "library", "loader", "token", "shard", "window", "sample", "record", "budget"]


def texts(name: str, count: int, words: int = 30) -> list[dict[str, str]]:
    rng = random.Random(name)
    return [
        {"text": " ".join(rng.choices(WORDS, k=rng.randint(1, 2 * words)))} for _ in range(count)
    ]


def recipe_of(folder: Path, tokenizer: Path, **top: Any) -> Path:
    """Seven sources, and the shares of the whole budget that a mixture file gives them."""
    for name, count in SIZES.items():
        if not (folder / f"data/{name}.jsonl").exists():
            write_jsonl(folder / f"data/{name}.jsonl", texts(name, count))
    streams = {name: documents(f"data/{name}.jsonl", sample="budget") for name in SHARES}
    mix = {name: {"share": share} for name, share in SHARES.items()}
    top = {"streams": streams, "mix": mix, "absolute": True, "budget": "10k tokens"} | top
    return write_recipe(folder, tokenizer, **top)


def chosen(recipe: Path, *overrides: str) -> dict[str, int]:
    """Samples of each stream in an epoch, as they are rendered."""
    answer = mdsmix("render-yaml", recipe, *overrides)
    assert answer.code == 0, answer.err
    streams = yaml.safe_load(answer.out)["train_loader"]["dataset"]["streams"]
    return {name: stream["choose"] for name, stream in streams.items()}


def manifests(folder: Path) -> dict[str, Manifest]:
    return {
        path.name: manifest_of(path / "train") for path in (folder).iterdir() if path.name in SHARES
    }


@given(st.floats(1e-9, 1))
def test_a_step_is_no_less_than_asked_and_a_quarter_more_at_most(share: float) -> None:
    step = step_above(share)
    assert Fraction(share) <= step <= Fraction(share) * Fraction(5, 4)
    assert step_above(float(step) * 0.999) == step


@given(st.floats(1e-9, 1), st.floats(1e-9, 1))
def test_a_larger_share_takes_no_smaller_step(one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert step_above(small) <= step_above(large)


@given(st.integers(-9, 0), st.sampled_from(STEPS))
def test_what_a_sentence_says_of_a_step_a_recipe_may_say(place: int, step: int) -> None:
    share = step * Fraction(10) ** (place - 3)
    assert read_share(percent(share)) == share


def test_each_stream_holds_its_share_and_not_much_more(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = recipe_of(tmp_path, tokenizer_folder)
    outcomes = {outcome.stream: outcome for outcome in run_recipe(recipe)}
    for name, share in SHARES.items():
        wanted, totals = outcomes[name].wanted, outcomes[name].manifest.totals
        assert wanted is not None
        assert wanted.tokens == 10_000 * Fraction(share[:-1]) / 100
        assert not wanted.missing(outcomes[name].manifest)
        assert totals.seen_tokens < 1.6 * wanted.tokens * (1 + wanted.margin) * 1.2
        assert Fraction(outcomes[name].manifest.encoding.sample or 1) == wanted.share
    assert outcomes["commoncrawl"].wanted.share < Fraction(1, 2)  # type: ignore[union-attr]


def test_planned_alone_or_together_and_in_one_stage_or_two_the_bytes_are_the_same(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = recipe_of(tmp_path, tokenizer_folder)
    run_recipe(recipe)
    together = files(tmp_path / "out")
    stages = f"local={tmp_path / 'stages'}"
    run_recipe(recipe, stages, only=["commoncrawl", "book"])
    first = times(tmp_path / "stages/commoncrawl")
    run_recipe(recipe, stages, only=[n for n in SHARES if n not in ("commoncrawl", "book")])
    assert files(tmp_path / "stages") == together
    assert times(tmp_path / "stages/commoncrawl") == first
    some = {name: documents(f"data/{name}.jsonl", sample="budget") for name in ("c4", "wiki")}
    alone = recipe_of(
        tmp_path, tokenizer_folder, streams=some, mix={n: {"share": SHARES[n]} for n in some}
    )
    run_recipe(alone, f"local={tmp_path / 'alone'}")
    for name in some:
        assert files(tmp_path / "alone" / name) == files(tmp_path / "stages" / name)
    counts = chosen(alone, f"local={tmp_path / 'alone'}")
    assert counts.keys() == some.keys()
    recipe = recipe_of(tmp_path, tokenizer_folder)
    assert counts.items() < chosen(recipe).items()


def test_a_larger_budget_only_adds_and_the_same_again_does_nothing(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = recipe_of(tmp_path, tokenizer_folder)
    settings = [f"streams.{name}.layout=document" for name in SHARES]
    run_recipe(recipe, *settings)
    written = manifests(tmp_path / "out")["commoncrawl"].records.written
    rows = {n: {tuple(r) for r in token_rows(tmp_path / f"out/{n}/train")} for n in SHARES}
    assert not any(outcome.done for outcome in run_recipe(recipe, *settings))
    answer = mdsmix("convert", recipe, *settings, "--budget", "20k")
    assert answer.code == 0
    for name, before in rows.items():
        assert before <= {tuple(row) for row in token_rows(tmp_path / f"out/{name}/train")}
    assert manifests(tmp_path / "out")["commoncrawl"].records.written > 1.5 * written


def test_a_source_that_grows_a_little_takes_the_same_step(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = recipe_of(tmp_path, tokenizer_folder)
    only = {"only": ["commoncrawl", "c4"]}
    before = {o.stream: o.manifest.encoding.sample for o in run_recipe(recipe, **only)}
    for name in before:
        with (tmp_path / f"data/{name}.jsonl").open("ab") as file:
            file.write(orjson.dumps({"text": "one record more"}) + b"\n")
    assert before == {o.stream: o.manifest.encoding.sample for o in run_recipe(recipe, **only)}


def test_the_flag_says_tokens_and_what_it_leaves_as_it_is(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    streams = {name: documents(f"data/{name}.jsonl") for name in SHARES}
    streams["c4"]["sample"] = "50%"
    streams["heldout"] = documents("data/wiki.jsonl", split="val")
    recipe = recipe_of(tmp_path, tokenizer_folder, streams=streams, budget=None, absolute=None)
    answer = mdsmix("convert", recipe, "--budget", "8k", "--json")
    assert answer.code == 0
    assert "c4: --budget leaves it as the recipe says: sample: 50% of it" in answer.err
    assert "heldout: --budget leaves it as the recipe says: all of it" in answer.err
    rows = {row["stream"]: row for row in orjson.loads(answer.out)["rows"]}
    assert rows["commoncrawl"]["budget"]["wanted_tokens"] == 4_176
    assert rows["commoncrawl"]["budget"]["missing_tokens"] == 0
    assert rows["c4"]["budget"] is rows["heldout"]["budget"] is rows["heldout"]["sample"] is None
    assert rows["c4"]["sample"] == "1/2"
    left_out = mdsmix("convert", recipe, "--only", "wiki", "budget=8k tokens")
    assert "wiki: published is a sample of" in left_out.err
    assert "and this run takes all of it" in left_out.err


def test_too_small_a_source_says_so_with_the_number(tmp_path: Path, tokenizer_folder: Path) -> None:
    recipe = recipe_of(tmp_path, tokenizer_folder)
    answer = mdsmix("convert", recipe, "--only", "book", "--budget", "1M")
    held = manifest_of(tmp_path / "out/book/train").totals.tokens
    assert answer.code == 0
    assert "so all records are taken" in answer.out
    missing = 42_000 - held
    assert (
        f"{held:,} came, {missing:,} ({missing / 42_000:.1%}) too few for its share" in answer.out
    )
    assert "there is no more of it" in answer.out


def test_an_estimate_that_was_wrong_says_what_would_be_enough(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """The places that are looked at are the beginnings of splits; here they alone hold long words."""
    rich = texts("rich", 600, 40)
    poor = [{"text": " ".join(["a" * 60] * 40)} for _ in range(2_500)]
    write_jsonl(tmp_path / "data/c4.jsonl", [*rich, *poor, *rich[:10]])
    recipe = recipe_of(tmp_path, tokenizer_folder)
    answer = mdsmix("convert", recipe, "--only", "c4", "--budget", "200k")
    manifest = manifest_of(tmp_path / "out/c4/train")
    if manifest.totals.tokens >= 53_400:
        pytest.fail("the estimate was not wrong: the test shows nothing")
    assert "WARNING: budget" in answer.out
    share = answer.out.partition("write sample: ")[2].partition(" ")[0]
    again = mdsmix(
        "convert", recipe, "--only", "c4", "--budget", "200k", f"streams.c4.sample={share}"
    )
    assert again.code == 0
    assert manifest_of(tmp_path / "out/c4/train").totals.tokens >= 53_400


def test_a_holdout_takes_nothing_of_the_share(tmp_path: Path, tokenizer_folder: Path) -> None:
    streams = {"c4": documents("data/c4.jsonl", sample="budget", holdout="50%")}
    mix = {"c4": {"share": "26.7%"}}
    recipe = recipe_of(tmp_path, tokenizer_folder, streams=streams, mix=mix)
    train, held = run_recipe(recipe)
    assert train.wanted is not None
    assert not train.wanted.missing(train.manifest)
    assert held.wanted is None
    assert held.manifest.encoding.sample == train.manifest.encoding.sample
    assert held.manifest.records.sampled == train.manifest.records.sampled


def test_a_repair_needs_no_flag(tmp_path: Path, tokenizer_folder: Path) -> None:
    streams = {"c4": documents("data/c4.jsonl")}
    recipe = recipe_of(
        tmp_path, tokenizer_folder, streams=streams, mix=None, absolute=None, budget=None
    )
    assert mdsmix("convert", recipe, "--budget", "4k").code == 0
    before = files(tmp_path / "out/c4/train")
    (shard,) = (tmp_path / "out/c4/train").glob("*.mds")
    shard.write_bytes(b"nothing")
    assert mdsmix("repair", tmp_path / "out/c4/train", "--recipe", recipe).code == 0
    assert files(tmp_path / "out/c4/train") == before


def test_the_dry_run_and_a_limit(tmp_path: Path, tokenizer_folder: Path) -> None:
    """A first look takes all of the first records: of twenty a small share is none."""
    recipe = recipe_of(tmp_path, tokenizer_folder)
    planned = mdsmix("convert", recipe, "--dry-run", "--only", "commoncrawl")
    assert (
        "its share of 10,000 tokens is 5,220; estimated from 1 place of its source" in planned.out
    )
    (outcome,) = run_recipe(recipe, only=["commoncrawl"], limit=20)
    assert outcome.manifest.records.written == 20
    assert not outcome.manifest.encoding.sample


def wanted_of(recipe: Path, *overrides: str) -> Mapping[str, Fraction]:
    opened = with_budget(open_recipe(recipe, overrides))
    return {s.name: tokens_wanted(opened, s) for s in opened.sourced}


def test_shares_are_of_the_whole_budget_or_normalised(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    mix = {"c4": {"share": 3}, "wiki": {"share": 1}}
    streams = {name: documents(f"data/{name}.jsonl") for name in mix}
    recipe = recipe_of(tmp_path, tokenizer_folder, streams=streams, mix=mix, absolute=None)
    assert wanted_of(recipe) == {"c4": 7_500, "wiki": 2_500}
    percents = ["mix.c4.share=30%", "mix.wiki.share=10%"]
    assert wanted_of(recipe, *percents) == {"c4": 7_500, "wiki": 2_500}
    assert wanted_of(recipe, *percents, "count=tokens") == {"c4": 7_500, "wiki": 2_500}
    assert wanted_of(recipe, *percents, "absolute=true") == {"c4": 3_000, "wiki": 1_000}
    rest = recipe_of(
        tmp_path, tokenizer_folder, streams=streams, mix={"c4": {"share": 0.6}}, absolute=None
    )
    assert wanted_of(rest) == {"c4": 6_000, "wiki": 4_000}


@pytest.mark.parametrize(
    ("flag", "overrides", "sentence"),
    [
        ("0", [], "it must be above 0"),
        ("", [], "it must be above 0, with its unit"),
        ("-2B", [], "it must be above 0, with its unit"),
        ("nan", [], "a number alone, 2B, is tokens"),
        ("2X", [], "a number alone, 2B, is tokens"),
        ("1M samples", [], "it is 1,000,000 samples: give budget and count in tokens"),
        ("2 passes of c4", [], "it is 2 passes of c4"),
        ("2B", ["count=samples", "absolute=false"], "give budget and count in tokens"),
        ("2B", ["mix.c4.share=0"], "it has no share above 0"),
        (None, ["budget=null", "absolute=false"], "there is none: add budget"),
        (None, ["streams.c4.split=val"], "evaluated on"),
        (None, ["streams.c4.expected_mean_tokens=0"], "expected_mean_tokens is 0; it must be a number above 0"),
        (None, ["streams.c4.expected_mean_tokens=.nan"], "expected_mean_tokens is nan"),
    ],
)  # fmt: skip
def test_what_no_budget_can_be_worked_out_from_is_one_sentence(
    tmp_path: Path, tokenizer_folder: Path, flag: str | None, overrides: list[str], sentence: str
) -> None:
    recipe = recipe_of(tmp_path, tokenizer_folder)
    flags = [] if flag is None else ["--budget", flag]
    answer = mdsmix("convert", recipe, *overrides, *flags)
    assert answer.code == 2
    assert sentence in answer.err
    assert answer.err.count("\n") == 1


def test_two_streams_without_a_share_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    streams = {name: documents(f"data/{name}.jsonl") for name in ("c4", "wiki")}
    recipe = recipe_of(tmp_path, tokenizer_folder, streams=streams, mix=None, absolute=None)
    answer = mdsmix("convert", recipe, "--budget", "2k")
    assert answer.code == 2
    assert (
        "it has no share above 0 that is known before a conversion: write mix.c4.share"
        in answer.err
    )


def test_a_source_without_a_token_is_said(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_jsonl(tmp_path / "data/c4.jsonl", [{"body": "nothing"}] * 3)
    answer = mdsmix("convert", recipe_of(tmp_path, tokenizer_folder), "--only", "c4")
    assert answer.code == 2
    assert "stream c4: not one token came of the records that were looked at" in answer.err


def test_a_share_of_less_than_a_sample_is_refused_before_anything_is_published(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Rows of joined documents, and pairs."""
    write_jsonl(
        tmp_path / "data/qa.jsonl", [{"prompt": f"a b {n}", "response": "c d"} for n in range(900)]
    )
    streams = {"c4": documents("data/c4.jsonl"), "qa": pairs("data/qa.jsonl")}
    mix = {"c4": {"share": "90%"}, "qa": {"share": "10%"}}
    recipe = recipe_of(tmp_path, tokenizer_folder, streams=streams, mix=mix)
    for budget, told in (("5", "gives c4 5 tokens, qa 1 token, less"), ("30", "gives qa 3 tokens")):
        answer = mdsmix("convert", recipe, "--budget", budget)
        assert answer.code == 2
        assert told in answer.err
        assert not (tmp_path / "out").exists()
    assert mdsmix("convert", recipe, "--budget", "3k").code == 0


def test_where_one_comes_out_empty_all_the_same_the_others_are_published(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    streams = {"c4": documents("data/c4.jsonl"), "wiki": documents("data/wiki.jsonl", holdout=1e-6)}
    mix = {"c4": {"share": "50%"}, "wiki": {"share": "50%"}}
    recipe = recipe_of(tmp_path, tokenizer_folder, streams=streams, mix=mix)
    answer = mdsmix("convert", recipe, "--budget", "2k", "--quiet")
    assert answer.code == 5
    assert "not one sample came of its source" in answer.err
    assert all((tmp_path / f"out/{name}/train/index.json").exists() for name in mix)


def test_the_expected_mean_is_held_against_what_is_found(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_jsonl(tmp_path / "data/qa.jsonl", [{"prompt": "a b", "response": "c d"}] * 8)
    streams = {"qa": pairs("data/qa.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    run_recipe(recipe)
    mean = manifest_of(tmp_path / "out/qa/train").totals.tokens / 8
    near = mdsmix("convert", recipe, f"streams.qa.expected_mean_tokens={mean * 1.04}")
    assert "expected_mean_tokens" not in near.out
    far = mdsmix("convert", recipe, f"streams.qa.expected_mean_tokens={mean * 2}")
    assert (
        f"a record holds {mean:,.1f} tokens on average of 8 records, -50.0% of the expected"
        in far.out
    )
    assert "up to date" in far.out


def test_the_margin_is_wider_the_fewer_records_happen_to_be_in_the_sample() -> None:
    """A hundredth of 10,000 records is 100, which deviate by a tenth of what one does; without a spread, by their number."""
    for spread, one in ((0.0, 1.0), (3**0.5, 2.0)):
        share, margin = taken(0.01, 10_000, 0.05, spread)
        assert margin == pytest.approx(MARGIN + DEVIATIONS * (0.05 + one / 10))
        assert share == step_above(0.01 * (1 + margin))
