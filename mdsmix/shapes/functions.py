"""A function of the user's as a shape: `my_shapes.py:read` of a file, or `package.module:read` of an installed package.

The function is given a record, a dict, and returns what the record says: a Document, a Pair or a Conversation of `mdsmix.record`, or as a
dict `{"text": ...}`, `{"prompt": ..., "response": ...}` (or `completion`) or `{"messages": [...]}` with `tools` where it has some, which
is what LLM-Foundry's preprocessing functions return. A text that it returns, and an exception, are why the record is bad.

A published stream knows it by a name with a hash: of the file and the local files that it imports, or of the package's version. An edit so
converts again. Only `read` imports anything: a recipe is opened, checked and planned without it. A job holds the text of the files, so a
worker on another machine needs none of them.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from importlib.util import decode_source, find_spec, spec_from_loader
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, Document, NoRecord, Pair
from mdsmix.shapes.messages import read_messages, read_openai
from mdsmix.shapes.shape import Fields, Shape, refusing
from mdsmix.shapes.texts import read_document, read_pair

GIVES: dict[str, type] = {"document": Document, "pair": Pair, "conversation": Conversation}
"What a recipe's `source.gives` says."
_KNOWN_BY = {"conversation": "messages", "pair": "prompt", "document": "text"}
"The key by which a dict that a function returns is known."
LONGEST = 1000
"Characters of a function's message that are kept beside a bad record."
_BY, _AT = " by ", " of hash "


@dataclass(frozen=True)
class Function:
    """A function with all that decides what it does. One that is unpickled is known in its process by its name."""

    name: str
    "As a published stream knows it: `pair by my_shapes.py:read of hash 0f3a...`."
    files: Mapping[str, str]
    "Module -> source text, of a file and the local files that it imports; empty of an installed package."
    folder: str = ""
    "Where these files lie on the machine that read them: their `__file__`."

    def __post_init__(self) -> None:
        _known[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Function, (self.name, self.files, self.folder)

    @cached_property
    def call(self) -> Callable[[Any], Any]:
        """The function itself, imported; RecipeError where it cannot be."""
        written = _written(self.name)
        place, _, attribute = written.rpartition(":")
        _local.add(written, self.files, self.folder)
        try:
            with redirect_stdout(sys.stderr):  # stdout is the command's
                module = importlib.import_module(Path(place).stem if self.files else place)
            found: Callable[[Any], Any] = getattr(module, attribute)
        except (Exception, SystemExit) as error:
            raise RecipeError(
                f"source.shape {written} cannot be imported ({type(error).__name__}: {error}): mend it, or install what it needs."
            ) from None
        if not callable(found):
            raise RecipeError(f"source.shape {written} is {found!r}, no function: name one.")
        return found


_known: dict[str, Function] = {}


def is_function(shape: str) -> bool:
    """Whether a recipe's `shape:`, or a manifest's, names a function."""
    return ":" in shape


def fault(written: str) -> str | None:
    """A sentence on a name that cannot be that of a function; None for one that can."""
    place, _, name = written.rpartition(":")
    module = Path(place).stem if place.endswith(".py") else place
    if name.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return None
    return f"source.shape is {written!r}, which names no function: write my_shapes.py:read, or package.module:read."


def find_function(written: str, gives: str, folder: Path) -> Function:
    """What a recipe in this folder names; nothing is imported. RecipeError where it is not there."""
    place, _, name = written.rpartition(":")
    files, at = dict[str, str](), ""
    if place.endswith(".py"):
        path = folder / place
        if not path.is_file():
            raise RecipeError(f"source.shape {written}: there is no file {path}; correct its path.")
        files, place, at = _local_files(path), path.name, str(path.parent)
    digest = xxhash.xxh128_hexdigest(repr(sorted(files.items()) or _versions(place, written)))
    return Function(f"{gives}{_BY}{place}:{name}{_AT}{digest}", files, at)


def _local_files(path: Path) -> dict[str, str]:
    """Module -> text, of a file and of those in its folder that import lines name."""
    files, waiting = dict[str, str](), {path.stem: path}
    while waiting:
        name, file = waiting.popitem()
        try:
            files[name] = decode_source(file.read_bytes())
            tree = ast.parse(files[name])
        except (SyntaxError, ValueError) as error:
            raise RecipeError(f"{file} is no Python that can be read: {error}; mend it.") from None
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for module in _imported(tree, package):
            at = path.parent.joinpath(*module.split("."))
            both = (at / "__init__.py", at.with_suffix(".py"))
            found = next((each for each in both if each.is_file()), None)
            if found and module not in files:
                waiting[module] = found
    return files


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """What may be modules in the import lines of one of this package: of `from a.b import c` a, a.b and a.b.c."""
    for node in ast.walk(tree):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -node.level + 1 or None] if node.level else []
            base = [*above, *filter(None, [node.module])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        for name in names:
            yield from accumulate(name.split("."), "{}.{}".format)


def _versions(module: str, written: str) -> list[str]:
    """Name and version of the package that a module is of; of one without a version the hash of its files."""
    top = module.partition(".")[0]
    if found := packages_distributions().get(top):
        return [f"{name} {version(name)}" for name in sorted(set(found))]
    spec = find_spec(top)
    if spec is None:
        raise RecipeError(
            f"source.shape {written}: no package {top} is installed here; install it, or name a file: my_shapes.py:read."
        )
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    files = [path for path in paths or [Path(str(spec.origin))] if path.is_file()]
    return [xxhash.xxh128_hexdigest(path.read_bytes()) for path in files]


class _LocalModules(MetaPathFinder, ExecutionLoader):
    """Imports modules from their texts, before Python looks for them anywhere."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._folders: dict[str, str] = {}

    def add(self, written: str, files: Mapping[str, str], folder: str) -> None:
        for name, text in files.items():
            is_other = name in sys.modules and sys.modules[name].__loader__ is not self
            if is_other or self._texts.setdefault(name, text) != text:
                raise RecipeError(
                    f"source.shape {written}: this process has imported another module {name}, so that of this file would not be read; rename the file."
                )
            self._folders[name] = folder
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_here = name in self._texts or self.is_package(name)
        return spec_from_loader(name, self) if is_here else None

    def is_package(self, name: str) -> bool:
        return any(other.startswith(f"{name}.") for other in self._texts)

    def get_source(self, name: str) -> str:
        """A folder without `__init__.py` has no text."""
        return self._texts.get(name, "")

    def get_filename(self, name: str) -> str:
        path = Path(self._folders.get(name, ""), *name.split("."))
        return str(path / "__init__.py" if self.is_package(name) else path.with_suffix(".py"))


