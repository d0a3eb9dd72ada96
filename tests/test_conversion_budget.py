"""A budget decides how much of each source is converted: enough for its share, no more than a step
too much, and said. About how many tokens a source holds is estimated for files of every format, and
little of it is read.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from fractions import Fraction
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mdsmix import sources
from mdsmix.conversion.budget_sample import estimate_source
from mdsmix.conversion.job import make_job
from mdsmix.estimate.budget_share import (
    DEVIATIONS,
    MARGIN,
    SourceEstimate,
    choose_sampling_share,
    round_up_share,
)
from mdsmix.estimate.survey import Rates, Survey
from mdsmix.kinds import open_recipe
from mdsmix.messages import format_percent
from mdsmix.recipe import read_share
from mdsmix.recipe.rules import count_budget_tokens, sample_by_budget
from mdsmix.sources import unit_plan
from mdsmix.storage import Stat, locate
from mdsmix.tokenizer.card import open_tokenizer
from tests.converting import (
    Project,
    assert_refused,
    documents,
    manifest_of,
    mdsmix,
    read_files,
    run_ok,
)
from tests.formats import write_records

SHARES = {"commoncrawl": "52.2%", "c4": "26.7%", "book": "4.2%", "wiki": "3.8%"}
"Of a published mixture."
WORDS = ["the", "of", "library", "loader", "token", "shard", "window", "sample", "record", "budget"]


def texts(name: str, count: int, words: int = 30) -> list[str]:
    rng = random.Random(name)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 2 * words))) for _ in range(count)]


@pytest.fixture
def mix(project: Project) -> Project:
    """Sources, and the shares of the whole budget that a mixture file gives them."""
    for name, count in zip(SHARES, (900, 400, 40, 60), strict=True):
        project.write_source(texts(name, count), f"data/{name}.jsonl")
    return says(project)


def says(project: Project, *names: str, **top: Any) -> Project:
    """Of some of the sources, or of all."""
    of = {n: documents(f"data/{n}.jsonl", sample="budget") for n in names or SHARES}
    mix = {name: {"share": SHARES[name]} for name in of}
    top = {"streams": of, "mix": mix, "absolute": True, "budget": "10k tokens"} | top
    return project.configure(**top)


def chosen(project: Project, *overrides: str) -> dict[str, int]:
    """Samples of each stream in an epoch, as they are rendered."""
    rendered = yaml.safe_load(run_ok("render-yaml", project.recipe, *overrides).out)
    streams = rendered["train_loader"]["dataset"]["streams"]
    return {name: stream["choose"] for name, stream in streams.items()}


@given(st.floats(1e-9, 1), st.floats(1e-9, 1))
def test_a_step_is_up_to_a_quarter_more_and_never_falls(one: float, other: float) -> None:
    """And what a sentence says of it a recipe may say."""
    small, large = sorted((one, other))
    step = round_up_share(small)
    assert Fraction(small) <= step <= Fraction(small) * Fraction(5, 4)
    assert round_up_share(float(step) * 0.999) == step <= round_up_share(large)
    assert read_share(format_percent(step)) == step


def test_the_margin_is_wider_the_fewer_records_happen_to_be_in_the_sample() -> None:
    """A hundredth of 10,000 records is 100, which deviate by a tenth of what one does; without a
    spread, by their number.
    """
    for spread, one in ((0.0, 1.0), (3**0.5, 2.0)):
        rates = Rates(tokens_per_byte=1.0, error=0.05, mean=10.0, spread=spread, splits=2)
        source = SourceEstimate(rates=rates, tokens=100_000.0, records=10_000.0)
        share, margin = choose_sampling_share(source, Fraction(1_000))
        assert margin == pytest.approx(MARGIN + DEVIATIONS * (0.05 + one / 10))
        assert share == round_up_share(0.01 * (1 + margin))


def test_each_stream_holds_its_share_and_not_much_more_however_they_are_planned(
    mix: Project,
) -> None:
    """Alone or together, in one stage or two the bytes are the same. A source that grows a little
    takes the same step.
    """
    outcomes = mix.run_all()
    for name, share in SHARES.items():
        manifest, wanted = outcomes[name].manifest, outcomes[name].budget_share
        assert wanted.tokens == 10_000 * Fraction(share[:-1]) / 100
        assert not wanted.missing(manifest)
        assert manifest.totals.seen_tokens < 1.6 * wanted.tokens * (1 + wanted.margin) * 1.2
        assert Fraction(manifest.encoding.sample or 1) == wanted.share
    assert outcomes["commoncrawl"].budget_share.share < Fraction(1, 2)
    together, counts = read_files(mix.out), chosen(mix)
    stages, some = mix.folder / "stages", ("c4", "wiki")
    for names in (["commoncrawl", "book"], ["c4", "wiki"]):
        mix.run_all(f"local={stages}", only=names)
    assert read_files(stages) == together
    says(mix, *some)
    mix.run_all(f"local={mix.folder / 'alone'}")
    for name in some:
        assert read_files(mix.folder / "alone" / name) == read_files(mix.out / name)
    assert chosen(mix).items() < counts.items()
    with (mix.folder / "data/c4.jsonl").open("ab") as file:
        file.write(orjson.dumps({"text": "one record more"}) + b"\n")
    grown = mix.run_all(only=["c4"])["c4"].manifest.encoding.sample
    assert grown == outcomes["c4"].manifest.encoding.sample


def test_a_larger_budget_takes_more_and_the_same_again_does_nothing(mix: Project) -> None:
    settings = [f"streams.{name}.layout=document" for name in SHARES]
    written = mix.run_all(*settings)["commoncrawl"].manifest.records.written
    assert not any(outcome.done for outcome in mix.run_all(*settings).values())
    mix.convert_ok(*settings, "--budget", "20k")
    again = mix.run_all(*settings, "budget=20k tokens")["commoncrawl"]
    assert again.done == 0
    assert again.manifest.records.written > 1.5 * written


def test_the_flag_says_tokens_and_what_it_leaves_as_it_is(mix: Project) -> None:
    streams = {name: documents(f"data/{name}.jsonl") for name in SHARES}
    streams["c4"]["sample"] = "50%"
    streams["heldout"] = documents("data/wiki.jsonl", split="val")
    answer = says(mix, streams=streams, budget=None).convert_ok("--budget", "8k", "--json")
    assert "c4: not sampled by --budget; the recipe says sample: 50%" in answer.err
    assert "heldout: not sampled by --budget; the recipe says all of it" in answer.err
    rows = {row["stream"]: row for row in orjson.loads(answer.out)["rows"]}
    wanted = rows["commoncrawl"]["budget"]
    assert (wanted["wanted_tokens"], wanted["missing_tokens"]) == (4_176, 0)
    assert rows["c4"]["budget"] is rows["heldout"]["budget"] is None
    left_out = mix.convert("--only", "wiki", "budget=8k tokens", "--dry-run").out
    assert "and is not set" in left_out, "all of it is taken"


def test_too_small_a_source_says_so_with_the_number(mix: Project) -> None:
    said = mix.convert_ok("--only", "book", "--budget", "1M").out
    held = manifest_of(mix.out / "book/train").totals.tokens
    few = f"got {held:,}, {42_000 - held:,} ({1 - held / 42_000:.1%}) too few for its share"
    for words in ("so all records are taken", few, "the source has no more"):
        assert words in said


def test_an_estimate_that_was_wrong_says_what_would_be_enough(mix: Project) -> None:
    """The places that are looked at are the beginnings of splits; here they alone hold
    long words.
    """
    rich, poor = texts("rich", 600, 40), [" ".join(["a" * 60] * 40)] * 2_500
    mix.write_source([*rich, *poor, *rich[:10]], "data/c4.jsonl")
    command = ("--only", "c4", "--budget", "200k")
    said = mix.convert_ok(*command).out
    assert "WARNING: budget" in said
    share = said.partition("set sample: ")[2].partition(" ")[0]
    rows = [orjson.loads(mix.convert(*command, *more, "--json").out)["rows"][0] for more in ([], [f"streams.c4.sample={share}"])]  # fmt: skip
    assert rows[0]["tokens"] < 53_400 <= rows[1]["tokens"]


def test_a_holdout_takes_nothing_of_the_share(mix: Project) -> None:
    says(mix, "c4", streams={"c4": documents("data/c4.jsonl", sample="budget", holdout="50%")})
    train, held = mix.run_all().values()
    assert not train.budget_share.missing(train.manifest)
    assert held.budget_share is None
    assert held.manifest.encoding.sample == train.manifest.encoding.sample
    assert held.manifest.records.sampled == train.manifest.records.sampled


def test_a_repair_a_dry_run_and_a_limit_need_no_flag(mix: Project) -> None:
    """A first look takes all of the first records: of twenty a small share is none."""
    planned = mix.convert("--dry-run", "--only", "commoncrawl").out
    assert "its share of 10,000 tokens is 5,220; estimated from 1 place of its source" in planned
    look = mix.run_all(only=["commoncrawl"], limit=20)["commoncrawl"].manifest
    assert (look.records.written, look.encoding.sample) == (20, None)
    plain = {"c4": documents("data/c4.jsonl")}
    says(mix, streams=plain, mix=None, absolute=None, budget=None)
    mix.convert_ok("--budget", "4k")
    published = mix.out / "c4/train"
    before, sample = read_files(published), manifest_of(published).encoding.sample
    (shard,) = published.glob("*.mds")
    shard.write_bytes(b"nothing")
    command = ("repair", published, "--recipe", mix.recipe)
    assert f"changed since (sample was {sample})" in mdsmix(*command).err
    run_ok(*command, f"streams.c4.sample={sample}")
    assert read_files(published) == before


def test_shares_are_of_the_whole_budget_or_normalised(project: Project) -> None:
    streams = {name: documents(f"data/{name}.jsonl") for name in ("c4", "wiki")}
    percents = ["mix.c4.share=75%", "mix.wiki.share=25%"]
    parts = ["mix.c4.share=30%", "mix.wiki.share=10%", "absolute=true"]
    given = {"c4": {"share": 3}, "wiki": {"share": 1}}
    for mix, overrides, wanted in (
        (given, [], (7_500, 2_500)),
        (given, percents, (7_500, 2_500)),
        (given, [*percents, "count=tokens"], (7_500, 2_500)),
        (given, parts, (3_000, 1_000)),
        ({"c4": {"share": 0.6}}, [], (6_000, 4_000)),
    ):
        says(project, streams=streams, mix=mix, absolute=None)
        opened = sample_by_budget(open_recipe(project.recipe, overrides))
        assert tuple(count_budget_tokens(opened, s) for s in opened.sourced) == wanted
    answer = says(project, streams=streams, mix=None, absolute=None).convert("--budget", "2k")
    none = "it has no share above 0 that is known before a conversion: write mix.c4.share"
    assert_refused(answer, 2, none)


REFUSED = {
    "--budget=": "it must be above 0, with its unit",
    "--budget=1M~samples": "it is 1,000,000 samples: set budget and count in tokens",
    "--budget=2~passes~of~c4": "it is 2 passes of c4",
    "mix.c4.share=0 --budget 2B": "it has no share above 0",
    "budget=null absolute=false mix.wiki.share=16.9%": "there is none: add budget",
    "streams.c4.split=val": "evaluated on",
    "streams.c4.expected_mean_tokens=0": "expected_mean_tokens is 0; it must be a number above 0",
    "streams.c4.source.text=body --only c4": "stream c4: the records that were read gave no token",
}  # fmt: skip


def test_what_no_budget_can_be_worked_out_from_is_one_sentence(mix: Project) -> None:
    for command, sentence in REFUSED.items():
        assert_refused(
            mix.convert(*(word.replace("~", " ") for word in command.split())), 2, sentence
        )


def test_the_expected_mean_is_held_against_what_is_found(project: Project) -> None:
    project.write_source(f"a b {n}" for n in range(8))
    totals = project.configure(documents("a.jsonl", layout="document")).run().manifest.totals
    mean = totals.tokens / 8
    near, far = (
        project.convert(f"streams.web.expected_mean_tokens={mean * f}").out for f in (1.04, 2)
    )
    assert "expected_mean_tokens" not in near
    assert f"mean of 8 records: {mean:,.1f} tokens, -50.0% of the expected" in far
    assert "up to date" in far


def various(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of 5 words to 400, most of them short."""
    rng = random.Random(seed)
    lengths = [5 + int(400 * rng.random() ** 3) for _ in range(count)]
    return [{"text": " ".join(rng.choices(WORDS, k=n)), "id": n} for n in lengths]


