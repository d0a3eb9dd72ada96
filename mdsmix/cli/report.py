"""`mdsmix report`: a mix as one page to look at."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from mdsmix.cli.options import Mixes, Nodes, batch_option, decoder_option, echo, gpus_option


def report(
    targets: Mixes,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", help="Write the page here.")
    ] = "report.html",
    samples: Annotated[
        int, typer.Option("-n", "--samples", min=0, metavar="N", help="Samples of each stream.")
    ] = 12,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Which samples, as inspect --random has them.")
    ] = 0,
    nodes: Nodes = 1,
    gpus: Annotated[
        Optional[int],  # noqa: UP045
        gpus_option("8, fewer where the batch is divided among fewer"),
    ] = None,
    batch: Annotated[
        Optional[int],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        batch_option("global_train_batch_size of the YAML, else 8 a device"),
    ] = None,
    tokenizer: Annotated[
        Optional[str],  # noqa: UP045
        decoder_option("the streams"),
    ] = None,
    preview: Annotated[
        bool,
        typer.Option(help="The first global batches too: imports streaming, some seconds."),
    ] = True,
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
    page = gather(targets, asked, lambda sentence: echo(sentence, err=True))
    text = page_html(page)
    write(out, text)
    echo(f"wrote {out}, {size_of(len(text.encode()))}")
    if page.failed:
        raise all_of(page.failed)
