"""One table, two readers: programs get raw values, people get the same ones spelled; no digit is lost where it is narrow."""

import io
from typing import Any

from rich.console import Console

from mdsmix.report.show import NamedValues, show
from mdsmix.table import Column, Table, as_json

TABLE = Table(
    columns=(
        Column("stream", "text"),
        Column("tokens"),
        Column("share", "share", key="share_of_tokens"),
        Column("seconds", "seconds"),
    ),
    rows=[("web[a]", 123_456_789_012, 0.25, 1.26), ("chat", None, 0.75, "up to date")],
    total=("all", 5, 1.0, 2.0),
    notes=["  a note of several words"],
)


def printed(item: Any, width: int, is_terminal: bool = True) -> list[str]:
    out = io.StringIO()
    terminal = Console(file=out, width=width, force_terminal=is_terminal, color_system=None)
    show(item, console=terminal)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def test_programs_get_raw_values_and_people_get_them_spelled() -> None:
    found = as_json(TABLE)
    values = {"tokens": 123_456_789_012, "share_of_tokens": 0.25, "seconds": 1.26}
    assert found["rows"][0] == {"stream": "web[a]", **values}
    assert found["rows"][1]["tokens"] is None
    assert (found["total"]["tokens"], found["notes"]) == (5, TABLE.notes)
    head, _, first, second, *_, total, note = printed(TABLE, 100)
    assert [line.split() for line in (head, first, second, total)] == [
        ["stream", "tokens", "share", "seconds"],
        ["web[a]", "123,456,789,012", "25.0%", "1.3"],
        ["chat", "?", "75.0%", "up", "to", "date"],
        ["all", "5", "100.0%", "2.0"],
    ]
    assert note == TABLE.notes[0]
    assert first.strip() in map(str.strip, printed(TABLE, 20, is_terminal=False)), "whole lines"


def test_a_narrow_terminal_folds_columns_and_sentences_and_never_a_number() -> None:
    for width in (20, 30, 36, 80):
        lines = printed(TABLE, width)
        for cell in ("123,456,789,012", "25.0%", "1.3", "100.0%"):
            (holding,) = [line.split() for line in lines if cell in line.split()]
            assert holding[0] in ("web[a]", "all"), "each piece begins with the row's name"
        fits = [line for line in lines if len(line) <= width]
        assert len(fits) == len(lines) or width == 20, "a single column may go over the edge"
    assert printed(TABLE, 20)[-2:] == ["  a note of several", "  words"]
    value = "a/path/that/is/longer/than/the/terminal 123,456,789 and words [bold] :smile: \x1b[31m"
    pairs = [("what", value), ("more", "1")]
    assert printed(NamedValues(pairs), 34) == [
        "  what  a/path/that/is/longer/than/the/terminal",
        "        123,456,789 and words",
        "        [bold] :smile: \\x1b[31m",
        "  more  1",
    ]
    assert len(printed(NamedValues(pairs), 34, is_terminal=False)) == 2
