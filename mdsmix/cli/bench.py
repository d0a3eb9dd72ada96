"""`mdsmix bench`: does the loader wait for the model, or the model for the loader?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import AsJson, echo, echo_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mdsmix.bench.judge import Measured
    from mdsmix.bench.run import Plan

WHAT = {"rich_help_panel": "What is measured"}


def bench(
    train: Annotated[
        str,
        typer.Argument(
            metavar="TRAIN.yaml",
            help="A rendered YAML or a config of LLM-Foundry.",
            show_default=False,
        ),
    ],
    step_ms: Annotated[
        float, typer.Option("--step-ms", min=0.0, help="What a step of the model takes.")
    ] = 250.0,
    seconds: Annotated[
        float, typer.Option(min=0.2, help="For each setting; starting its workers is not counted.")
    ] = 10.0,
    workers: Annotated[
        Optional[str],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            metavar="0,2,4",
            help="Numbers of workers.",
            show_default="from 0 to a core each, doubling",
            **WHAT,
        ),
    ] = None,
    prefetch: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="2,4",
            help="Batches that each worker makes in advance.",
            show_default="2,4",
            **WHAT,
        ),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            min=1,
            help="Ranks that share this machine; one is measured, on its part of the cores.",
            **WHAT,
        ),
    ] = 1,
    batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            help="Rows of a device and step.",
            show_default="global_train_batch_size / gpus, else 8",
            **WHAT,
        ),
    ] = None,
    loader: Annotated[
        str, typer.Option(metavar="NAME", help="train_loader, or eval_loader.<label>.", **WHAT)
    ] = "train_loader",
    bare: Annotated[
        bool,
        typer.Option(
            "--bare",
            help="Also a bare StreamingDataset on the same files, which makes no batch.",
            **WHAT,
        ),
    ] = False,
    tmp: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FOLDER",
            help="Where cold caches lie; on the training disk they are as fast as there.",
            show_default="the system's",
            **WHAT,
        ),
    ] = None,
    out: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write the best settings here, for `mdsmix render-yaml --tuned FILE`.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the loader of TRAIN.yaml with 0 to N workers, and say whether it or the model waits."""
    from mdsmix.bench.one_rank import read, refuse_recipe
    from mdsmix.bench.run import Plan, run
    from mdsmix.bench.settings import Share, settings, whole_numbers
    from mdsmix.engines.limits import cpu_count
    from mdsmix.mix.output import require_place, write

    refuse_recipe(train)
    share = Share(cores=cpu_count(), ranks=gpus)
    rank = read(train, loader, batch, gpus)
    asked = (whole_numbers("--workers", workers, 0), whole_numbers("--prefetch", prefetch, 1))
    if out:
        require_place(out)
    plan = Plan(
        rank=rank,
        share=share,
        settings=settings(share, *asked),
        step=step_ms / 1000,
        seconds=seconds,
        tmp=_folder(tmp),
        with_bare=bare,
    )
    echo(plan.about, err=as_json)
    found = list[Any]()
    try:
        for each in run(plan, lambda line: echo(line, err=True)):
            found.append(each)
    except (KeyboardInterrupt, SystemExit) as end:
        _interrupted(plan, found, as_json, getattr(end, "code", 130))
    verdict = plan.verdict(found)
    report = plan.report(found)
    if out:
        write(out, plan.tuned(verdict, report))
    if as_json:
        echo_json(report | {"wrote": out})
        return
    _print(found)
    told = [
        str(verdict),
        f"to render: {plan.keys(verdict)}",
        *([f"wrote {out}; mdsmix render-yaml RECIPE --tuned {out} renders it"] if out else []),
    ]
    echo(*told)


def _interrupted(plan: Plan, found: Sequence[Measured], as_json: bool, code: int) -> None:
    """What is known so far is shown; caches, workers and shared memory are gone by now. `code` is 143 where a scheduler ended it."""
    from mdsmix.errors import Interrupted

    if found and not as_json:
        _print(found)
    end = Interrupted(
        f"interrupted after {len(found)} of {len(plan.settings)} settings: no setting was chosen or written, and the caches that were "
        "made are deleted."
    )
    end.exit_code = code
    raise end


def _print(found: Sequence[Measured]) -> None:
    from rich.console import Console

    from mdsmix.bench.judge import table
    from mdsmix.report.table import print_table

    print_table(table(found), Console())


def _folder(tmp: str | None) -> str | None:
    from pathlib import Path

    from mdsmix.errors import RecipeError

    if tmp and not Path(tmp).is_dir():
        raise RecipeError(f"--tmp {tmp} is no folder; make it, or name another.")
    return tmp
