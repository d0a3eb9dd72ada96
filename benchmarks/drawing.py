"""The README's picture of each tool's speed compared with mdsmix, drawn from RESULTS.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
PICTURE = Path(__file__).parent.parent / "docs/speed.svg"
WIDTH, LINE, LEFT, RIGHT = 760, 22, 290, 90
OURS = "mdsmix, 2 processes"
STYLE = (
    "text{font:13px sans-serif;fill:#57606a}.head{font-weight:bold}"
    ".ours{fill:#1a7f37}.other{fill:#8c959f}.faster{fill:#bc4c00}"
)


def speed_tables(results: str) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield (title, [(tool, MB/s)]) of each table of tools; mdsmix is first."""
    for section in re.split(r"(?m)^## ", results)[1:]:
        rows = re.findall(r"(?m)^\| ([^|]+?)(?: \\\*)? \| [\d,]+ \| [^|]+ \| ([\d.]+) \|", section)
        speeds = {name: float(speed) for name, speed in rows}
        if OURS in speeds:
            yield section.split("\n")[0], [(OURS, speeds.pop(OURS)), *speeds.items()]


def draw_picture(results: str) -> str:
    """Return an SVG of bars on a logarithmic scale. Each shows its MB/s and how many times as fast
    mdsmix is; a tool that is faster has another colour.
    """
    lines = [row for title, tools in speed_tables(results) for row in _lines(title, tools)]
    highest = max(speed for _, tools in speed_tables(results) for _, speed in tools)
    scale = (WIDTH - LEFT - RIGHT) / math.log10(highest)
    parts = []
    for number, (name, speed, ours) in enumerate(lines):
        y = LINE * (number + 1)
        if speed is None:
            parts.append(f'<text class="head" x="0" y="{y}">{escape(name)}, MB/s</text>')
            continue
        kind = "ours" if name == OURS else "faster" if speed > ours else "other"
        wide = max(2.0, scale * math.log10(max(speed, 1)))
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{LEFT}" y="{y - 13}" width="{wide:.0f}" height="16"/>'
        )
        times = "" if name == OURS else f", {ours / speed:.2g} x"
        parts.append(f'<text x="{LEFT + wide + 6:.0f}" y="{y}">{speed:,.1f}{times}</text>')
    size = f"{WIDTH} {LINE * (len(lines) + 1)}"
    title = "MB/s of each tool and how many times mdsmix is faster; the bars are logarithmic"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _lines(title: str, tools: list[tuple[str, float]]) -> Iterator[tuple[str, float | None, float]]:
    ours = tools[0][1]
    yield title, None, ours
    for name, speed in tools:
        if not name.startswith("mdsmix") or name == OURS:
            yield name, speed, ours


if __name__ == "__main__":
    PICTURE.write_text(draw_picture(RESULTS.read_text("utf-8")), "utf-8")
