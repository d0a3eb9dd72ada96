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
            "--accept-changed", help="Like --lock, but differences are only printed, not refused."
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

    Exit code 3: the streams may not be mixed.
    """
    from mdsmix.mix import check as checks
    from mdsmix.mix.epoch.apportion import describe_shares, make_shares_table
    from mdsmix.mix.lock_check import check_lock
    from mdsmix.mix.streams.resolve import resolve_mix
    from mdsmix.report.progress import watching
    from mdsmix.report.show import print_findings, show
    from mdsmix.table import table_to_json

    mix = resolve_mix(targets, estimate, own_evals=evals_mode(keep_evals, drop_evals))
    if deep:
        with watching() as watcher:
            mix = checks.verify_streams(mix, watcher)
    differences = list[Any]()
    lock_table = None
    if lock or accept_changed:
        differences, lock_table = check_lock(mix, targets, accept_changed)
    findings = checks.sort_by_severity([*checks.run_checks(mix), *differences])
    if as_json:
        tree = checks.make_report(mix, findings)
        if lock_table:
            tree["lock"] = {"streams": table_to_json(lock_table)["rows"]}
        echo_json(tree)
    else:
        print_findings(findings)
        if mix.shares:
            show(describe_shares(mix.shares), make_shares_table(mix.shares))
        show(checks.describe_verdict(mix, findings), checks.describe_coverage(mix))
        show(
            *(
                f"kept, but its streams were not opened: {label}"
                for label in checks.list_unopened_evals(mix)
            )
        )
        if lock_table:
            show(lock_table)
    if checks.is_refused(findings):
        raise typer.Exit(MixRefused.exit_code)
