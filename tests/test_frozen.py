"""`@frozen` makes the same classes as Python's `dataclass(frozen=True)`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

import mdsmix
from mdsmix.frozen import frozen

Decorate = Callable[..., Any]
"""`@frozen`, or Python's decorator with the same arguments."""
DECORATORS: list[Decorate] = [frozen, partial(dataclasses.dataclass, frozen=True)]


def make_classes(decorate: Decorate, **options: bool) -> list[type[Any]]:
    """Return classes with each thing that a dataclass may have."""

    @decorate(**options)
    class Empty:
        """Has no fields."""

    @decorate(**options)
    class Plain:
        """Has defaults."""

        name: str
        size: int = 3
        tags: list[str] = field(default_factory=lambda: ["new"])
        secret: str = field(default="s", repr=False)
        seen: float = field(default=0.0, compare=False)
        KINDS: ClassVar[tuple[str, ...]] = ("a", "b")

        @property
        def upper(self) -> str:
            return self.name.upper()

    @decorate(**options)
    class Derived(Plain):
        """Has another default, and one more field."""

        name: str = "derived"
        more: tuple[int, ...] = field(default=(), kw_only=True)

        def __repr__(self) -> str:
            return f"<{self.name}>"

    @decorate(**options)
    class OwnMethods:
        """Defines methods that a dataclass would otherwise get."""

        name: str
        length: int = 0

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.name))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, OwnMethods) and self.length == other.length

    @decorate(**options)
    class OwnHash:
        """Defines its hash."""

        name: str

        def __hash__(self) -> int:
            return 7

    class Undecorated(Plain):
        """Is no dataclass itself, so it may have attributes that are no fields."""

    return [Empty, Plain, Derived, OwnMethods, OwnHash, Undecorated]


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    (("a",), {}),
    (("b",), {}),
    (("a", 4), {}),
    (("a", 4, ["x"]), {"seen": 1.0}),
    ((), {"name": "a"}),
    ((), {"name": "a", "size": 3, "seen": 2.0}),
    ((), {"name": "a", "more": (1, 2)}),
    (("a", 1, [], "", 0.0, 1), {}),
    (("a",), {"name": "a"}),
    (("a",), {"unknown": 1}),
    ((), {"name": {}}),
]
"Arguments of the classes; each class refuses some of them."


def try_to(do: Callable[[], Any]) -> Any:
    """Return what a function returns, or its error as text."""
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def observe(cls: type[Any]) -> Iterator[Any]:
    """Yield whatever can be seen of a class and its objects."""
    yield cls.__name__, cls.__qualname__, cls.__module__, cls.__match_args__, cls.__doc__
    yield [(item.name, item.type, item.default, item.kw_only) for item in dataclasses.fields(cls)]
    yield cls.__init__.__qualname__, cls.__init__.__annotations__
    parameters = inspect.signature(cls).parameters.values()
    yield [(p.name, p.kind, p.annotation) for p in parameters]
    objects = list[Any]()
    for words, options in CALLS:
        made = try_to(partial(cls, *words, **options))
        yield repr(made)
        if isinstance(made, cls):
            objects.append(made)
    for value in objects:
        # For a name that is no field, Python's classes with slots raise a TypeError of their own.
        has_slots = hasattr(value, "__slots__")
        for name in cls.__match_args__ if has_slots else ("name", "unknown"):
            yield try_to(partial(setattr, value, name, 1)), try_to(partial(delattr, value, name))
        yield dataclasses.asdict(value), dataclasses.astuple(value)
        yield hasattr(value, "__dict__"), getattr(value, "__slots__", None)
        yield try_to(lambda value=value: repr(dataclasses.replace(value, name="new")))
        yield copy.deepcopy(value) == value, copy.copy(value) == value
        yield value == value.__class__.__name__, value.__eq__(3), value != 3
        yield [value == other for other in objects]
        yield try_to(lambda value=value: hash(value))
        yield [try_to(lambda v=value, o=other: hash(v) == hash(o)) for other in objects]


@pytest.mark.parametrize("options", [{}, {"kw_only": True}, {"slots": True}], ids=str)
def test_classes_are_those_of_python(options: dict[str, bool]) -> None:
    ours, pythons = (make_classes(decorate, **options) for decorate in DECORATORS)
    for our, other in zip(ours, pythons, strict=True):
        for seen, expected in zip(observe(our), observe(other), strict=True):
            assert seen == expected


@pytest.mark.parametrize("decorate", DECORATORS, ids=["frozen", "python"])
def test_objects_of_different_classes_are_unequal(decorate: Decorate) -> None:
    plain, undecorated = [
        cls("a") for cls in make_classes(decorate) if cls.__name__ in ("Plain", "Undecorated")
    ]
    assert plain == type(plain)("a")
    assert plain != undecorated
    assert undecorated != plain


@pytest.mark.parametrize("decorate", DECORATORS, ids=["frozen", "python"])
def test_a_field_without_default_comes_first(decorate: Decorate) -> None:
    with pytest.raises(TypeError, match="non-default argument 'size' follows default argument"):

        @decorate()
        class Unordered:
            """Its constructor could not be called by position."""

            name: str = ""
            size: int


@frozen(slots=True)
class WithSlots:
    numbers: tuple[int, ...]
    nested: WithSlots | None = None


@frozen
class WithDict:
    numbers: tuple[int, ...]
    nested: WithDict | None = None


@pytest.mark.parametrize("cls", [WithSlots, WithDict])
def test_objects_can_be_pickled(cls: type[Any]) -> None:
    value = cls((1, 2), nested=cls((3,)))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert again == value
        assert again.nested.numbers == (3,)


def test_an_object_in_itself_is_printed() -> None:
    numbers = list[Any]()
    value = WithDict(numbers)  # type: ignore[arg-type]
    numbers.append(value)
    assert repr(value) == "WithDict(numbers=[...], nested=None)"


def test_patterns_match() -> None:
    match WithSlots((1,), None):
        case WithSlots(numbers, nested=None):
            assert numbers == (1,)
        case _:
            pytest.fail("no match")


def test_frozen_classes_are_made_here() -> None:
    """Python's decorator takes five times as long, and a command imports 110 classes."""
    made_by_python = list[str]()
    for path in sorted(Path(mdsmix.__file__).parent.rglob("*.py")):
        for line in path.read_text("utf-8").splitlines():
            if line.lstrip().startswith("@dataclass") and "frozen=True" in line:
                made_by_python.append(line)
    # `@frozen` makes no classes that are ordered, or compared by identity.
    assert sorted(made_by_python) == [
        "@dataclass(frozen=True, eq=False)",
        "@dataclass(frozen=True, order=True)",
    ]
