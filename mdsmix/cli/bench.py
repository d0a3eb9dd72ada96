"""`mdsmix bench`: does the loader wait for the model, or the model for the loader?"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from mdsmix.cli.options import (
    AS_JSON,
    Number,
    Text,
    argument,
    echo,
    echo_json,
    option,
)
from mdsmix.errors import Interrupted, RecipeError
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.bench.choice import Cores
    from mdsmix.bench.speed import BenchPlan

WHAT = "What is measured"


def bench(
    train: str = argument("TRAIN.yaml", "A rendered YAML or a config of LLM-Foundry."),
    step_ms: float = option(250.0, "What a step of the model takes.", least=0.1),
    seconds: float = option(
        10.0, "For each setting; starting its workers is not counted.", least=0.2
    ),
    workers: Text = option(
        None,
        "Numbers of workers.",
        "0,2,4",
        shown="from 0 to a core each, doubling",
        panel=WHAT,
    ),
    prefetch: Text = option(
        None, "Batches that each worker makes in advance.", "2,4", shown="2,4", panel=WHAT
    ),
    gpus: int = option(
        1,
        "Ranks that share this machine; one is measured, on its part of the cores.",
        least=1,
        panel=WHAT,
    ),
    batch: Number = option(
        None,
        "Rows of a device and step.",
        least=1,
        shown="global_train_batch_size / gpus, else 8",
        panel=WHAT,
    ),
    loader: str = option(
        "train_loader", "train_loader, or eval_loader.<label>.", "NAME", panel=WHAT
    ),
    tmp: Text = option(
        None,
        "Where cold caches lie; on the training disk they are as fast as there.",
        "FOLDER",
        shown="the system's",
        panel=WHAT,
    ),
    out: Text = option(
        None,
        "Write the best settings here, as key=value lines for `mdsmix render-yaml`.",
        "FILE",
        "-o",
        "--out",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Measure the loader of TRAIN.yaml with 0 to N workers, and say whether it or the model waits."""
    from mdsmix.bench.choice import Cores, chosen, read_rank, settings, table, verdict
    from mdsmix.bench.speed import BenchPlan, run
    from mdsmix.engines.memory import cpu_count
    from mdsmix.mix.output import require_place, write
    from mdsmix.report.show import show

    cores = Cores(count=cpu_count(), ranks=gpus)
    rank = read_rank(train, loader, batch, gpus)
    if out:
        require_place(out)
    if tmp and not os.path.isdir(tmp):
        raise RecipeError(f"--tmp {tmp} is no folder; make it, or name another.")
    tried = settings(cores, workers, prefetch)
    plan = BenchPlan(rank=rank, settings=tried, step=step_ms / 1000, seconds=seconds, tmp=tmp)
    echo(_about(plan, cores), err=as_json)
    measured = list[Any]()
    try:
        measured.extend(run(plan, partial(echo, err=True)))
    except (KeyboardInterrupt, SystemExit) as end:
        if measured and not as_json:
            show(table(measured))
        raise _interrupted(len(measured), plan, getattr(end, "code", 130)) from None
    best = chosen(measured, plan.step)
    if out:
        write(out, "".join(f"{line}\n" for line in best.setting.overrides))
    said = verdict(best, plan.step, rank.batch)
    if as_json:
        from mdsmix.table import as_json as tree_of

        waits = "loader" if best.keeps_up(plan.step) else "model"
        choice = {"waits": waits, "verdict": said, "overrides": best.setting.overrides}
        echo_json(_measured_on(plan, cores) | tree_of(table(measured)) | choice | {"wrote": out})
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


def _measured_on(plan: BenchPlan, cores: Cores) -> dict[str, Any]:
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
    }


def _interrupted(done: int, plan: BenchPlan, code: int) -> Interrupted:
    """`code` is 143 where a scheduler ended it. Caches, workers and shared memory are gone by now."""
    end = Interrupted(
        f"interrupted after {done} of {len(plan.settings)} settings: no setting was chosen or written, and the caches that were "
        "made are deleted."
    )
    end.exit_code = code
    return end
