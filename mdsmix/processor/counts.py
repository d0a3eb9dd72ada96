"""Counts the tokens that a processor makes of images. Counts are kept in the cache, since the
process that counts takes 10 s to start.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import orjson

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.processor.card import find_processor_folder
from mdsmix.processor.server import ask_processor

Size = tuple[int, int]
"Height and width in pixels, after the image was turned as its EXIF asks."
COUNTS_VERSION = 2
"""Version of the rule that counts an image's tokens. Since version 2, an odd image (very narrow or
long, see `loaded.is_odd`) is also counted in a batch with another image.
"""
_counts: dict[str, dict[Size, int | str]] = {}
"Hash of a processor -> size -> token count, or the reason why the processor refuses the size."


def count_image_tokens(processor: str, sizes: Iterable[Size]) -> dict[Size, int | str]:
    """Return {size: token count} of images. For a size that the processor refuses, the reason is
    returned instead of a count: {(56, 56): 4, (1, 999): "Qwen2VLProcessor refuses it: ..."}.

    Counts of earlier runs on this machine are read from the cache.

    Args:
        processor: the hash of the processor.
        sizes: the sizes of the images.
    """
    # Look in this process's memory, then in the cache; ask the processor only for the rest.
    counts = _counts.get(processor, {})
    requested = set(sizes)
    path = cache_folder() / "processors" / f"{processor}-{COUNTS_VERSION}.counts"
    if not requested <= counts.keys():
        with suppress(OSError, ValueError, TypeError):  # it is missing or damaged
            stored = orjson.loads(path.read_bytes())
            counts = counts | {(height, width): count for height, width, count in stored}
    missing = sorted(requested - counts.keys())
    if missing:
        answers = ask_processor(find_processor_folder(processor), {"sizes": missing})
        counts = counts | dict(zip(missing, answers, strict=True))
        # Only numbers are stored. A size that was refused is asked for again in the next run.
        rows = [[*size, count] for size, count in counts.items() if isinstance(count, int)]
        with suppress(Unreachable):  # without the file the next run only asks again
            keep_in_cache(path, orjson.dumps(rows))
    _counts[processor] = counts  # replaced, never changed in place, since threads read it
    return {size: counts[size] for size in requested}