_local = _LocalModules()


def function_shape(name: str) -> Shape:
    """The shape of a function, by the name that `Function` has."""
    return Shape(
        name=name, gives=GIVES[name.partition(_BY)[0]], read=refusing(partial(_read, name))
    )


def load(name: str | None) -> str | None:
    """Imports the function of a shape, where it is one; returns a sentence where that imports torch."""
    if name not in _known:
        return None
    had_torch = "torch" in sys.modules
    _ = _known[name].call
    if had_torch or "torch" not in sys.modules:
        return None
    return f"{_written(name)} imports torch: every process of this conversion holds it, and starts seconds later"


def known(name: str | None) -> Function | None:
    """The function of a shape, where it is one that was found in this process."""
    return _known.get(name) if name else None


def _written(name: str) -> str:
    return name.partition(_BY)[2].partition(_AT)[0]


def _read(name: str, record: Any, fields: Fields) -> Any:
    try:
        call = _known[name].call
        with redirect_stdout(sys.stderr):
            said = call(dict(record))
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        return NoRecord("function_failed", error=f"{type(error).__name__}: {error}"[:LONGEST])
    if isinstance(said, str):
        return NoRecord("function_refused", said=said[:LONGEST])
    return _record(said, name.partition(_BY)[0])


def _record(said: Any, gives: str) -> Any:
    """What the function returned, held to the rules of the shape that is written so."""
    tree = said._asdict() if isinstance(said, Document | Pair | Conversation) else said
    keys = set(tree) if isinstance(tree, dict) else set[Any]()
    given = next((each for each, key in _KNOWN_BY.items() if key in keys), "")
    if given != gives:
        told = f"a {given} of a stream of {gives}s: source.gives: {given} makes one of {given}s"
        return NoRecord("function_gave_other", said=told if given else type(said).__name__)
    if gives == "document":
        return read_document(tree, {"text": "text"})
    if gives == "pair":
        answer = "response" if "response" in tree else "completion"
        return read_pair(tree, {"prompt": "prompt", "response": answer})
    read = read_openai if tree.get("tools") else read_messages
    found = read(tree, {key: key for key in ("messages", "tools")})
    flags = tree.get("trained") if tree is not said else None
    return found if flags is None or isinstance(found, str) else found._replace(trained=flags)
