"""`mdsmix inspect`: the settings, counts and samples of published streams."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Optional

from mdsmix.cli.options import (
    AS_JSON,
    STREAMS,
    Number,
    Text,
    decoder_option,
    echo,
    flag,
    for_each,
    option,
)
from mdsmix.errors import RecipeError
from mdsmix.words import plural


def inspect(
    streams: list[str] = STREAMS,
    samples: int = option(3, "Samples to show.", "N", "-n", "--samples", least=0),
    sample: Optional[list[int]] = option(  # noqa: UP045
        None, "Show sample N, the first is 0; may be repeated.", "N", least=0
    ),
    longest: bool = flag("--longest", "Show the sample of the most bytes."),
    at_random: bool = flag("--random", "Show samples from anywhere in the stream."),
    seed: Number = option(
        None,
        "Show samples at random: the same seed shows the same samples.",
        "N",
        least=0,
        shown="another each time",
    ),
    tokenizer: Text = decoder_option("it"),
    images: Text = option(None, "Write the images of the samples here, as stored.", "DIR"),
    as_json: bool = AS_JSON,
) -> None:
    """Show the manifest of each STREAM as a table and its first samples, trained tokens in ⟦ ⟧,
    control tokens in ⟨ ⟩.

    Text that only looks like a control token stands in no ⟨ ⟩: it is ordinary tokens.
    """
    from mdsmix.report.inspection import inspect as inspect_stream
    from mdsmix.report.inspection import inspection_json, inspection_shown, write_images
    from mdsmix.report.show import show
    from mdsmix.report.shown_samples import Choice
    from mdsmix.storage import require_local

    if at_random and seed is None:
        seed = random.randrange(1_000_000)
    if bool(sample) + longest + (seed is not None) > 1:
        raise RecipeError("--sample, --longest and --random exclude each other: give one of them.")
    if images:
        require_local(images)
    choice = Choice(count=samples, places=sample or (), longest=longest, seed=seed)

    def one(stream: str) -> Any:
        found = inspect_stream(stream, choice, tokenizer)
        written = write_images(found, Path(images)) if images else 0
        if as_json:
            return inspection_json(found) | {"seed": choice.seed}
        show(*inspection_shown(found, choice))
        return echo(f"wrote {plural(written, 'image')} into {images}") if images else None

    for_each(streams, as_json, one)
