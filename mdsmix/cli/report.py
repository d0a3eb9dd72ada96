"""`mdsmix report`: a mix as one page to look at."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from mdsmix.cli.options import (
    BATCH,
    GPUS,
    MIXES,
    NODES,
    ROWS,
    Number,
    Text,
    decoder_option,
    echo,
    option,
)
from mdsmix.errors import RecipeError

PAGE = "report.html"


def report(
    targets: list[str] = MIXES,
    out: str = option(PAGE, "Write the page here.", "FILE", "-o", "--out"),
    samples: int = option(12, "Samples of each stream.", "N", "-n", "--samples", least=0),
    seed: int = option(
        0, "Which samples: those of inspect --random with this --seed.", "N", least=0
    ),
    nodes: int = NODES,
    gpus: int = GPUS,
    batch: Number = option(None, ROWS, "N", least=1, shown=f"{BATCH}, else 8 a device"),
    tokenizer: Text = decoder_option("the streams"),
    preview: bool = typer.Option(
        True, help="The first global batches too: imports streaming, some seconds."
    ),
) -> None:
    """Write one self-contained HTML page: the mix, its check, lengths, records, plan, first
    batches, and samples to browse.

    The page opens anywhere and reaches no network. It names data that could not be looked at, which
    the exit code tells too.
    """
    from mdsmix.errors import all_of
    from mdsmix.mix.plan.make import PlanOptions
    from mdsmix.mix.render import require_place, write
    from mdsmix.report.page.gather import gather
    from mdsmix.report.page.html import mark_of, page_html
    from mdsmix.report.shown_samples import Choice
    from mdsmix.table import size_of

    require_place(out)
    there = Path(out)
    if out == PAGE and there.is_file() and mark_of(targets) not in there.read_text("utf-8", "replace"):  # fmt: skip
        raise RecipeError(
            f"{out} is there already, and is no page of {' '.join(targets)}: name another file by -o, or delete it."
        )
    machines = PlanOptions(nodes=nodes, gpus=gpus, batch=batch)
    say = partial(echo, err=True) if preview else None
    page = gather(targets, Choice(count=samples, seed=seed), machines, tokenizer, say)
    text = page_html(page)
    write(out, text)
    lacks = ", without what could not be looked at" if page.problems else ""
    echo(f"wrote {out}, {size_of(len(text.encode()))}{lacks}")
    if page.problems:
        raise all_of(list(page.problems.values()))
