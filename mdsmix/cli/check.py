"""`mdsmix check`: may these streams be mixed?"""

from __future__ import annotations

import typer

from mdsmix.cli.options import (
    AS_JSON,
    ESTIMATE,
    MIXES,
    echo,
    echo_json,
    flag,
)
from mdsmix.errors import MixRefused, RecipeError


def check(
    targets: list[str] = MIXES,
    deep: bool = flag("--deep", "Also read, hash and decode every shard, as `mdsmix verify` does."),
    estimate: bool = ESTIMATE,
    lock: bool = flag(
        "--lock",
        "Of a TRAIN.yaml: also say, stream by stream, whether what is published is what its mix.lock names.",
    ),
    accept_changed: bool = flag(
        "--accept-changed", "With --lock: what differs is told, and refuses nothing."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Say whether streams may be mixed, from indexes, manifests and first samples. Exit code 3: they may not."""
    from mdsmix.mix import checking as checks
    from mdsmix.mix.apportion import shares_table, title
    from mdsmix.mix.lock_check import hold
    from mdsmix.mix.resolve import resolve
    from mdsmix.report.progress import watching
    from mdsmix.report.show import print_findings, show

    if accept_changed and not lock:
        raise RecipeError("--accept-changed says what becomes of a lock: add --lock.")
    mix = resolve(targets, estimate)
    if deep:
        with watching() as watcher:
            mix = checks.with_bytes_read(mix, watcher)
    compared = hold(mix, targets, accept_changed) if lock else None
    findings = checks.in_order([*checks.findings(mix), *(compared.findings if compared else ())])
    if as_json:
        locked = {"lock": {"streams": compared.streams}} if compared else {}
        echo_json(checks.report(mix, findings) | locked)
    else:
        print_findings(findings)
        if mix.shares:
            show(title(mix.shares), shares_table(mix.shares))
        lines = compared.lines if compared else ()
        echo(checks.verdict(mix, findings), checks.looked(mix), *lines)
    if checks.is_refused(findings):
        raise typer.Exit(MixRefused.exit_code)
