"""`mdsmix check`: may these streams be mixed?"""

from __future__ import annotations

from typing import Annotated, Optional

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
    evaluations: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--eval",
            metavar="STREAM",
            help="Say what share of this evaluation stands in the mix, beside those of the YAML; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether streams may be mixed, from indexes, manifests and first samples. Exit code 3: they may not."""
    from mdsmix.errors import RecipeError
    from mdsmix.mix.check import as_json as report
    from mdsmix.mix.check import findings, in_order, is_refused, looked, verdict, with_bytes_read
    from mdsmix.mix.lock import hold
    from mdsmix.mix.overlap import find_overlap, overlap_json, said
    from mdsmix.mix.overlap import findings as shared
    from mdsmix.mix.view import view, view_streams
    from mdsmix.report.findings import print_findings
    from mdsmix.report.progress import watching
    from mdsmix.report.shares import print_shares

    mix = view(targets, estimate)
    if deep:
        with watching() as watcher:
            mix = with_bytes_read(mix, watcher)
    held = hold(mix, targets, accept_changed) if lock else None
    if accept_changed and not held:
        raise RecipeError("--accept-changed says what becomes of a lock: add --lock.")
    overlap = find_overlap(mix, view_streams(evaluations).train.streams if evaluations else ())
    found = in_order([*findings(mix), *(held.findings if held else ()), *shared(overlap)])
    if as_json:
        locked = {"lock": {"streams": held.streams}} if held else {}
        echo_json(report(mix, found) | {"overlap": overlap_json(overlap)} | locked)
    else:
        print_findings(found)
        if mix.shares:
            print_shares(mix.shares)
        held_lines = held.lines if held else ()
        echo(verdict(mix, found), looked(mix), *said(overlap), *held_lines)
    if is_refused(found):
        raise typer.Exit(REFUSED)
