"""`mdsmix bench`: does the loader wait for the model, or the model for the loader?"""

from __future__ import annotations

import os
from functools import partial

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


def bench(
    train: str = argument("TRAIN.yaml", "A rendered YAML or a config of LLM-Foundry."),
    step_ms: float = option(250.0, "Milliseconds of a step of the model.", least=0.1),
    seconds: float = option(
        10.0, "Seconds for each setting; starting its workers is not counted.", least=0.2
    ),
    workers: Text = option(
        None, "Numbers of workers.", "0,2,4", shown="from 0 to a core each, doubling"
    ),
    prefetch: Text = option(None, "Batches that each worker makes in advance.", "2,4", shown="2,4"),
    gpus: int = option(
        8, "Ranks that share this machine; one is measured, on its part of the cores.", least=1
    ),
    batch: Number = option(
        None, "Rows of a device and step.", least=1, shown="global_train_batch_size / gpus, else 8"
    ),
    loader: str = option("train_loader", "train_loader, or eval_loader.<label>.", "NAME"),
    tmp: Text = option(
        None,
        "Where cold caches lie; on the training disk they are as fast as there.",
        "FOLDER",
        shown="the system's",
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
    """Measure the loader of TRAIN.yaml with 0 to N workers, and say whether the loader or the model
    waits.
    """
    from mdsmix.bench import chosen, read_bench, settings, table, verdict
    from mdsmix.bench.speed import run
    from mdsmix.engines.memory import cpu_count
    from mdsmix.mix.render import require_place, write
    from mdsmix.report.show import show
    from mdsmix.table import as_json as tree_of

    step, cores = step_ms / 1000, cpu_count()
    plan, about = read_bench(train, loader, batch, gpus, step=step, seconds=seconds, tmp=tmp)
    if out:
        require_place(out)
    if tmp and not os.path.isdir(tmp):
        raise RecipeError(f"--tmp {tmp} is no folder; make it, or name another.")
    tried = settings(max(1, cores // gpus), workers, prefetch)
    about += f"; one rank of {gpus} on {plural(cores, 'core')}; {plural(len(tried), 'setting')} of {seconds:g} s"
    echo(about, err=as_json)
    measured = run(plan, tried, partial(echo, err=True))
    best = chosen(measured, step)
    if out:
        write(out, "".join(f"{line}\n" for line in best.setting.overrides))
    said = verdict(best, step, plan.batch)
    if as_json:
        waits = "loader" if best.keeps_up(step) else "model"
        choice = {"waits": waits, "verdict": said, "overrides": best.setting.overrides}
        return echo_json({"measured": about} | tree_of(table(measured)) | choice | {"wrote": out})
    show(table(measured))
    rendered = f"$(cat {out})" if out else " ".join(best.setting.overrides)
    return echo(said, f"to render: mdsmix render-yaml RECIPE {rendered}")
