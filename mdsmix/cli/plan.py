"""`mdsmix plan`: the figures of a run, before it is paid for."""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.options import (
    AsJson,
    GlobalBatch,
    Gpus,
    Nodes,
    echo_json,
)
from mdsmix.errors import MixRefused
from mdsmix.messages import plural


def plan(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | TRAIN.yaml",
            help="A recipe (key=value overrides may follow), converted or not, or a training YAML.",
            show_default=False,
        ),
    ],
    nodes: Nodes = 1,
    gpus: Gpus = 8,
    batch: GlobalBatch = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT",
            help="Tokens of the whole run, without padding, e.g. 100B.",
            show_default="max_duration of the YAML, else one epoch",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk space for shards on each node, e.g. 500gb."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            "--tokens-per-second",
            metavar="N",
            min=1,
            help="Tokens per second of all devices together, with padding: adds the hours.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast a run: tokens, padding, steps, the bytes that each node fetches and keeps, and the
    settings to use.

    Figures come from indexes and manifests, and for streams that are not converted yet from a
    survey of their sources.
    """
    from mdsmix.mix.plan.plan import PlanOptions, find_plan_problems, make_plan, resolve_for_plan
    from mdsmix.report.planned_run import plan_json, show_plan
    from mdsmix.report.show import print_findings, show

    options = PlanOptions(
        nodes=nodes, gpus=gpus, batch=batch, tokens=tokens, disk=disk, speed=speed
    )
    mix = resolve_for_plan(targets)
    errors = find_plan_problems(mix)
    if errors:
        print_findings(errors, to_stderr=True)
        raise MixRefused(
            f"the mix has {plural(len(errors), 'error')}, so it cannot be trained and nothing was "
            "planned."
        )
    planned = make_plan(mix, options)
    if as_json:
        echo_json(plan_json(planned))
    else:
        show(*show_plan(planned))
