"""`mdsmix report`: a mix as one page to look at."""

from __future__ import annotations

from functools import partial

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


def report(
    targets: list[str] = MIXES,
    out: str = option("report.html", "Write the page here.", "FILE", "-o", "--out"),
    samples: int = option(12, "Samples of each stream.", "N", "-n", "--samples", least=0),
    seed: int = option(0, "Which samples, as inspect --random has them.", "N", least=0),
    nodes: int = NODES,
    gpus: Number = option(
        None, GPUS, "N", least=1, shown="8, fewer where the batch is divided among fewer"
    ),
    batch: Number = option(None, ROWS, "N", least=1, shown=f"{BATCH}, else 8 a device"),
    tokenizer: Text = decoder_option("the streams"),
    preview: bool = typer.Option(
        True, help="The first global batches too: imports streaming, some seconds."
    ),
) -> None:
    """Write one self-contained HTML page: the mix, its check, lengths, records, plan, first batches, and samples to browse.

    It opens from anywhere and reaches no network. What could not be looked at is said on it, and by the exit code.
    """
    from mdsmix.errors import all_of
    from mdsmix.mix.output import require_place, write
    from mdsmix.report.page.gather import PageOptions, gather
    from mdsmix.report.page.html import page_html
    from mdsmix.table import size_of

    require_place(out)
    asked = PageOptions(
        samples=samples,
        seed=seed,
        nodes=nodes,
        gpus=gpus,
        batch=batch,
        tokenizer=tokenizer,
        has_preview=preview,
    )
    page = gather(targets, asked, partial(echo, err=True))
    text = page_html(page)
    write(out, text)
    echo(f"wrote {out}, {size_of(len(text.encode()))}")
    if page.problems:
        raise all_of(list(page.problems.values()))
