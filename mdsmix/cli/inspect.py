"""`mdsmix inspect`: what a published stream is, and what its samples say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import Stream

if TYPE_CHECKING:
    from mdsmix.kinds import Piece
    from mdsmix.shards.manifest import Encoding


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
    encoding = manifest.encoding if manifest else None
    for number, sample in enumerate(read_head(folder, index.shards[0], samples)):
        console.rule(f"sample {number}", align="left")
        text = (
            marked(segments(_pieces(sample, encoding)), decode)
            if _has_tokens(sample)
            else str(sample)
        )
        console.print(text, markup=False, soft_wrap=True)  # no line break that is not in the text


def _pieces(sample: dict[str, Any], encoding: Encoding | None) -> Iterator[Piece]:
    """Which tokens are trained: as the manifest says, else by LLM-Foundry's default policies."""
    from mdsmix.kinds import kind_of, stored_pieces

    return kind_of(encoding).pieces(sample, encoding) if encoding else stored_pieces(sample)


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
