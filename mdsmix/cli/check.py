"""`mdsmix check`: may these streams be mixed?"""

from __future__ import annotations

import typer

from mdsmix.cli.options import (
    AS_JSON,
    ESTIMATE,
    KEEP_EVALS,
    MIXES,
    echo_json,
    flag,
    own_evals_of,
)
from mdsmix.errors import MixRefused


def check(
    targets: list[str] = MIXES,
    deep: bool = flag("--deep", "Also read, hash and decode every shard, as `mdsmix verify` does."),
    estimate: bool = ESTIMATE,
    lock: bool = flag(
        "--lock",
        "For a TRAIN.yaml: also say of each stream whether it is published as its mix.lock names it.",
    ),
    accept_changed: bool = flag(
        "--accept-changed", "As --lock, but differences are only told and refuse nothing."
    ),
    keep_evals: bool = KEEP_EVALS,
    drop_evals: bool = flag("--drop-evals", "Leave a TRAIN.yaml's evaluations out of the check."),
    as_json: bool = AS_JSON,
) -> None:
    """Say whether streams may be mixed, from indexes, manifests and first samples. Exit code 3:
    they may not.
    """
    from mdsmix.mix import checking as checks
    from mdsmix.mix.apportion import shares_table, title
    from mdsmix.mix.lock_check import hold
    from mdsmix.mix.resolve import resolve
    from mdsmix.report.progress import watching
    from mdsmix.report.show import print_findings, show
    from mdsmix.table import as_json as rows_of

    mix = resolve(targets, estimate, own_evals=own_evals_of(keep_evals, drop_evals))
    if deep:
        with watching() as watcher:
            mix = checks.with_bytes_read(mix, watcher)
    differences, locked = (
        hold(mix, targets, accept_changed) if lock or accept_changed else ([], None)
    )
    findings = checks.in_order([*checks.findings(mix), *differences])
    if as_json:
        streams = {"lock": {"streams": rows_of(locked)["rows"]}} if locked else {}
        echo_json(checks.report(mix, findings) | streams)
    else:
        print_findings(findings)
        if mix.shares:
            show(title(mix.shares), shares_table(mix.shares))
        show(checks.verdict(mix, findings), checks.looked(mix))
        show(*(f"kept unseen: {label}" for label in checks.unseen(mix)))
        show(*filter(None, [locked]))
    if checks.is_refused(findings):
        raise typer.Exit(MixRefused.exit_code)
