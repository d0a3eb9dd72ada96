"""`mdsmix plan`: the figures of a run, before it is paid for."""

from __future__ import annotations

from typing import Optional

from mdsmix.cli.options import (
    AS_JSON,
    BATCH,
    GPUS,
    NODES,
    ROWS,
    Number,
    Text,
    argument,
    echo_json,
    option,
)
from mdsmix.errors import MixRefused
from mdsmix.words import plural


def plan(
    targets: list[str] = argument(
        "RECIPE | TRAIN.yaml",
        "A recipe (key=value overrides may follow), converted or not, or a training YAML.",
    ),
    nodes: int = NODES,
    gpus: int = GPUS,
    batch: Number = option(None, ROWS, "N", least=1, shown=BATCH),
    tokens: Text = option(
        None,
        "How long the run is, e.g. 100B, padding not counted.",
        "COUNT",
        shown="max_duration of the YAML, else one epoch",
    ),
    disk: Text = option(None, "Disk that a node has for shards, e.g. 500gb.", "SIZE"),
    speed: Optional[float] = option(  # noqa: UP045
        None,
        "Tokens a second of all devices together, padding counted: then the hours are told.",
        "N",
        "--tokens-per-second",
        least=1,
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Forecast a run: tokens, padding, steps, the bytes that each node fetches and keeps, and the
    settings to use.

    Figures come from indexes and manifests, and for streams that are not converted yet from a
    survey of their sources.
    """
    from mdsmix.mix.plan.make import PlanOptions, make_plan, problems, resolve_for_plan
    from mdsmix.report.planned_run import plan_json, plan_shown
    from mdsmix.report.show import print_findings, show

    asked = PlanOptions(nodes=nodes, gpus=gpus, batch=batch, tokens=tokens, disk=disk, speed=speed)
    mix = resolve_for_plan(targets)
    if errors := problems(mix):
        print_findings(errors, to_stderr=True)
        raise MixRefused(
            f"the mix has {plural(len(errors), 'error')}, so no run comes of it and nothing was planned."
        )
    made = make_plan(mix, asked)
    if as_json:
        echo_json(plan_json(made))
    else:
        show(*plan_shown(made))
