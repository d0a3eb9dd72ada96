"""`mdsmix convert`: sources -> published streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdsmix.cli.completion import complete_converted
from mdsmix.cli.json_document import echo_json
from mdsmix.cli.options import (
    DATA,
    MACHINES,
    SAFETY,
    AsJson,
    LogFile,
    Memory,
    Overrides,
    QuarantineCrashes,
    Quiet,
    RecipeFile,
    Workers,
    echo,
)
from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from mdsmix.report.conversions import Conversion, ConvertedPart


def convert(
    recipe: RecipeFile,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STREAM",
            help="Convert only this stream; may be repeated.",
            autocompletion=complete_converted,
            rich_help_panel=DATA,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Convert only the first N records of each stream, published under "
            "<stream>/limit-N/.",
            rich_help_panel=DATA,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Convert only a sample of each stream, as large as the stream's share of TOKENS, "
            "e.g. 2B; every run chooses the same records, by their content.",
            rich_help_panel=DATA,
        ),
    ] = None,
    reencode: Annotated[
        bool,
        typer.Option(
            "--reencode",
            help="Allow replacing published streams that have other columns or sources.",
            rich_help_panel=SAFETY,
        ),
    ] = False,
    max_bad: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Publish nothing if a larger share of records is bad, e.g. 0.1%.",
            rich_help_panel=SAFETY,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be done and why.", rich_help_panel=SAFETY),
    ] = False,
    verify_source: Annotated[
        bool,
        typer.Option(
            "--verify-source",
            help="Read sources again even if their size and modification time are unchanged.",
            rich_help_panel=SAFETY,
        ),
    ] = False,
    verify_target: Annotated[
        bool,
        typer.Option(
            "--verify-target",
            help="Read and hash existing shards before they are reused; make damaged ones again.",
            rich_help_panel=SAFETY,
        ),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Do only part K of N of the work (K from 1), as one job of an array; publish "
            "nothing.",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish",
            help="Do the work that the parts left undone, join all parts and publish.",
            rich_help_panel=MACHINES,
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where the work runs: local (this machine), ray (a Ray cluster), or "
            "ray://HOST:PORT.",
            rich_help_panel=MACHINES,
        ),
    ] = "local",
    workers: Workers = None,
    memory: Memory = None,
    quarantine_crashes: QuarantineCrashes = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_file: LogFile = None,
) -> None:
    """Convert every stream of RECIPE that has a source, and publish it.

    Each stream is written to <remote or local>/<stream>/<split>/ with its index.json and manifest.

    Unchanged work is not done again. Bad records are written to quarantine/ and counted.
    """
    from mdsmix import api

    _refuse_contradictions(part, limit, engine, finish, dry_run, verify_target)

    # --dry-run: only print the plan.
    if dry_run:
        lines = api.plan_conversion(
            recipe,
            overrides or (),
            only=only or (),
            limit=limit,
            budget=budget,
            max_bad=max_bad,
            reencode=reencode,
            verify_source=verify_source,
            finish=finish,
        )
        if as_json:
            echo_json({"plan": lines})
        else:
            echo(*lines)
        return

    # --part K/N: convert a part of the work units, and publish nothing.
    if part is not None:
        with _show_at_end(part, quiet, as_json) as parts:
            api.convert_part(
                recipe,
                part,
                overrides or (),
                only=only or (),
                budget=budget,
                max_bad=max_bad,
                reencode=reencode,
                verify_source=verify_source,
                workers=workers,
                memory=memory,
                quarantine_crashes=quarantine_crashes,
                progress=not quiet,
                on_stream=parts.append,
            )
        if not (as_json or quiet):
            echo(
                "nothing is published yet: when all parts are done, run mdsmix convert RECIPE "
                "--finish"
            )
        return

    # Otherwise: convert and publish whole streams.
    with _show_at_end(None, quiet, as_json) as outcomes:
        api.convert(
            recipe,
            overrides or (),
            only=only or (),
            limit=limit,
            budget=budget,
            max_bad=max_bad,
            reencode=reencode,
            verify_source=verify_source,
            verify_target=verify_target,
            finish=finish,
            engine=engine,
            workers=workers,
            memory=memory,
            quarantine_crashes=quarantine_crashes,
            progress=not quiet,
            on_stream=outcomes.append,
        )


def _refuse_contradictions(
    part: str | None,
    limit: int | None,
    engine: str,
    finish: bool,
    dry_run: bool,
    verify_target: bool,
) -> None:
    """Raise RecipeError if options of the command cannot be combined. The arguments are options."""
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


@contextmanager
def _show_at_end(part_option: str | None, quiet: bool, as_json: bool) -> Iterator[list[Any]]:
    """Give a `with` block a list for the outcomes of streams, and show the list at its end. This is
    done after an error too, since the streams in the list are converted already.

    Args:
        part_option: the value of `--part`; None: whole streams are converted.
        quiet: the option `--quiet`.
        as_json: the option `--json`.
    """
    outcomes = list[Any]()
    try:
        yield outcomes
    finally:
        # Without outcomes only --json shows something. Ctrl-C may have broken off the import of
        # numpy, and a second import of it fails: "mdsmix itself failed".
        if outcomes or as_json:
            # Not at the top: `api.convert` begins to open the tokenizer before it imports this.
            from mdsmix.report.conversions import Conversion, ConvertedPart

            if part_option is None:
                _print(Conversion(tuple(outcomes)), quiet, as_json)
            else:
                _print(ConvertedPart(part_option, tuple(outcomes)), quiet, as_json)


def _print(result: Conversion | ConvertedPart, quiet: bool, as_json: bool) -> None:
    """Print what was converted. The log has the table in any case."""
    from mdsmix.report.show import log_items, show

    if as_json:
        echo_json(result.to_dict())
        log_items(*result.items())
    elif quiet:
        echo(*result.warnings, err=True, is_logged=False)
        log_items(*result.items())
    else:
        show(*result.items())
