"""`mdsmix preview`: the first steps of a run, before the run."""

from __future__ import annotations

from mdsmix.cli.options import (
    AS_JSON,
    BATCH,
    GPUS,
    NODES,
    ROWS,
    File,
    Number,
    argument,
    echo_json,
    flag,
    option,
)
from mdsmix.errors import MixRefused, RecipeError


def preview(
    targets: list[str] = argument(
        "TRAIN.yaml | RECIPE", "A training YAML, or a recipe (key=value overrides may follow)."
    ),
    steps: int = option(3, "Global batches to show.", "N", least=0),
    nodes: int = NODES,
    gpus: int = GPUS,
    workers: Number = option(
        None, "Workers of each GPU's loader.", "N", least=0, shown="num_workers of the YAML"
    ),
    batch: Number = option(None, ROWS, "N", least=1, shown=BATCH),
    epoch: int = option(0, "The epoch, the first is 0.", "N", least=0),
    from_step: int = option(
        0, "Go on in mid-epoch, behind so many steps, as a resumed run does.", "N", least=0
    ),
    state: File = option(
        None,
        "Go on at the state in FILE, a loader's state_dict() written as JSON.",
        "FILE",
        shown=False,
    ),
    seed: Number = option(
        None, "Another shuffle_seed.", "N", least=0, shown="shuffle_seed of the YAML, else 9176"
    ),
    samples: int = option(3, "Samples decoded of each step.", "N", least=0),
    ids: bool = flag("--ids", "List the samples of each step, GPU by GPU."),
    windows: int = option(10, "Windows of steps that the epoch is cut into.", "N", least=1),
    read: str = option("256MiB", "Read at most so much of the streams' shards.", "SIZE"),
    as_json: bool = AS_JSON,
) -> None:
    """Show the first global batches as the GPUs will see them, and how steady the mix is over an
    epoch.

    The order is Streaming's own for these nodes, GPUs and workers; nothing is written, and no local
    folder of the YAML is touched.
    """
    from mdsmix.encode.pretrained import find_decoder
    from mdsmix.engines.memory import size_of
    from mdsmix.mix.checking import found_by
    from mdsmix.mix.draws import machines_of
    from mdsmix.mix.resolve import resolve
    from mdsmix.preview.asked import Asked, EpochState, read_state
    from mdsmix.report.show import print_findings, show

    if state and (epoch or from_step or seed is not None):
        raise RecipeError(
            "--state says the epoch, the step and the seed: leave --epoch, --from-step and --seed out."
        )
    if (most := size_of(read)) is None:
        raise RecipeError(f"--read {read} is no size: write for example 2GiB or 800MiB.")
    mix = resolve(targets)
    if mix.is_bare:
        raise RecipeError(
            "A preview needs the loader's section of a training YAML or a recipe: streams alone have no batches."
        )
    mix.train.require_opened()
    if changed := found_by(mix, "recipe-changed"):
        print_findings(changed, to_stderr=True)
        raise MixRefused("what the streams hold is not what the recipe says, so nothing was shown.")
    asked = Asked(
        world=machines_of(mix, nodes, gpus, batch, workers),
        steps=steps,
        state=read_state(state) if state else EpochState(epoch=epoch, sample_in_epoch=0),
        from_step=from_step,
        seed=seed,
        samples=samples,
        windows=windows,
        read=most,
    )
    # Streaming and torch are imported here, after errors that need neither have been told.
    from mdsmix.preview.first_steps import preview as run
    from mdsmix.report.previewed_batches import preview_json, preview_shown

    found = run(mix, asked)
    decoder = find_decoder(None, mix.tokenizer.hash) if mix.tokenizer else None
    if as_json:
        echo_json(preview_json(found, decoder))
    else:
        show(*preview_shown(found, decoder, ids))
