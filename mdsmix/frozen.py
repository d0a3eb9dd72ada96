"""`@frozen`: a frozen dataclass that is made in a quarter of the time.

Python's `dataclass(frozen=True)` writes six methods for each class and compiles them: 0.48 ms. A
command imports about 110 such classes, which was a fifth of its seconds if it had nothing to do.
But five of the six methods differ only in the names of the fields. Here they are the same functions
for all classes, and only `__init__` is compiled: 0.12 ms.

Nothing else differs in a class that has a docstring: `fields`, `replace`, `asdict`, `match`,
pickles, copies, inheritance and the texts of all errors. Comparing and hashing take 0.5 us longer.
A class that Python's decorator makes frozen cannot inherit from one of these, nor these from it, so
mdsmix uses `@frozen` for all frozen classes but one that is ordered and one that is compared by
identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """Do nothing: only type checkers need it, and Python 3.10 does not have it."""
        return lambda function: function


Class = TypeVar("Class", bound=type[Any])


@overload
def frozen(cls: Class, /) -> Class: ...
@overload
def frozen(*, kw_only: bool = False, slots: bool = False) -> Callable[[Class], Class]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: Any = None, /, *, kw_only: bool = False, slots: bool = False) -> Any:
    """Make a class a frozen dataclass. The arguments are those of `dataclasses.dataclass`."""
    collect_fields = dataclass(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)

    def make(cls: type[Any]) -> type[Any]:
        return _add_methods(collect_fields(cls), slots)

    return make if cls is None else make(cls)


def _add_methods(cls: type[Any], slots: bool) -> type[Any]:
    """Add the methods of a frozen dataclass, except those that the class defines itself."""
    own = cls.__dict__
    methods: dict[str, Callable[..., Any]] = {
        "__init__": _compile_init(cls),
        "__repr__": _show,
        "__eq__": _is_equal,
    }
    if slots:
        methods["__getstate__"] = _get_state
        methods["__setstate__"] = _set_state
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    # Python has set the hash of a class that defines only __eq__ to None.
    if own.get("__hash__") is None:
        cls.__hash__ = _hash  # type: ignore[assignment]
    cls.__setattr__ = _refuse_setting  # type: ignore[assignment]
    cls.__delattr__ = _refuse_deleting  # type: ignore[assignment]
    cls.__compared_fields__ = tuple([item.name for item in fields(cls) if item.compare])
    return cls


def _compile_init(cls: type[Any]) -> Callable[..., None]:
    """Return the `__init__` of a frozen dataclass. Of two fields `url: str` and
    `names: list[str] = field(default_factory=list)` it is:

        def __init__(self, url, names=_MISSING):
            _set(self, "url", url)
            _set(self, "names", _make_names() if names is _MISSING else names)
    """
    values: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": MISSING}
    positional = ["self"]
    by_name = list[str]()
    lines = list[str]()
    for item in fields(cls):
        value = parameter = item.name
        if item.default_factory is not MISSING:
            values[f"_make_{item.name}"] = item.default_factory
            value = f"_make_{item.name}() if {item.name} is _MISSING else {item.name}"
            parameter = f"{item.name}=_MISSING"
        elif item.default is not MISSING:
            values[f"_default_{item.name}"] = item.default
            parameter = f"{item.name}=_default_{item.name}"
        (by_name if item.kw_only else positional).append(parameter)
        lines.append(f"  _set(self, {item.name!r}, {value})\n")
    if hasattr(cls, "__post_init__"):
        lines.append("  self.__post_init__()\n")
    parameters = ", ".join([*positional, "*", *by_name] if by_name else positional)
    source = (
        f"def make_init({', '.join(values)}):\n"
        f" def __init__({parameters}):\n{''.join(lines) or '  pass'}\n"
        " return __init__\n"
    )
    compiled = dict[str, Any]()
    exec(source, sys.modules[cls.__module__].__dict__, compiled)
    init: Callable[..., None] = compiled["make_init"](**values)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {item.name: item.type for item in fields(cls)} | {"return": None}
    return init


def _list_compared(value: Any) -> tuple[Any, ...]:
    """Return the values of an object that are compared and hashed: those of its fields, unless a
    field has `compare=False`.
    """
    return tuple([getattr(value, name) for name in value.__compared_fields__])


# The methods of all classes. Their texts are those of `dataclasses`.


@recursive_repr()
def _show(self: Any) -> str:
    """Return the object as source would make it: `Stat(size=3, modified=0.0)`."""
    shown = [f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _is_equal(self: Any, other: object) -> Any:
    """Return whether two objects of the same class have equal values; NotImplemented if their
    classes differ.
    """
    if type(other) is not type(self):
        return NotImplemented
    return _list_compared(self) == _list_compared(other)


def _hash(self: Any) -> int:
    """Return the hash of the values that are compared."""
    return hash(_list_compared(self))


def _is_fixed(value: Any, name: str) -> bool:
    """Return whether an attribute cannot be set. In a dataclass that is every attribute; in a
    subclass that is not itself a dataclass, only the fields.
    """
    return "__dataclass_fields__" in type(value).__dict__ or name in value.__dataclass_fields__


def _refuse_setting(self: Any, name: str, value: Any) -> None:
    """Raise FrozenInstanceError."""
    if _is_fixed(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_deleting(self: Any, name: str) -> None:
    """Raise FrozenInstanceError."""
    if _is_fixed(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _get_state(self: Any) -> list[Any]:
    """Return what a pickle of a class with slots has: the values of the fields."""
    return [getattr(self, item.name) for item in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    """Set the fields of an object that is unpickled."""
    for item, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, item.name, value)
