"""`mdsmix bench`: does the loader wait for the model, or the model for the loader?"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from mdsmix.cli.options import (
    AS_JSON,
    Number,
    Text,
    argument,
    echo,
    echo_json,
    option,
)
from mdsmix.errors import RecipeError
from mdsmix.words import plural

if TYPE_CHECKING:
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
    from mdsmix.bench.choice import chosen, read_rank, settings, table, verdict
    from mdsmix.bench.speed import BenchPlan, run
    from mdsmix.engines.memory import cpu_count
    from mdsmix.mix.output import require_place, write
    from mdsmix.report.show import show
    from mdsmix.table import as_json as tree_of

    rank = read_rank(train, loader, batch, gpus)
    if out:
        require_place(out)
    if tmp and not os.path.isdir(tmp):
        raise RecipeError(f"--tmp {tmp} is no folder; make it, or name another.")
    tried = settings(max(1, cpu_count() // gpus), workers, prefetch)
    plan = BenchPlan(rank=rank, settings=tried, step=step_ms / 1000, seconds=seconds, tmp=tmp)
    about = _about(plan, cpu_count(), gpus)
    echo(about, err=as_json)
    measured = run(plan, partial(echo, err=True))
    best = chosen(measured, plan.step)
    if out:
        write(out, "".join(f"{line}\n" for line in best.setting.overrides))
    said = verdict(best, plan.step, rank.batch)
    if as_json:
        waits = "loader" if best.keeps_up(plan.step) else "model"
        choice = {"waits": waits, "verdict": said, "overrides": best.setting.overrides}
        return echo_json({"measured": about} | tree_of(table(measured)) | choice | {"wrote": out})
    show(table(measured))
    rendered = f"$(cat {out})" if out else " ".join(best.setting.overrides)
    return echo(said, f"to render: mdsmix render-yaml RECIPE {rendered}")


def _about(plan: BenchPlan, cores: int, ranks: int) -> str:
    """What is measured, and on what."""
    rows = plural(plan.rank.batch, "row")
    if plan.rank.is_batch_supposed:
        rows += " (supposed, as the YAML says no global_train_batch_size: --batch says it)"
    return (
        f"{plan.rank}; one rank of {ranks} on {plural(cores, 'core')}; {rows} a step of {1000 * plan.step:,.0f} ms, which is simulated; "
        f"{plural(len(plan.settings), 'setting')} of {plan.seconds:g} s"
    )
