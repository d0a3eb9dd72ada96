"""`mdsmix check`: may these streams be mixed?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mdsmix.cli.options import (
    AsJson,
    Estimate,
    KeepEvals,
    MixTargets,
    echo_json,
    evals_mode,
)
from mdsmix.errors import MixRefused


def check(
    targets: MixTargets,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also read, hash and decode every shard, as `mdsmix verify` does."
        ),
    ] = False,
    estimate: Estimate = False,
    lock: Annotated[
        bool,
        typer.Option(
            "--lock",
            help="For a TRAIN.yaml: also compare each published stream with its mix.lock.",
        ),
    ] = False,
    accept_changed: Annotated[
        bool,
        typer.Option(
            "--accept-changed", help="As --lock, but differences are only printed, not refused."
        ),
    ] = False,
    keep_evals: KeepEvals = False,
    drop_evals: Annotated[
        bool,
        typer.Option("--drop-evals", help="Leave a TRAIN.yaml's evaluations out of the check."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether streams may be mixed, from indexes, manifests and first samples.

    Exit code 3: they may not.
    """
    from mdsmix.mix import check as checks
    from mdsmix.mix.apportion import shares_table, title
    from mdsmix.mix.lock_check import hold
    from mdsmix.mix.resolve import resolve
    from mdsmix.report.progress import watching
    from mdsmix.report.show import print_findings, show
    from mdsmix.table import as_json as rows_of

    mix = resolve(targets, estimate, own_evals=evals_mode(keep_evals, drop_evals))
    if deep:
        with watching() as watcher:
            mix = checks.with_bytes_read(mix, watcher)
    differences = list[Any]()
    locked = None
    if lock or accept_changed:
        differences, locked = hold(mix, targets, accept_changed)
    findings = checks.in_order([*checks.findings(mix), *differences])
    if as_json:
        tree = checks.report(mix, findings)
        if locked:
            tree["lock"] = {"streams": rows_of(locked)["rows"]}
        echo_json(tree)
    else:
        print_findings(findings)
        if mix.shares:
            show(title(mix.shares), shares_table(mix.shares))
        show(checks.verdict(mix, findings), checks.looked(mix))
        show(*(f"kept unseen: {label}" for label in checks.unseen(mix)))
        if locked:
            show(locked)
    if checks.is_refused(findings):
        raise typer.Exit(MixRefused.exit_code)
