"""`mdsmix check`: may these streams be mixed?"""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.options import AsJson, Estimated, Mixes, echo, echo_json

REFUSED = 3


def check(
    targets: Mixes,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also read, hash and decode every shard, as `mdsmix verify` does."
        ),
    ] = False,
    estimate: Estimated = False,
    lock: Annotated[
        bool,
        typer.Option(
            "--lock",
            help="Of a TRAIN.yaml: also say, stream by stream, whether what is published is what its mix.lock names.",
        ),
    ] = False,
    accept_changed: Annotated[
        bool,
        typer.Option(
            "--accept-changed",
            help="With --lock: what differs is told, and refuses nothing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether streams may be mixed, from indexes, manifests and first samples. Exit code 3: they may not."""
    from mdsmix.errors import RecipeError
    from mdsmix.mix.check import (
        findings,
        in_order,
        is_refused,
        looked,
        report,
        verdict,
        with_bytes_read,
    )
    from mdsmix.mix.lock_check import hold
    from mdsmix.mix.resolve import resolve
    from mdsmix.mix.shares_table import shares_table, title
    from mdsmix.report.findings import print_findings
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show

    mix = resolve(targets, estimate)
    if deep:
        with watching() as watcher:
            mix = with_bytes_read(mix, watcher)
    held = hold(mix, targets, accept_changed) if lock else None
    if accept_changed and not held:
        raise RecipeError("--accept-changed says what becomes of a lock: add --lock.")
    found = in_order([*findings(mix), *(held.findings if held else ())])
    if as_json:
        locked = {"lock": {"streams": held.streams}} if held else {}
        echo_json(report(mix, found) | locked)
    else:
        print_findings(found)
        if mix.shares:
            show(title(mix.shares), shares_table(mix.shares))
        held_lines = held.lines if held else ()
        echo(verdict(mix, found), looked(mix), *held_lines)
    if is_refused(found):
        raise typer.Exit(REFUSED)
