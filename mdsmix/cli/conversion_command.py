"""What `mdsmix convert` does: sources -> published streams.

A command line without options needs no Typer, so `main.py` then calls `run_conversion` itself
(`parse_without_typer`). Functions that most conversions do not call import Typer when they run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.cli.json_document import echo_json
from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from mdsmix.report.conversions import Conversion, ConvertedPart


def parse_without_typer(words: Sequence[str]) -> tuple[Path, list[str]] | None:
    """Return the recipe and the overrides of `mdsmix convert RECIPE [KEY=VALUE]...`. Return None if
    Typer must parse the words: if there are options, or if Typer would refuse the recipe, as it
    does if a file is not readable.

    Importing Typer and making the options of the command takes 15 of 170 ms of CPU before the first
    worker starts.

    Args:
        words: the words of the command line after `convert`.
    """
    if not words or "_MDSMIX_COMPLETE" in os.environ:
        return None
    if any(word.startswith("-") for word in words):
        return None
    recipe = words[0]
    if not (os.path.isfile(recipe) and os.access(recipe, os.R_OK)):
        return None
    return Path(recipe), list(words[1:])


def run_conversion(
    recipe: Path,
    overrides: list[str] | None = None,
    only: list[str] | None = None,
    limit: int | None = None,
    budget: str | None = None,
    reencode: bool = False,
    max_bad: str | None = None,
    dry_run: bool = False,
    verify_source: bool = False,
    verify_target: bool = False,
    part: str | None = None,
    finish: bool = False,
    engine: str = "local",
    workers: int | None = None,
    memory: str | None = None,
    quarantine_crashes: bool = False,
    quiet: bool = False,
    as_json: bool = False,
    log_file: str | None = None,
) -> None:
    """Convert the streams of a recipe, or a part of them, or show the plan, and print the result.
    The arguments are those of the command (convert.py); `log_file` is open already.
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
            from mdsmix.cli.options import echo

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
            from mdsmix.cli.options import echo

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
        from mdsmix.cli.options import echo

        echo(*result.warnings, err=True, is_logged=False)
        log_items(*result.items())
    else:
        show(*result.items())
