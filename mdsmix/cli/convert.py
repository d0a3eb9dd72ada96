"""`mdsmix convert`: sources -> published streams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdsmix.cli.options import (
    AsJson,
    Memory,
    Overrides,
    QuarantineCrashes,
    Quiet,
    RecipeFile,
    Workers,
    echo,
    echo_json,
)
from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from mdsmix.conversion.planning import Options
    from mdsmix.recipe import Recipe


def convert(
    recipe: RecipeFile,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="STREAM", help="Convert only this stream; may be repeated."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Convert only the first N records of each stream, published under "
            "<stream>/limit-N/.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Convert only a sample of each stream, as large as the stream's share of TOKENS, "
            "e.g. 2B; every run chooses the same records, by their content.",
        ),
    ] = None,
    reencode: Annotated[
        bool,
        typer.Option(
            "--reencode",
            help="Allow replacing published streams that have other columns or sources.",
        ),
    ] = False,
    max_bad: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Publish nothing if a larger share of records is bad, e.g. 0.1%."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done and why.")
    ] = False,
    verify_source: Annotated[
        bool,
        typer.Option(
            "--verify-source",
            help="Read sources again even if their size and modification time are unchanged.",
        ),
    ] = False,
    verify_target: Annotated[
        bool,
        typer.Option(
            "--verify-target",
            help="Read and hash existing shards before they are reused; make damaged ones again.",
        ),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Do only part K of N of the work (K from 1), as one job of an array; publish "
            "nothing.",
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish", help="Do the work that the parts left undone, join all parts and publish."
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where the work runs: local (this machine), ray (a Ray cluster), or "
            "ray://HOST:PORT.",
        ),
    ] = "local",
    workers: Workers = None,
    memory: Memory = None,
    quarantine_crashes: QuarantineCrashes = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Convert every stream of RECIPE that has a source, and publish it.

    Each stream is written to <remote or local>/<stream>/<split>/ with its index.json and manifest.

    Unchanged work is not done again. Bad records are written to quarantine/ and counted.
    """
    from mdsmix.conversion.planning import Options, describe_plans, parse_part
    from mdsmix.engines.memory import parse_memory_option
    from mdsmix.kinds import open_recipe
    from mdsmix.recipe.amounts import add_unit

    if part is not None and (finish or dry_run or verify_target or limit or engine != "local"):
        raise RecipeError(
            "--part only does a part of the work units, on this machine, and publishes nothing, so "
            "it cannot be combined with --finish, --dry-run, --verify-target, --limit or --engine: "
            "leave those options or --part out."
        )
    if dry_run and verify_target:
        raise RecipeError(
            "--dry-run does not read shards, so it cannot predict what --verify-target would do: "
            "run `mdsmix verify RECIPE`, which lists damaged shards."
        )
    settings = list(overrides or ())
    if max_bad is not None:
        settings.append(f"max_bad={json.dumps(max_bad)}")
    if budget is not None:
        settings.append(f"budget={json.dumps(add_unit(budget))}")
    loaded = open_recipe(recipe, settings)
    if budget is not None:
        loaded = _sampled(loaded, quiet)
    options = Options(
        only=only or (),
        limit=limit,
        reencode=reencode,
        workers=workers,
        memory=None if memory is None else parse_memory_option(memory),
        quarantine_crashes=quarantine_crashes,
        verify_source=verify_source,
        verify_target=verify_target,
        part=None if part is None else parse_part(part),
        is_finish=finish,
        engine=engine,
    )
    if dry_run:
        lines = list(describe_plans(loaded, options))
        if as_json:
            echo_json({"plan": lines})
        else:
            echo(*lines)
        return
    _run(loaded, options, quiet, as_json)


def _sampled(recipe: Recipe, quiet: bool) -> Recipe:
    """Return the recipe with `sample: budget` set for its training streams that set no `sample`.

    Print on stderr how the other streams are converted, unless `quiet`.
    Raises RecipeError if a setting of a stream contradicts its sample.
    """
    from mdsmix.recipe.rules import find_sample_contradictions, sample_by_budget
    from mdsmix.recipe.stream_spec import BY_BUDGET

    sampled = sample_by_budget(recipe)
    for stream in sampled.sourced:
        contradictions = list(find_sample_contradictions(sampled, stream))
        if contradictions:
            raise RecipeError(f"--budget cannot sample streams.{stream.name}: {contradictions[0]}")
        if stream.sample != BY_BUDGET and not quiet:
            amount = f"sample: {stream.sample}" if stream.sample else "all of it"
            echo(
                f"stream {stream.name} is not sampled by --budget; the recipe converts {amount}",
                err=True,
            )
    return sampled


def _run(recipe: Recipe, options: Options, quiet: bool, as_json: bool) -> None:
    """Convert the streams of a recipe, or with --part a part of the work, and print the result.

    The finished streams are shown even if a later stream fails.
    """
    from mdsmix.conversion import run
    from mdsmix.report.conversions import list_warnings, show_conversion, show_parts
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show

    part = options.part
    outcomes = list[Any]()
    try:
        with watching(quiet) as watcher:
            conversion = run.convert_part if part else run.convert
            outcomes.extend(conversion(recipe, options, watcher))
    finally:
        if part:
            shown, tree = show_parts(part, outcomes)
        else:
            shown, tree = show_conversion(outcomes)
        if as_json:
            echo_json(tree)
        elif quiet:
            echo(*list_warnings(outcomes), err=True)
        elif outcomes:
            show(*shown)
    if part and not (as_json or quiet):
        echo(
            "nothing is published yet: when all parts are done, run mdsmix convert RECIPE --finish"
        )