def estimated(project: Project, **stream: Any) -> SourceEstimate | None:
    path = "data/mds" if (project.folder / "data/mds").exists() else "data/*"
    opened = open_recipe(project.configure(documents(path, **stream)).recipe)
    job = make_job(opened, opened.streams["web"], open_tokenizer(opened.tokenizer), None)
    return estimate_source(job, sources.find_files([path], project.folder))


def test_files_of_any_format(project: Project) -> None:
    """Packed and columnar ones too, whose bytes on the disk say nothing, and of which a third is
    decoded.
    """
    project.patch.setattr(unit_plan, "BYTES", 150_000)
    expected = dict[int, int]()
    for suffix in ("jsonl", "jsonl.bz2", "parquet", "arrow", "tar.gz", "mds"):
        count = 300 if suffix == "mds" else 900
        shutil.rmtree(project.folder / "data", ignore_errors=True)
        write_records(project.folder / "data", suffix, various(count))
        found = estimated(project).tokens
        if count not in expected:  # whatever the format
            totals = project.run(reencode=True).manifest.totals
            expected[count] = totals.tokens + totals.lost_tokens
        assert found == pytest.approx(expected[count], rel=0.12), suffix


def test_one_file_more_changes_what_is_seen_of_one_at_most() -> None:
    at, stat = locate("/nowhere"), Stat(size=9, stamp="")
    names = [f"a/{n}.jsonl" for n in range(200)]
    files = [sources.SourceFile(location=at / name[2:], stat=stat, name=name) for name in names]
    all_but_one = {unit.name for unit in sources.choose_splits(files[1:])}
    seen = [unit.name for unit in sources.choose_splits(files)]
    assert len(all_but_one) == unit_plan.MOST_SPLITS
    assert len(all_but_one - {*seen}) <= 1
    moved = [replace(file, name=f"b/c/{file.name[2:]}") for file in files]
    assert [name[2:] for name in seen] == [u.name[4:] for u in sources.choose_splits(moved)]


def test_what_was_seen_is_remembered_until_it_changes(project: Project) -> None:
    project.write_source(various(50), "data/a.jsonl")
    first = estimated(project)
    with project.patch.context() as patched:
        patched.setattr(Survey, "read", None)
        assert estimated(project) == estimated(project, holdout="10%", sample="3%") == first
    project.write_source(various(80, 1), "data/a.jsonl")
    assert estimated(project) != first
    project.write_source([{"body": "nothing"}], "data/a.jsonl")
    assert estimated(project) is None
