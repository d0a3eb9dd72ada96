"""The page docs/conversion-path.md: a real conversion calls its twelve functions in their order."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import mdsmix as package
from tests.converting import Project, documents, mdsmix

SITE = runpy.run_path(str(Path(__file__).parents[1] / "docs/site/stops.py"))
STOPS = SITE["STOPS"]
FOLDER = Path(package.__file__).parent


def test_a_conversion_passes_the_stops_in_order(project: Project) -> None:
    """Each stop is called for the first time after the one before it, and below its caller."""
    numbers = {}
    for number, stop in enumerate(STOPS, 1):
        numbers[str(FOLDER / stop.file), SITE["find_line"](stop)] = number
    project.write_source(f"Number {n} of them." for n in range(50))
    project.configure(streams={"web": documents("a.jsonl")})
    callers = dict[int, int]()

    def number_of(frame: FrameType) -> int:
        return numbers.get((frame.f_code.co_filename, frame.f_code.co_firstlineno), 0)

    def note_call(frame: FrameType, event: str, _: Any) -> None:
        number = number_of(frame)
        if event != "call" or not number or number in callers:
            return
        caller = frame.f_back
        while caller and not number_of(caller):
            caller = caller.f_back
        callers[number] = number_of(caller) if caller else 0

    sys.setprofile(note_call)
    try:
        result = mdsmix("convert", project.recipe)
    finally:
        sys.setprofile(None)
    assert result.code == 0, result.err
    assert list(callers) == list(range(1, len(STOPS) + 1))
    assert list(callers.values()) == [stop.caller for stop in STOPS]


def test_the_picture_is_drawn_from_the_stops() -> None:
    """`make tables` draws it again."""
    assert SITE["PICTURE"].read_text("utf-8") == SITE["draw"]()
