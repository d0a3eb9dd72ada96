"""What one rendering of a chat template may cost: steps and text, counted, and time, watched.

Steps and text are counted and not timed, so that a conversation is set aside or not on every machine alike: same input,
same bytes. Time only ever stops a run. The limits are a thousandfold of what templates need; a longer conversation may
make more text. What is looked at is what can grow: loops, calls, and operations whose result is longer than their
operands. One that gives a text as long as it was (`upper`, `trim`) costs nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mdsmix.errors import RecipeError

STEP_LIMIT = 1_000_000
"Turns of loops; a call of a macro counts for ten. In all 0.05 to 1 s. A loop in a loop over 1,000 messages is below."
TEXT_LIMIT = 1 << 20
"Characters of one text, besides GROWTH times the conversation's own."
GROWTH = 8
TEXTS = 128
"So many times TEXT_LIMIT may be made in all: templates that add message to message make each text anew."
RANGE_LIMIT = 100_000
"Numbers from `range`: the sandbox's own limit for one call; here for all calls of a rendering together."
PATIENCE = 60.0
"Seconds for one rendering, and for all that came to nothing."

UNWATCHED = 4096
"Steps and characters that are not worth a look."
_ELEMENT = 16
"Characters that an element of a list counts for besides its own."
_BITS = 4096
"Of whole numbers; larger ones take long to work out."
CALL = 10
"Steps that a call of a macro counts for: it takes 5 us, a turn of a loop 0.1."
_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"A width of 10,000 or more in a format, or one that is another value."


class Overrun(Exception):
    """A rendering that is over its budget."""


class Budget:
    """The account of the rendering that is going on."""

    __slots__ = ("began", "drawn", "made", "steps", "text_limit", "variables", "wasted")

    def __init__(self) -> None:
        self.wasted = 0.0
        self.begin({})

    def begin(self, variables: Mapping[str, Any]) -> None:
        self.drawn = self.made = self.steps = self.text_limit = 0
        self.began = 0.0
        self.variables = variables

    def draw(self, count: int) -> None:
        self.drawn += count
        if self.drawn > RANGE_LIMIT:
            self._overrun(f"a chat template may draw {RANGE_LIMIT} numbers from range()")

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > UNWATCHED:
            self._look()
            if self.steps > STEP_LIMIT:
                self._overrun(f"a chat template may take {STEP_LIMIT} steps")

    def hold(self, size: int) -> None:
        """Counts a text of so many characters, whether it is made already or about to be."""
        if size <= UNWATCHED:
            return
        self._look()
        self.made += size
        if not self.text_limit:
            self.text_limit = TEXT_LIMIT + GROWTH * size_of(dict(self.variables))
        if size > self.text_limit or self.made > TEXTS * self.text_limit:
            self._overrun(f"a chat template may make {self.text_limit} characters")

    def stepped(self, items: Any) -> Any:
        """The items of a loop, counted: at once where their number is known, else one by one."""
        try:
            count = len(items)
        except TypeError:
            return self._counted(items)
        self.step(count)
        return items if count <= UNWATCHED else self._watched(items)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item

    def _watched(self, items: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if not number & 63:
                self._look()
            yield item

    def _look(self) -> None:
        now = time.monotonic()
        self.began = self.began or now
        if now - self.began + self.wasted > PATIENCE:
            raise RecipeError(
                f"The chat template of the tokenizer takes more than {PATIENCE:.0f} s for what a template does in "
                "microseconds, so that the conversion would not end: correct its chat_template."
            )

    def _overrun(self, reason: str) -> None:
        if self.began:
            self.wasted += time.monotonic() - self.began
        raise Overrun(reason)


def size_of(value: Any) -> int:
    """Characters that a value comes to as text, more or less."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return size_of([*value, *value.values()])
    if isinstance(value, (list, tuple, set)):
        return _ELEMENT * len(value) + sum(map(size_of, value))
    if is_namespace(value):
        raise Overrun("a chat template may not put a namespace into another value")
    return _ELEMENT


def is_namespace(value: Any) -> bool:
    """Whether it is jinja2's, which is not imported here."""
    return type(value).__name__ == "Namespace"


def power_bits(operator: str, left: Any, right: Any) -> None:
    """Overrun for a whole number of so many digits that it takes long to work out."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits > _BITS or right.bit_length() > _BITS:
            raise Overrun(f"a chat template may work out numbers of {_BITS} bits")


def product(values: Sequence[Any]) -> int:
    """For what repeats a text or fills it up: the text times its largest argument."""
    first, *rest = values or [""]
    return (1 + _reach(first)) * (1 + max(map(_reach, rest), default=0))


def total(values: Sequence[Any]) -> int:
    return sum(map(size_of, values))


def _reach(value: Any) -> int:
    return abs(value) if isinstance(value, int) else size_of(value)


def _replaced(values: Sequence[Any]) -> int:
    text, old, new = map(str, [*values, "", ""][:3])
    return len(text) + text.count(old) * len(new)


def _joined(values: Sequence[Any]) -> int:
    """Of the filter: list, separator. The method has them the other way round."""
    one, other = [*values, ""][:2]
    items, separator = (other, one) if isinstance(one, str) else (one, other)
    return size_of(items) + len(items) * size_of(separator)


def _formatted(values: Sequence[Any]) -> int:
    form, *rest = values
    if _WIDTH.search(str(form)):
        raise Overrun("a chat template may format to a width of 9,999")
    return (1 + len(str(form))) * (1 + max(map(size_of, rest), default=0))


GROWING: dict[str, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"), product),
    **dict.fromkeys(("indent", "wordwrap", "batch", "slice", "urlize", "xmlattr"), product),
    **dict.fromkeys(("translate", "pprint"), product),
    **dict.fromkeys(("format", "format_map", "%"), _formatted),
    **dict.fromkeys(("dict", "Cycler", "Namespace"), total),
    "replace": _replaced,
    "join": _joined,
    "*": product,
}
"Filters, methods, types and operators whose result may be far longer than what they are given -> how long."
