"""`mdsmix check`: may these streams be mixed?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mdsmix.cli.options import AsJson, Estimated, echo, echo_json
from mdsmix.words import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mdsmix.mix.findings import Finding

REFUSED = 3


def check(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | TRAIN.yaml | STREAM...",
            help="A recipe (key=value overrides may follow), a training YAML, or folders and s3:// URLs of published streams.",
            show_default=False,
        ),
    ],
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also read, hash and decode every shard, as `mdsmix verify` does."
        ),
    ] = False,
    estimate: Estimated = False,
    as_json: AsJson = False,
) -> None:
    """Say whether streams may be mixed, from indexes, manifests and first samples. Exit code 3: they may not."""
    from mdsmix.mix.check import as_json as report
    from mdsmix.mix.check import findings, is_refused, looked, verdict, with_bytes_read
    from mdsmix.mix.view import view
    from mdsmix.report.progress import watching
    from mdsmix.report.shares import print_shares

    mix = view(targets, estimate)
    if deep:
        with watching() as watcher:
            mix = with_bytes_read(mix, watcher)
    found = findings(mix)
    if as_json:
        echo_json(report(mix, found))
    else:
        print_findings(found)
        if mix.shares:
            print_shares(mix.shares)
        echo(verdict(mix, found), looked(mix))
    if is_refused(found):
        raise typer.Exit(REFUSED)


def print_findings(found: Sequence[Finding], to_stderr: bool = False) -> None:
    """One line a finding; on a terminal its parts stand out."""
    import sys

    if not (sys.stderr if to_stderr else sys.stdout).isatty():
        for finding in found:
            echo(str(finding), err=to_stderr)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=to_stderr, highlight=False)
    colours = {"error": "bold red", "warning": "yellow", "note": "cyan"}
    for finding in found:
        whose = f" [{', '.join(finding.streams)}]" if finding.streams else ""
        line = Text.assemble(
            (printable(f"{finding.severity} {finding.id}{whose}"), colours[finding.severity]),
            f"\n  {printable(f'{finding.message} {finding.why}')}\n  ",
            ("Fix: ", "bold"),
            printable(finding.fix),
        )
        console.print(line)
