"""The twelve stops of a conversion: the table and the picture of docs/conversion-path.md.

`make tables` writes both from STOPS. tests/test_conversion_path.py runs a conversion and compares
its calls with STOPS, so that the page stays true.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/conversion.svg"


@dataclass(frozen=True)
class Stop:
    """A function that every conversion calls."""

    file: str
    "Its file, below `mdsmix/`."
    function: str
    "Its name, with its class: `UnitTask.do`."
    caller: int
    "The number of the stop that calls it, directly or through others; 0 for the first."
    what: str
    "What it does, as one sentence."


STOPS = (
    Stop(
        "cli/conversion_command.py",
        "run_conversion",
        0,
        "Takes the options of the command line, and prints the result at the end.",
    ),
    Stop(
        "kinds/recipes.py",
        "open_recipe",
        1,
        "Reads and checks the recipe: YAML to frozen dataclasses.",
    ),
    Stop(
        "conversion/run.py",
        "_run_streams",
        1,
        "Plans all streams, starts the engine, and converts one stream after the other.",
    ),
    Stop(
        "conversion/planning.py",
        "plan_streams",
        3,
        "Finds the source files and what is already converted. Refuses all that can be refused "
        "before a source is read.",
    ),
    Stop(
        "kinds/encodings.py",
        "resolve_stream",
        4,
        "Decides a stream's shape, kind, columns and encoding, once.",
    ),
    Stop(
        "conversion/run.py",
        "_convert_stream",
        3,
        "Converts and publishes one stream, under the lease of its target.",
    ),
    Stop(
        "conversion/work.py",
        "do_units",
        6,
        "Gives the units that are not finished to the engine, which runs them in workers.",
    ),
    Stop(
        "conversion/unit.py",
        "UnitTask.do",
        7,
        "Converts one unit, in a worker: reads, encodes, and writes shards window by window.",
    ),
    Stop(
        "sources/record_batches.py",
        "read_batches",
        8,
        "Reads the unit's part of the files: bytes to decoded records, in batches.",
    ),
    Stop(
        "kinds/read_records.py",
        "RecordReader.encode",
        8,
        "Turns records into samples of token ids: the shape reads a record, the kind encodes it.",
    ),
    Stop(
        "shards/shard_files.py",
        "store_shards",
        7,
        "Writes samples as MDS shards, named by their content.",
    ),
    Stop(
        "conversion/publish.py",
        "publish",
        6,
        "Writes the manifest, then the index. Readers see the new stream from then on.",
    ),
)


def find_line(stop: Stop) -> int:
    """Return the line where a stop's function is defined, from 1.

    Raises LookupError if its file has no such function.
    """
    body = ast.parse((ROOT / "mdsmix" / stop.file).read_text("utf-8")).body
    node: ast.stmt | None = None
    for name in stop.function.split("."):
        node = next((n for n in body if getattr(n, "name", "") == name), None)
        if node is None:
            raise LookupError(f"{stop.file} has no {stop.function}")
        body = getattr(node, "body", [])
    assert node is not None
    return node.lineno


def list_rows() -> Iterator[str]:
    """Yield the rows of the page's table: number, function, caller, what it does."""
    yield "| stop | function | called by | what it does |"
    yield "|---|---|---|---|"
    for number, stop in enumerate(STOPS, 1):
        find_line(stop)
        link = f"[`{stop.function}`](../mdsmix/{stop.file}) in `{stop.file}`"
        yield f"| {number} | {link} | {stop.caller or 'the shell'} | {stop.what} |"


WIDTH = 860
ROW = 34
INDENT = 46
STYLE = (
    "text{font:13px sans-serif;fill:#57606a}.name{font:bold 13px monospace;fill:#1a7f37}"
    "path{stroke:#8c959f;fill:none}circle{fill:#1a7f37}.number{fill:#fff;font-size:11px}"
)


def draw() -> str:
    """Return the picture as SVG: the stops as a tree of calls, from top to bottom."""
    depths = list[int]()
    shapes = list[str]()
    for number, stop in enumerate(STOPS, 1):
        depth = depths[stop.caller - 1] + 1 if stop.caller else 0
        depths.append(depth)
        x = 16 + INDENT * depth
        y = ROW * number - 8
        if stop.caller:
            top = ROW * stop.caller + 3
            line = x - INDENT
            shapes.append(f'<path d="M{line} {top}V{y}H{x - 11}"/>')
        shapes.append(f'<circle cx="{x}" cy="{y}" r="11"/>')
        shapes.append(
            f'<text class="number" x="{x}" y="{y + 4}" text-anchor="middle">{number}</text>'
        )
        shapes.append(f'<text class="name" x="{x + 18}" y="{y + 4}">{escape(stop.function)}</text>')
        shapes.append(f'<text x="{x + 190}" y="{y + 4}">mdsmix/{escape(stop.file)}</text>')
    size = f"{WIDTH} {ROW * len(STOPS) + 16}"
    title = "The twelve functions that a conversion calls, each below its caller"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>{''.join(shapes)}</svg>\n"
    )
