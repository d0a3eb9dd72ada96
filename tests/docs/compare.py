"""Whether a page shows what a command prints: times and versions aside, and with `...` for what the page leaves out.

Lines may be folded elsewhere and columns be wider, since paths and times are of other lengths: words are compared, in their order.
"""

import re
from collections.abc import Iterator

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
    rest = _line(printed)
    *parts, last = _line(page).split(f"\n{ELLIPSIS}\n")
    for number, part in enumerate(parts):
        at = rest.find(part)
        if at < 0 or (at and not number):
            return _told(part, rest)
        rest = rest[at + len(part) :]
    end = rest[max(0, len(rest) - len(last)) :] if parts else rest
    return "" if end == last else _told(last, end)


def part_of(page: str, printed: str) -> str:
    """The same of what is shown of the middle."""
    return difference(f"{ELLIPSIS} {page} {ELLIPSIS}", printed)


def _line(text: str) -> str:
    """Each word between two line breaks, so that none is found within another."""
    return "".join(f"\n{word}\n" for word in _words(text))


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


def _told(part: str, text: str) -> str:
    """The page's words and those that were printed, from shortly before the first that is another."""
    both = [part.split(), text.split()]
    pairs = enumerate(zip(*both, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(map(len, both)))
    page, printed = (" ".join(words[max(0, same - 8) : same + 25]) for words in both)
    return f"the page: {page}\nprinted:  {printed}"
