"""`mdsmix convert`: sources -> published streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.cli.options import (
    AS_JSON,
    MEMORY,
    OVERRIDES,
    QUARANTINE_CRASHES,
    QUIET,
    RECIPE,
    WORKERS,
    Number,
    Text,
    Texts,
    echo,
    echo_json,
    flag,
    option,
)
from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from mdsmix.convert.planning import Options
    from mdsmix.recipe import Recipe


def convert(
    recipe: Path = RECIPE,
    overrides: Texts = OVERRIDES,
    only: Texts = option(None, "Convert this stream only; may be repeated.", "STREAM"),
    limit: Number = option(
        None,
        "Only the first N records of each stream, published under <stream>/limit-N/.",
        "N",
        least=1,
    ),
    budget: Text = option(
        None,
        "Of each stream only a sample as large as its share of TOKENS, e.g. 2B; records' contents decide which.",
        "TOKENS",
    ),
    reencode: bool = flag(
        "--reencode", "Allow replacing published streams that have other columns or sources."
    ),
    max_bad: Text = option(None, "Publish nothing where more records are bad, e.g. 0.1%.", "SHARE"),
    dry_run: bool = flag("--dry-run", "Say what would be done and why."),
    verify_source: bool = flag(
        "--verify-source",
        "Read sources again even where size and modification time are as they were.",
    ),
    verify_target: bool = flag(
        "--verify-target",
        "Read and hash the shards that are there before they are reused; make damaged ones anew.",
    ),
    part: Text = option(
        None,
        "Do the K-th of N parts of the work, from 1, as one job of an array; publish nothing.",
        "K/N",
    ),
    finish: bool = flag("--finish", "Do what the parts have not done, join all, publish."),
    engine: str = option("local", "Who does the work: local, ray, or ray://HOST:PORT.", "NAME"),
    workers: Number = WORKERS,
    memory: Text = MEMORY,
    quarantine_crashes: bool = QUARANTINE_CRASHES,
    quiet: bool = QUIET,
    as_json: bool = AS_JSON,
) -> None:
    """Convert every stream of RECIPE that has a source, and publish it.

    Each stream lands under <remote or local>/<stream>/<split>/ with its index.json and manifest.

    Unchanged work is not done again. Bad records are set aside in quarantine/ and counted.
    """
    from mdsmix.convert.planning import Options, describe, part_of
    from mdsmix.engines.memory import bytes_of
    from mdsmix.kinds import open_recipe
    from mdsmix.recipe.amounts import with_unit

    if part is not None and (finish or dry_run or verify_target or limit or engine != "local"):
        raise RecipeError(
            "--part does a part of the work units on its own machine and publishes nothing: leave --finish, --dry-run, "
            "--verify-target, --limit and --engine out, or leave --part out."
        )
    if dry_run and verify_target:
        raise RecipeError(
            "--dry-run does not look into shards, so it cannot say what --verify-target would do: mdsmix verify RECIPE says "
            "which shards are damaged."
        )
    bound = [] if max_bad is None else [f'max_bad="{max_bad}"']
    bound += [] if budget is None else [f'budget="{with_unit(budget)}"']
    loaded = open_recipe(recipe, [*(overrides or ()), *bound])
    if budget is not None:
        loaded = _sampled(loaded, quiet)
    options = Options(
        only=only or (),
        limit=limit,
        reencode=reencode,
        workers=workers,
        memory=None if memory is None else bytes_of(memory),
        quarantine_crashes=quarantine_crashes,
        verify_source=verify_source,
        verify_target=verify_target,
        part=None if part is None else part_of(part),
        is_finish=finish,
        engine=engine,
    )
    if dry_run:
        lines = list(describe(loaded, options))
        echo_json({"plan": lines}) if as_json else echo(*lines)
        return
    _run(loaded, options, quiet, as_json)


def _sampled(recipe: Recipe, quiet: bool) -> Recipe:
    """The recipe with `sample: budget` on its training streams. A stream that keeps another sample
    is named on stderr.
    """
    from mdsmix.recipe.rules import sample_contradictions, with_budget
    from mdsmix.recipe.stream_spec import BY_BUDGET

    sampled = with_budget(recipe)
    for stream in sampled.sourced:
        for sentence in sample_contradictions(sampled, stream):
            raise RecipeError(f"--budget: streams.{stream.name}: {sentence}")
        if stream.sample != BY_BUDGET and not quiet:
            taken = f"sample: {stream.sample}" if stream.sample else "all"
            echo(f"{stream.name}: --budget leaves it as the recipe says: {taken} of it", err=True)
    return sampled


def _run(recipe: Recipe, options: Options, quiet: bool, as_json: bool) -> None:
    """Converts the streams, or a part of the work, and shows the finished streams, even if a later
    stream fails.
    """
    from mdsmix.convert.run import convert
    from mdsmix.report.conversions import parts_result, result, warnings
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show

    part, outcomes = options.part, list[Any]()
    try:
        with watching(quiet) as watcher:
            outcomes.extend(convert(recipe, options, watcher))
    finally:
        shown, tree = parts_result(part, outcomes) if part else result(outcomes)
        if as_json:
            echo_json(tree)
        elif quiet:
            echo(*warnings(outcomes), err=True)
        elif outcomes:
            show(*shown)
    if part and not (as_json or quiet):
        echo("nothing is published yet: when all parts have ended, mdsmix convert RECIPE --finish")
