"""`mdsmix bench`: does the loader wait for the model, or the model for the loader?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import AsJson, echo, echo_json
from mdsmix.words import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mdsmix.bench.choice import Cores, Timing
    from mdsmix.bench.speed import BenchPlan

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
        float, typer.Option("--step-ms", min=0.1, help="What a step of the model takes.")
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
            help="Write the best settings here, as key=value lines for `mdsmix render-yaml`.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the loader of TRAIN.yaml with 0 to N workers, and say whether it or the model waits."""
    from mdsmix.bench.choice import Cores, chosen, read_rank, settings, table, verdict
    from mdsmix.bench.speed import BenchPlan, run
    from mdsmix.engines.limits import cpu_count
    from mdsmix.errors import RecipeError
    from mdsmix.mix.output import require_place, write
    from mdsmix.report.show import show

    cores = Cores(count=cpu_count(), ranks=gpus)
    rank = read_rank(train, loader, batch, gpus)
    if out:
        require_place(out)
    if tmp and not os.path.isdir(tmp):
        raise RecipeError(f"--tmp {tmp} is no folder; make it, or name another.")
    plan = BenchPlan(
        rank=rank,
        settings=settings(cores, workers, prefetch),
        step=step_ms / 1000,
        seconds=seconds,
        tmp=tmp,
    )
    echo(_about(plan, cores), err=as_json)
    measured = list[Any]()
    try:
        for each in run(plan, lambda line: echo(line, err=True)):
            measured.append(each)
    except (KeyboardInterrupt, SystemExit) as end:
        _interrupted(plan, measured, as_json, getattr(end, "code", 130))
    best = chosen(measured, plan.step)
    if out:
        write(out, "".join(f"{line}\n" for line in best.setting.overrides))
    said = verdict(best, plan.step, rank.batch)
    if as_json:
        echo_json(_report(plan, cores, measured, said) | {"wrote": out})
        return
    show(table(measured))
    rendered = f"$(cat {out})" if out else " ".join(best.setting.overrides)
    echo(said, f"to render: mdsmix render-yaml RECIPE {rendered}")


def _about(plan: BenchPlan, cores: Cores) -> str:
    """What is measured, and on what."""
    rank, rows = plan.rank, plural(plan.rank.batch, "row")
    if rank.is_batch_supposed:
        rows += " (supposed, as the YAML says no global_train_batch_size: --batch says it)"
    minutes = len(plan.settings) * (plan.seconds + 3) / 60
    return (
        f"{rank}; {cores}, load {os.getloadavg()[0]:.1f}; {rows} a step of {1000 * plan.step:,.0f} ms, which is simulated; "
        f"{plural(len(plan.settings), 'setting')} of {plan.seconds:g} s: about {max(1, round(minutes))} min"
    )


def _report(plan: BenchPlan, cores: Cores, measured: Sequence[Timing], said: str) -> dict[str, Any]:
    """Everything, for programs."""
    from mdsmix.bench.choice import chosen, table
    from mdsmix.table import as_json

    best = chosen(measured, plan.step)
    return {
        "yaml": plan.rank.yaml.origin,
        "loader": plan.rank.section.label,
        "measured_on": {
            "cores": cores.count,
            "ranks": cores.ranks,
            "load": os.getloadavg()[0],
            "rows_of_a_step": plan.rank.batch,
            "step_ms": 1000 * plan.step,
            "seconds_a_setting": plan.seconds,
        },
        **as_json(table(measured)),
        "waits": "loader" if best.keeps_up(plan.step) else "model",
        "verdict": said,
        "overrides": best.setting.overrides,
    }


def _interrupted(plan: BenchPlan, measured: Sequence[Timing], as_json: bool, code: int) -> None:
    """What is known so far is shown; caches, workers and shared memory are gone by now. `code` is 143 where a scheduler ended it."""
    from mdsmix.bench.choice import table
    from mdsmix.errors import Interrupted
    from mdsmix.report.show import show

    if measured and not as_json:
        show(table(measured))
    end = Interrupted(
        f"interrupted after {len(measured)} of {len(plan.settings)} settings: no setting was chosen or written, and the caches that were "
        "made are deleted."
    )
    end.exit_code = code
    raise end
