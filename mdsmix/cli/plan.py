"""`mdsmix plan`: what a run comes to, before it is paid for."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from mdsmix.cli.options import AsJson, Nodes, batch_option, echo_json, gpus_option


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
    gpus: Annotated[int, gpus_option()] = 8,
    batch: Annotated[
        Optional[int],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        batch_option(),
    ] = None,
    tokens: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="COUNT",
            help="How long the run is, e.g. 100B, padding not counted.",
            show_default="max_duration of the YAML, else one epoch",
        ),
    ] = None,
    disk: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SIZE", help="What a node has for shards, e.g. 500gb."),
    ] = None,
    speed: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--tokens-per-second",
            metavar="N",
            help="What all devices together train, padding counted: then the hours are told.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run comes to: tokens, padding, steps, what each node fetches and keeps, and the settings to use.

    From indexes and manifests. Of streams that are not converted, a survey of their sources is taken for it.
    """
    from mdsmix.errors import MixRefused
    from mdsmix.mix.plan.make import PlanOptions, make_plan, problems, resolve_for_plan
    from mdsmix.report.findings import print_findings
    from mdsmix.report.plan import plan_json, plan_shown
    from mdsmix.report.show import show
    from mdsmix.words import plural

    asked = PlanOptions(
        nodes=nodes,
        gpus=gpus,
        batch=batch,
        tokens=tokens,
        disk=disk,
        speed=speed,
    )
    mix = resolve_for_plan(targets)
    if found := problems(mix):
        print_findings(found, to_stderr=True)
        raise MixRefused(
            f"the mix has {plural(len(found), 'error')}, so no run comes of it and nothing was planned."
        )
    made = make_plan(mix, asked)
    if as_json:
        echo_json(plan_json(made))
    else:
        show(*plan_shown(made))
