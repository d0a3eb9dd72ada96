"""`@frozen`: a frozen dataclass that is made in a fifth of the time.

Python's `dataclass(frozen=True)` writes six methods for each class and compiles them: 0.48 ms. A
command imports about 110 such classes, which was a fifth of its seconds if it had nothing to do.
But five of the six methods differ only in the names of the fields. Here they are the same functions
for all classes, and only a short `__init__` is compiled: 0.09 ms.

Nothing else differs in a class that has a docstring: `fields`, `replace`, `asdict`, `match`,
pickles, copies, inheritance and the texts of all errors. Making an object takes 0.3 us longer,
comparing and hashing 0.5 us. A class that Python's decorator makes frozen cannot inherit from one
of these, nor these from it, so mdsmix uses `@frozen` for all frozen classes but one that is ordered
and one that is compared by identity.
"""

from __future__ import annotations

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


_FACTORY_WANTED = object()
"The default value of a parameter whose field has a default factory."


def _compile_init(cls: type[Any]) -> Callable[..., None]:
    """Return the `__init__` of a frozen dataclass. Of two fields `url: str` and
    `names: list[str] = field(default_factory=list)` it is:

        def __init__(self, url, names):
            for _name, _value in zip(
                _NAMES, (url, _make_names() if names is _FACTORY_WANTED else names)
            ):
                _set(self, _name, _value)

    A loop and separate default values compile twice as fast as a line for each field.
    """
    items = fields(cls)
    namespace: dict[str, Any] = {
        "__name__": cls.__module__,
        "_NAMES": [item.name for item in items],
        "_FACTORY_WANTED": _FACTORY_WANTED,
        "_set": object.__setattr__,
    }
    positional = ["self"]
    by_name = list[str]()
    defaults = list[Any]()
    defaults_by_name = dict[str, Any]()
    values = list[str]()
    for item in items:
        value = item.name
        default = item.default
        if item.default_factory is not MISSING:
            namespace[f"_make_{item.name}"] = item.default_factory
            value = f"_make_{item.name}() if {item.name} is _FACTORY_WANTED else {item.name}"
            default = _FACTORY_WANTED
        values.append(f"{value}, ")
        if item.kw_only:
            by_name.append(item.name)
            if default is not MISSING:
                defaults_by_name[item.name] = default
            continue
        positional.append(item.name)
        if default is not MISSING:
            defaults.append(default)
        elif defaults:
            raise TypeError(f"non-default argument {item.name!r} follows default argument")
    parameters = ", ".join([*positional, "*", *by_name] if by_name else positional)
    source = (
        f"def __init__({parameters}):\n"
        f"  for _name, _value in zip(_NAMES, ({''.join(values)})):\n"
        "    _set(self, _name, _value)\n"
    )
    if hasattr(cls, "__post_init__"):
        source += "  self.__post_init__()\n"
    compiled = dict[str, Any]()
    exec(source, namespace, compiled)
    init: Any = compiled["__init__"]
    init.__defaults__ = tuple(defaults)
    init.__kwdefaults__ = defaults_by_name
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {item.name: item.type for item in items} | {"return": None}
    return init  # type: ignore[no-any-return]


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
