"""`mdsmix inspect`: what published streams are, and what their samples say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import AsJson, decoder_option, echo
from mdsmix.cli.several import Streams, for_each
from mdsmix.errors import RecipeError
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.report.inspection import Choice, Inspection


def inspect(
    streams: Streams,
    samples: Annotated[
        int, typer.Option("-n", "--samples", min=0, metavar="N", help="Samples to show.")
    ] = 3,
    sample: Annotated[
        Optional[list[int]],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(min=0, metavar="N", help="Show sample N, the first is 0; may be repeated."),
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="Show the sample of the most bytes.")
    ] = False,
    at_random: Annotated[
        bool, typer.Option("--random", help="Show samples from anywhere in the stream.")
    ] = False,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=0, metavar="N", help="With --random: which ones.", show_default="another each time"
        ),
    ] = None,
    tokenizer: Annotated[
        Optional[str],  # noqa: UP045
        decoder_option("it"),
    ] = None,
    images: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--images", metavar="DIR", help="Write the images of the samples here, as stored."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the manifest of each STREAM as a table and its first samples, trained tokens in ⟦ ⟧, control tokens in ⟨ ⟩.

    Text that only looks like a control token stands in no ⟨ ⟩: it is ordinary tokens.
    """
    from mdsmix.report.inspection import inspect as inspect_stream
    from mdsmix.report.inspection import inspection_json, inspection_shown
    from mdsmix.report.show import show

    choice = _choice(samples, sample or [], longest, at_random, seed)

    def one(stream: str) -> Any:
        found = inspect_stream(stream, choice, tokenizer)
        written = _write(found, images) if images else []
        if as_json:
            return inspection_json(found) | {"seed": choice.seed}
        show(*inspection_shown(found, choice))
        return echo(f"wrote {plural(len(written), 'image')} into {images}") if images else None

    for_each(streams, as_json, one)


def _choice(
    count: int, places: list[int], longest: bool, at_random: bool, seed: int | None
) -> Choice:
    import random

    from mdsmix.report.inspection import Choice

    if bool(places) + longest + at_random > 1:
        raise RecipeError("--sample, --longest and --random exclude each other: give one of them.")
    if seed is not None and not at_random:
        raise RecipeError("--seed says which samples --random shows: give --random too.")
    if at_random and seed is None:
        seed = random.randrange(1_000_000)
    return Choice(count=count, places=places, longest=longest, seed=seed)


def _write(found: Inspection, folder: Path) -> list[Path]:
    """Writes the images of the samples. A file is named after its stream and its sample."""
    from mdsmix.report.segments import write_pictures

    of = "-".join(Path(found.stream.folder.url).parts[-2:])
    return [
        path
        for chosen in found.samples
        for path in write_pictures(folder, f"{of}-{chosen.number}", chosen.pictures)
    ]
