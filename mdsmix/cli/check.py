"""`mdsmix check`: may these streams be mixed?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mdsmix.cli.options import AsJson, Estimated, Mixes, echo, echo_json

if TYPE_CHECKING:
    from mdsmix.mix.lock import Held

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
            help="With --lock: what differs refuses nothing; say what a resume would repeat.",
        ),
    ] = False,
    at: Annotated[
        Optional[int],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            "--at",
            min=0,
            metavar="SAMPLES",
            help="With --accept-changed: samples of the epoch that are behind the resume.",
            show_default="half of the epoch",
        ),
    ] = None,
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
    if not held and (accept_changed or at is not None):
        raise RecipeError("--accept-changed and --at say what becomes of a lock: add --lock.")
    overlap = find_overlap(mix, view_streams(evaluations).train.streams if evaluations else ())
    found = in_order([*findings(mix), *(held.findings if held else ()), *shared(overlap)])
    told = repeated(held, at) if held and accept_changed else ()
    if as_json:
        locked = {"lock": {"streams": held.streams, "repeats": list(told)}} if held else {}
        echo_json(report(mix, found) | {"overlap": overlap_json(overlap)} | locked)
    else:
        print_findings(found)
        if mix.shares:
            print_shares(mix.shares)
        held_lines = held.lines if held else ()
        echo(verdict(mix, found), looked(mix), *said(overlap), *held_lines, *told)
    if is_refused(found):
        raise typer.Exit(REFUSED)


def repeated(held: Held, at: int | None) -> list[str]:
    """What a resume within the first epoch would do, a sentence a stream; torch is imported only where something differs."""
    if not any(finding.id == "lock-differs" for finding in held.findings):
        return []
    from mdsmix.load.resuming import repeats_after

    return repeats_after(held.was.loaders["train_loader"], held.now.loaders["train_loader"], at)
