"""`mdsmix inspect`: what a published stream is, and what its samples say."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from mdsmix.cli.options import Stream


def inspect(
    stream: Stream,
    samples: Annotated[
        int, typer.Option("-n", "--samples", min=0, metavar="N", help="Samples to show.")
    ] = 3,
    tokenizer: Annotated[
        Optional[str],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            metavar="NAME",
            help="Decode with this tokenizer.",
            show_default="the one that made it, if known here",
        ),
    ] = None,
) -> None:
    """Show the manifest of STREAM as a table and its first samples, trained tokens in ⟦ ⟧."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from mdsmix.encode.tokenizer import find_decoder
    from mdsmix.report.card import card_rows
    from mdsmix.report.samples import marked, segments
    from mdsmix.shards.index import read_index
    from mdsmix.shards.manifest import read_manifest
    from mdsmix.shards.published import find_published
    from mdsmix.shards.sample import read_head
    from mdsmix.storage import locate

    folder = find_published(locate(stream))
    index, manifest = read_index(folder), read_manifest(folder)
    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=SIMPLE, show_header=False)
    for what, value in card_rows(str(folder), index, manifest):
        table.add_row(what, value)
    console.print(table)
    if not samples or not index.shards:
        return
    decode = find_decoder(tokenizer, manifest.tokenizer.hash if manifest else None)
    prompts = manifest.encoding.target_prompts if manifest else "none"
    responses = manifest.encoding.target_responses if manifest else "last"
    for number, sample in enumerate(read_head(folder, index.shards[0], samples)):
        console.rule(f"sample {number}", align="left")
        text = (
            marked(segments(sample, prompts, responses), decode)
            if _has_tokens(sample)
            else str(sample)
        )
        console.print(text, markup=False, soft_wrap=True)  # no line break that is not in the text


def _has_tokens(sample: dict[str, object]) -> bool:
    """Whether the layout is one of ours: bytes columns and raw text are shown as they are."""
    columns = (
        ("turns",)
        if "turns" in sample
        else ("tokens",)
        if "tokens" in sample
        else ("input_ids", "labels")
    )
    return all(name in sample and not isinstance(sample[name], bytes) for name in columns)
