"""`mdsmix convert`: sources -> published streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

import typer

from mdsmix.cli.options import (
    AsJson,
    Memory,
    Overrides,
    QuarantineCrashes,
    Quiet,
    RecipePath,
    Workers,
    echo,
    echo_each,
    echo_json,
    stream_names,
)
from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from mdsmix.convert.outcome import Outcome, Watcher
    from mdsmix.convert.parts import PartOutcome
    from mdsmix.convert.planning import Options
    from mdsmix.recipe import Recipe
    from mdsmix.report.show import Item

T = TypeVar("T")


def convert(
    recipe: RecipePath,
    overrides: Overrides = None,
    only: Annotated[
        Optional[list[str]],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            metavar="STREAM",
            help="Convert this stream only; may be repeated.",
            autocompletion=stream_names,
            rich_help_panel="What",
        ),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            metavar="N",
            help="Only the first N records of each stream, published under <stream>/limit-N/.",
            rich_help_panel="What",
        ),
    ] = None,
    budget: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="TOKENS",
            help="Of each stream only what its share of so many tokens wants, e.g. 2B: a sample by what records say.",
            rich_help_panel="What",
        ),
    ] = None,
    reencode: Annotated[
        bool,
        typer.Option(
            "--reencode",
            help="Allow replacing published streams whose columns or sources are others.",
            rich_help_panel="What",
        ),
    ] = False,
    max_bad: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SHARE",
            help="Publish nothing where more records are bad, e.g. 0.1%.",
            rich_help_panel="What",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be done and why.", rich_help_panel="How"),
    ] = False,
    verify_source: Annotated[
        bool,
        typer.Option(
            "--verify-source",
            help="Read sources again even where size and modification time are as they were.",
            rich_help_panel="How",
        ),
    ] = False,
    verify_target: Annotated[
        bool,
        typer.Option(
            "--verify-target",
            help="Read and hash the shards that are there before they are reused; make damaged ones anew.",
            rich_help_panel="How",
        ),
    ] = False,
    part: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="K/N",
            help="Do the K-th of N parts of the work, from 1, as one job of an array; publish nothing.",
            rich_help_panel="How",
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish",
            help="Do what the parts have not done, join all, publish.",
            rich_help_panel="How",
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who does the work: local, ray, or ray://HOST:PORT.",
            rich_help_panel="How",
        ),
    ] = "local",
    workers: Workers = None,
    memory: Memory = None,
    quarantine_crashes: QuarantineCrashes = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Convert every stream of RECIPE that has a source, and publish it.

    Each stream lands under <remote or local>/<stream>/<split>/ with its index.json and manifest.

    What is unchanged is not done again; bad records are set aside in quarantine/ and counted.
    """
    from mdsmix.convert.dry_run import describe
    from mdsmix.convert.planning import Options
    from mdsmix.engines.memory import bytes_of
    from mdsmix.kinds import open_recipe

    if part is not None and (finish or dry_run or verify_target or limit):
        raise RecipeError(
            "--part does a part of the work units and publishes nothing, so --finish, --dry-run, --verify-target and --limit "
            "do not go with it: leave them to the run that finishes."
        )
    if part is not None and engine != "local":
        raise RecipeError(
            "--part is one job of an array, which does its units on its own machine: leave --engine out, or leave --part out, since a "
            "cluster shares the units out by itself."
        )
    if dry_run and verify_target:
        raise RecipeError(
            "--dry-run does not look into shards, so it cannot say what --verify-target would do: mdsmix verify RECIPE says "
            "which shards are damaged."
        )
    bound = [] if max_bad is None else [f'max_bad="{max_bad}"']
    loaded = open_recipe(recipe, [*(overrides or ()), *bound, *_budget(budget)])
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
        is_finish=finish,
        engine=engine,
    )
    if part is not None:
        _convert_part(loaded, options, part, quiet, as_json)
    elif not dry_run:
        _convert(loaded, options, quiet, as_json)
        if limit is None and not as_json and not quiet:
            _offer_report(recipe, overrides or ())
    elif as_json:
        echo_json({"plan": list(describe(loaded, options))})
    else:
        echo(*describe(loaded, options))


def _budget(written: str | None) -> list[str]:
    """The override of the recipe's budget; a number alone is tokens."""
    from mdsmix.recipe.amounts import bare_budget

    if written is None:
        return []
    try:
        return [f'budget="{bare_budget(written)}"']
    except ValueError as error:
        raise RecipeError(
            f"--budget is {written!r}; {error}; a number alone, 2B, is tokens."
        ) from None


def _sampled(recipe: Recipe, quiet: bool) -> Recipe:
    """The recipe with `sample: budget` on every training stream. A stream that takes something else is told on stderr."""
    from mdsmix.recipe.amounts import BY_BUDGET, sample_contradictions, with_budget

    sampled = with_budget(recipe)
    for stream in sampled.sourced:
        for sentence in sample_contradictions(sampled, stream):
            raise RecipeError(f"--budget: streams.{stream.name}: {sentence}")
        if stream.sample != BY_BUDGET and not quiet:
            taken = (
                f"sample: {stream.sample} of it"
                if stream.sample
                else f"all of it, a {stream.split} split"
            )
            echo(f"{stream.name}: --budget leaves it as the recipe says: {taken}", err=True)
    return sampled


def _convert(recipe: Recipe, options: Options, quiet: bool, as_json: bool) -> None:
    from mdsmix.convert.run import convert
    from mdsmix.report.summary import summary, summary_json, warnings

    def start(watcher: Watcher) -> Iterator[Outcome]:
        return convert(recipe, options, watcher)

    _run(start, quiet, as_json, summary_json, lambda done: [summary(done)], warnings)


def _convert_part(recipe: Recipe, options: Options, text: str, quiet: bool, as_json: bool) -> None:
    from mdsmix.convert.parts import parse
    from mdsmix.convert.run import convert_part
    from mdsmix.report.summary import part_warnings, parts_json, parts_shown

    part = parse(text)

    def start(watcher: Watcher) -> Iterator[PartOutcome]:
        return convert_part(recipe, options, watcher, part)

    _run(start, quiet, as_json, partial(parts_json, part), parts_shown, part_warnings)
    if not (as_json or quiet):
        echo("nothing is published yet: when all parts have ended, mdsmix convert RECIPE --finish")


def _run(
    start: Callable[[Watcher], Iterator[T]],
    quiet: bool,
    as_json: bool,
    tree: Callable[[list[T]], Any],
    shown: Callable[[list[T]], Iterable[Item]],
    warnings: Callable[[list[T]], Iterable[str]],
) -> None:
    """Runs the streams and shows those that are done, even if a later one fails."""
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show

    outcomes: list[T] = []
    try:
        with watching(quiet) as watcher:
            for outcome in start(watcher):
                outcomes.append(outcome)
    finally:
        if as_json:
            echo_json(tree(outcomes))
        elif quiet:
            echo_each(warnings(outcomes))
        elif outcomes:
            show(*shown(outcomes))


def _offer_report(recipe: Path, overrides: Sequence[str]) -> None:
    """Prints the command that makes a page of the mix, on a terminal alone."""
    import shlex
    import sys

    if sys.stdout.isatty():
        echo(f"look at it: {shlex.join(['mdsmix', 'report', str(recipe), *overrides, '-o', 'report.html'])}")  # fmt: skip
