"""Whether a page shows what a command prints: times and versions aside, and with `...` for what the page leaves out.

Lines may be folded elsewhere and columns be wider, since paths and times are of other lengths: words are compared, in their order.
"""

import re
from collections.abc import Iterator, Sequence

ELLIPSIS = "..."
OTHER_EACH_TIME = re.compile(
    r"[\d,.]+(?= (?:s|ms|MB/s|tokens/s|samples/s|min)\b)"
    r"|(?<=\w )\d+\.\d+\.\d+\b"  # versions
    r"|(?<=\.mdsmix-doctor-)[0-9a-f]+"
    r"|(?<=localhost:)\d+"
    r"|[\d,.]+ [GM]iB(?= for \d+ workers| free|$)"
    r"|(?<=load )[\d.]+"
    r"|[\d.]+ [MGT]B(?= are free)|[\d.]+(?= kB$)"
)
PASSED_OVER = ("looking at the ", "the first batches: ", "peak memory: ")
"Lines: what is said while something is waited for, and what processes took."
OF_TIMES = {"seconds", "tokens/s", "samples/s", "first batch, s", "wait a step, ms", "longest, ms"}
"Columns of tables."


def difference(page: str, printed: str) -> str:
    """Empty where the page shows what was printed; else from where on it does not."""
    text = list(_words(printed))
    first, *others = _parts(list(_words(page)))
    if not others:
        return "" if text == first else _told(first, text)
    if text[: len(first)] != first:
        return _told(first, text)
    at = len(first)
    for part in others[:-1]:
        place = _place(part, text, at)
        if place is None:
            return _told(part, text[at:])
        at = place + len(part)
    last = others[-1]
    end = text[max(at, len(text) - len(last)) :]
    return "" if end == last else _told(last, end)


def part_of(page: str, printed: str) -> str:
    """The same of what is shown of the middle."""
    return difference(f"{ELLIPSIS} {page} {ELLIPSIS}", printed)


def _words(text: str) -> Iterator[str]:
    columns = list[int]()
    for line in text.splitlines():
        if line.startswith(PASSED_OVER):
            continue
        cells = re.split(r"\s{2,}", line.strip())
        if OF_TIMES & set(cells):
            columns = [i - len(cells) for i, cell in enumerate(cells) if cell in OF_TIMES]
        elif line.strip(" ─") and not line.startswith("  "):
            columns = []
        for column in columns:
            if len(cells) >= -column and re.fullmatch(r"[\d.,]+", cells[column]):
                cells[column] = "#"
        line = re.sub(r"─+", "─", "  ".join(cells))
        yield from OTHER_EACH_TIME.sub("#", line).split()


def _parts(words: Sequence[str]) -> list[list[str]]:
    """What stands between the ellipses."""
    parts = [list[str]()]
    for word in words:
        if word == ELLIPSIS:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _place(part: Sequence[str], text: Sequence[str], at: int) -> int | None:
    n = len(part)
    return next((i for i in range(at, len(text) - n + 1) if text[i : i + n] == part), None)


def _told(part: Sequence[str], text: Sequence[str]) -> str:
    """The page's words and those that were printed, from shortly before the first that is another."""
    pairs = zip(part, text, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(part), len(text)))
    begin, end = max(0, same - 8), same + 25
    return f"the page: {' '.join(part[begin:end])}\nprinted:  {' '.join(text[begin:end])}"
