"""`mdsmix plan`: the figures of a run, before it is paid for."""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.json_document import echo_json
from mdsmix.cli.options import (
    AsJson,
    GlobalBatch,
    Gpus,
    Nodes,
)
from mdsmix.errors import MixRefused, RecipeError


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
    from mdsmix import api
    from mdsmix.mix.streams.command_words import find_several_phases
    from mdsmix.report.result import Result
    from mdsmix.report.show import print_findings, show

    planned: Result
    try:
        named = find_several_phases(targets)
        if named:
            _refuse_tokens(tokens)
            planned = api.plan_phases(
                named.path,
                named.overrides,
                nodes=nodes,
                gpus=gpus,
                batch=batch,
                disk=disk,
                tokens_per_second=speed,
            )
        else:
            planned = api.plan(
                targets,
                nodes=nodes,
                gpus=gpus,
                batch=batch,
                tokens=tokens,
                disk=disk,
                tokens_per_second=speed,
            )
    except MixRefused as refused:
        if as_json and refused.checked is not None:
            echo_json(refused.checked.to_dict())
        print_findings(refused.checked or (), to_stderr=True)
        raise
    if as_json:
        echo_json(planned.to_dict())
    else:
        show(*planned.items())


def _refuse_tokens(tokens: str | None) -> None:
    """Raise RecipeError if --tokens is given for a recipe with phases."""
    if tokens is not None:
        raise RecipeError(
            f"--tokens {tokens} sets the length of a run, but each phase of this recipe has a "
            "budget: change the budgets, or plan one phase (phase=NAME)."
        )
