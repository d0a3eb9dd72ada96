"""`mdsmix inspect`: the settings, counts and samples of published streams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mdsmix.cli.options import (
    AsJson,
    DecodeWith,
    Streams,
    echo,
    for_each_stream,
)
from mdsmix.messages import plural


def inspect(
    streams: Streams,
    samples: Annotated[
        int, typer.Option("-n", "--samples", metavar="N", min=0, help="How many samples to show.")
    ] = 3,
    sample: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=0, help="Show sample N, counted from 0; may be repeated."),
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="Show the sample with the most bytes.")
    ] = False,
    at_random: Annotated[
        bool, typer.Option("--random", help="Show samples from anywhere in the stream.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Show samples at random: the same seed shows the same samples.",
            show_default="another each time",
        ),
    ] = None,
    tokenizer: DecodeWith = None,
    images: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write the images of the samples here, as stored."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the manifest of each STREAM as a table and its first samples, trained tokens in ⟦ ⟧,
    control tokens in ⟨ ⟩.

    Text that only looks like a control token, and was encoded as ordinary tokens, has no ⟨ ⟩.
    """
    from mdsmix import api
    from mdsmix.report.inspection import write_images
    from mdsmix.report.show import show
    from mdsmix.report.shown_samples import make_choice
    from mdsmix.storage import require_local

    choice = make_choice(samples, sample or (), longest, at_random, seed)
    if images:
        require_local(images)

    def inspect_one(stream: str) -> Any:
        inspected = api.inspect(
            stream,
            samples=samples,
            numbers=choice.numbers,
            longest=longest,
            seed=choice.seed,
            tokenizer=tokenizer,
        )
        written = write_images(inspected, Path(images)) if images else 0
        if as_json:
            return inspected.to_dict()
        show(*inspected.items())
        if images:
            echo(f"wrote {plural(written, 'image')} into {images}")
        return None

    for_each_stream(streams, as_json, inspect_one)
