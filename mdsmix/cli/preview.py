"""`mdsmix preview`: the first steps of a run, before the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import AsJson, Nodes, batch_option, echo_json, gpus_option
from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from mdsmix.mix.streams import Mix
    from mdsmix.preview.asked import Asked

# typer of 0.15 reads no | under Python 3.10: hence Optional.
Count = Optional[int]  # noqa: UP045


def _number(text: str, least: int, default: Any = None) -> Any:
    return typer.Option(min=least, metavar="N", help=text, show_default=default)


def preview(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TRAIN.yaml | RECIPE",
            help="A training YAML, or a recipe (key=value overrides may follow).",
            show_default=False,
        ),
    ],
    steps: Annotated[int, _number("Global batches to show.", 0)] = 3,
    nodes: Nodes = 1,
    gpus: Annotated[int, gpus_option()] = 1,
    workers: Annotated[
        Count, _number("Workers of each GPU's loader.", 0, "num_workers of the YAML")
    ] = None,
    batch: Annotated[Count, batch_option()] = None,
    epoch: Annotated[int, _number("The epoch, the first is 0.", 0)] = 0,
    from_step: Annotated[
        int, _number("Go on in mid-epoch, behind so many steps, as a resumed run does.", 0)
    ] = 0,
    state: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            help="Go on where a loader's state_dict(), written there as JSON, stands.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        Count, _number("Another shuffle_seed.", 0, "shuffle_seed of the YAML, else 9176")
    ] = None,
    samples: Annotated[int, _number("Samples decoded of each step.", 0)] = 3,
    ids: Annotated[
        bool, typer.Option("--ids", help="List the samples of each step, GPU by GPU.")
    ] = False,
    windows: Annotated[int, _number("Windows of steps that the epoch is cut into.", 1)] = 10,
    read: Annotated[
        str, typer.Option(metavar="SIZE", help="Read at most so much of the streams' shards.")
    ] = "256MiB",
    as_json: AsJson = False,
) -> None:
    """Show the first global batches as the GPUs will see them, and how steady the mix is over an epoch.

    The order is Streaming's own for these nodes, GPUs and workers; nothing is written, and no local folder of the YAML is touched.
    """
    from mdsmix.mix.resolve import resolve
    from mdsmix.preview.asked import Asked, read_state

    if state and (epoch or from_step or seed is not None):
        raise RecipeError(
            "--state says the epoch, the step and the seed: leave --epoch, --from-step and --seed out."
        )
    mix = resolve(targets)
    asked = Asked(
        world=_world(mix, nodes, gpus, workers, batch),
        steps=steps,
        epoch=epoch,
        from_step=from_step,
        state=read_state(state) if state else None,
        seed=seed,
        samples=samples,
        windows=windows,
        read=_size(read),
    )
    _show(mix, asked, ids, as_json)


def _world(mix: Mix, nodes: int, gpus: int, workers: int | None, batch: int | None) -> Any:
    from mdsmix.mix.world import World, batch_of
    from mdsmix.training.loader_keys import whole

    if mix.is_bare:
        raise RecipeError(
            "A preview needs the loader's section of a training YAML or a recipe: streams alone have no batches."
        )
    named = whole(mix.train.section.get("num_workers")) or 0
    return World(
        nodes=nodes,
        gpus=gpus,
        workers=named if workers is None else workers,
        batch=batch_of(batch, mix.yaml.batch_size),
        replication=whole(mix.train.dataset.get("replication")) or 1,
    )


def _size(text: str) -> int:
    from mdsmix.engines.memory import size_of

    size = size_of(text)
    if size is None:
        raise RecipeError(f"--read {text} is no size: write for example 2GiB or 800MiB.")
    return size


def _show(mix: Mix, asked: Asked, ids: bool, as_json: bool) -> None:
    # Streaming and torch are imported here, after all that is wrong without them has been told.
    from mdsmix.preview.first_steps import preview as run
    from mdsmix.report.preview import preview_shown
    from mdsmix.report.preview_json import preview_json
    from mdsmix.report.show import show

    found = run(mix, asked)
    decoder = _decoder(mix)
    if as_json:
        echo_json(preview_json(found, decoder))
    else:
        show(*preview_shown(found, decoder, ids))


def _decoder(mix: Mix) -> Any:
    from mdsmix.encode.decoder import find_decoder

    return find_decoder(None, mix.tokenizer.hash) if mix.tokenizer else None
