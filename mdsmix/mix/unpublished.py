"""Streams of a recipe that are not published: all of them in one sentence, and of one whose conversion was refused the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from mdsmix.errors import NotPublished
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.published import read_quarantine
from mdsmix.storage import Location, locate
from mdsmix.words import does, plural

MOST_COUNTED = 10_000
"Bad records of a stream that are read for its reasons: a quarantine may hold a whole corpus."


def unpublished(recipe: Recipe, streams: Sequence[StreamSpec]) -> NotPublished:
    """The error that names these streams of the recipe, none of which is published."""
    folders = {stream.name: locate(recipe.published(stream)) / stream.split for stream in streams}
    told = [f"{name} at {folder}{_refused(folder)}" for name, folder in folders.items()]
    return NotPublished(
        f"{plural(len(told), 'stream')} {does(told, 'is', 'are')} not published: {'; '.join(told)}: run `mdsmix convert` on this recipe "
        "first."
    )


def _refused(folder: Location) -> str:
    """What a conversion has set aside there and was refused for; nothing where it never came to that."""
    records = islice(read_quarantine(folder), MOST_COUNTED)
    reasons = Counter(str(record.get("reason")) for record in records)
    if not reasons:
        return ""
    more = " and more" * (reasons.total() == MOST_COUNTED)
    said = ", ".join(f"{n:,} {reason}" for reason, n in reasons.most_common())
    return (
        f", where a conversion was refused for bad records ({said}{more}; `mdsmix quarantine {folder}` shows them: mend the source, or "
        "raise max_bad)"
    )
