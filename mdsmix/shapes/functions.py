"""A user's function as a shape: `my_shapes.py:read` from a file, or `package.module:read` from an
installed package.

The function takes a raw record, a dict, and returns a Document, a Pair or a Conversation of
`mdsmix.record`, or a dict, as LLM-Foundry's preprocessing functions do: `{"text": ...}`,
`{"prompt": ..., "response": ...}` (or `completion`), or `{"messages": [...]}` with optional
`tools`. A preference is a dict `{"prompt": ..., "chosen": ..., "rejected": ...}`. A returned string
is the reason why the record is bad, and so is an exception.

A published stream names the function with a hash: of the file and the local files that it imports,
or of the package's version. After an edit the stream is converted again. Only the first record that
is read imports the function: a recipe is opened, checked and planned without it. A job contains the
content of the files, so a worker on another machine does not need the files.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

import xxhash

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, Document, Pair, RecordRefused
from mdsmix.shapes.messages import MESSAGES, OPENAI
from mdsmix.shapes.preference import PREFERENCE
from mdsmix.shapes.shape import RawRecord, Shape
from mdsmix.shapes.texts import PROMPT_RESPONSE, TEXT

FUNCTION_REASONS = {
    "function_refused": "The recipe's function returned a string; the detail contains it.",
    "function_failed": "The recipe's function raised an exception; the detail contains it.",
    "function_gave_other": (
        "The recipe's function returned a value of another type than the stream takes."
    ),
}
"Reason codes of a shape that is a function -> their explanations."

GIVES: dict[str, Shape] = {
    "preference": PREFERENCE,  # before the pair: both have a prompt
    "conversation": MESSAGES,
    "pair": PROMPT_RESPONSE,
    "document": TEXT,
}
"""Value of a recipe's `source.gives` -> the shape whose rules a function's result must follow. A
dict is recognised by the shape's first field.
"""
MAX_MESSAGE = 1000
"Characters of a function's message that are stored with a bad record."
_BY = " by "
_OF_HASH = " of hash "


def is_function(shape: str | None) -> TypeGuard[str]:
    """Return whether the `shape:` of a recipe, or the shape of a manifest, names a function."""
    return shape is not None and ":" in shape


@dataclass(frozen=True)
class FunctionName:
    """The name of a user's function, in a recipe or in a published stream."""

    gives: str
    "The type of record that it returns, a key of GIVES such as `pair`."
    module: str
    """`my_shapes.py`, or `package.module`. In a recipe's name, the path of the file from the
    recipe's folder.
    """
    attribute: str
    "The function in the module."
    digest: str = ""
    "The hash of the function's files or of its package's version; empty in a recipe's name."

    @classmethod
    def in_recipe(cls, shape: str, gives: str) -> FunctionName:
        """Parse the `shape:` of a recipe, such as `my_shapes.py:read`."""
        module, _, attribute = shape.rpartition(":")
        return cls(gives, module, attribute)

    @classmethod
    def from_text(cls, text: str) -> FunctionName:
        """Parse a name that `to_text` has written."""
        gives, _, shape_and_hash = text.partition(_BY)
        shape, _, digest = shape_and_hash.partition(_OF_HASH)
        module, _, attribute = shape.rpartition(":")
        return cls(gives, module, attribute, digest)

    def to_text(self) -> str:
        """Return the name in a published stream: `pair by my_shapes.py:read of hash 0f3a...`."""
        text = f"{self.gives}{_BY}{self.shape}"
        return f"{text}{_OF_HASH}{self.digest}" if self.digest else text

    @property
    def shape(self) -> str:
        """The name in the form of a recipe's `shape:`."""
        return f"{self.module}:{self.attribute}"


@dataclass(frozen=True)
class Function:
    """A function with all files that its results depend on. Creating or unpickling an object
    registers it in the process, under its name.
    """

    name: FunctionName
    files: Mapping[str, bytes]
    """Path in the folder -> content, of a file and the local files that it imports; empty for an
    installed package.
    """
    folder: str
    "The folder of these files on the machine that read them."

    def __post_init__(self) -> None:
        _registry[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Function, (self.name, self.files, self.folder)

    @cached_property
    def call(self) -> Callable[[Any], Any]:
        """The function itself, imported. Raises RecipeError if it cannot be imported."""
        shape = self.name.shape
        module = self.name.module
        try:
            with redirect_stdout(sys.stderr):  # stdout is the command's
                if self.files:
                    _local_modules.add(self)
                    module = Path(module).stem
                function = getattr(importlib.import_module(module), self.name.attribute)
        except (Exception, SystemExit) as error:
            raise RecipeError(
                f"source.shape {shape} cannot be imported ({type(error).__name__}: {error}): "
                "fix it, or install the packages that it needs."
            ) from None
        if not callable(function):
            raise RecipeError(
                f"source.shape {shape} is {function!r}, which is not a function: name a function."
            )
        loaded: Callable[[Any], Any] = function
        return loaded


_registry: dict[FunctionName, Function] = {}
"Name -> function, of those that this process has found itself or received with a job."


def describe_bad_name(shape: str) -> str | None:
    """Return a message on a recipe's `shape:` that cannot name a function; None if it can."""
    if re.fullmatch(r"(.*\.py|\w+(\.\w+)*):[^\W\d]\w*", shape):
        return None
    return (
        f"source.shape is {shape!r}, which does not name a function: write my_shapes.py:read, "
        "or package.module:read."
    )


def find_function(shape: str, gives: str, folder: Path) -> Function:
    """Find the function that a recipe names, without importing it.

    Args:
        shape: the recipe's `shape:`.
        gives: the type of record that the function returns, a key of GIVES such as `pair`.
        folder: the recipe's folder.

    Raises RecipeError if the function's file or package is missing.
    """
    name = FunctionName.in_recipe(shape, gives)
    path = folder / name.module
    files = dict[str, bytes]()
    if name.module.endswith(".py"):
        if not path.is_file():
            raise RecipeError(f"source.shape {shape}: no such file: {path}; correct the path.")
        files = _read_local_files(path)
        hashed: list[Any] = sorted(files.items())
        name = replace(name, module=path.name)
    else:
        hashed = _package_versions(name)
    name = replace(name, digest=xxhash.xxh128_hexdigest(repr(hashed)))
    return Function(name, files, str(path.parent))


def _read_local_files(path: Path) -> dict[str, bytes]:
    """Read a file and all files in its folder that it imports, directly or through other files.
    Return path in the folder -> content.
    """
    folder = path.parent
    files = dict[str, bytes]()
    unread = {path.name: path}
    while unread:
        name, file = unread.popitem()
        files[name] = file.read_bytes()
        try:
            tree = ast.parse(files[name])
        except (SyntaxError, ValueError) as error:
            raise RecipeError(f"{file} is not valid Python: {error}; fix it.") from None
        for module in _imported_modules(tree, file, folder):
            for candidate in (module / "__init__.py", module.with_suffix(".py")):
                if candidate.is_file() and candidate.is_relative_to(folder):
                    name = str(candidate.relative_to(folder))
                    if name not in files:
                        unread[name] = candidate
    return files


def _imported_modules(tree: ast.Module, file: Path, root: Path) -> Iterator[Path]:
    """Yield the paths, without a suffix, that a file's import lines may refer to: a, a/b and a/b/c
    for `from a.b import c`.

    Args:
        tree: the parsed file.
        root: the folder where absolute imports begin.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            start = root
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Level 0 is an absolute import, 1 is `from . import`, 2 is `from .. import`.
            start = [root, *file.parents][node.level]
            package = f"{node.module}." if node.module else ""
            names = [package + alias.name for alias in node.names]
        else:
            continue
        for name in names:
            path = start
            for step in name.split("."):
                path /= step
                yield path


def _package_versions(name: FunctionName) -> list[str]:
    """Return the name and version of each installed package that contains a module. For a module
    that is in no installed package, return the hashes of its files.
    """
    top = name.module.partition(".")[0]
    if packages := packages_distributions().get(top):
        return [f"{package} {version(package)}" for package in sorted(set(packages))]
    spec = find_spec(top)
    if spec is None:
        raise RecipeError(
            f"source.shape {name.shape}: no package {top} is installed here; install it, or name "
            "a file: my_shapes.py:read."
        )
    path = Path(str(spec.origin))
    is_package = path.name == "__init__.py"
    paths = sorted(path.parent.rglob("*.py")) if is_package else [path]
    return [xxhash.xxh128_hexdigest(file.read_bytes()) for file in paths if file.is_file()]


class _LocalModules(MetaPathFinder):
    """Imports the modules of functions from their folders, before Python looks for them anywhere
    else.
    """

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        "Path of a module's file in its folder -> content."
        self._folders: dict[str, str] = {}
        "Name of a top-level module -> its folder."
        sys.meta_path.insert(0, self)

    def add(self, function: Function) -> None:
        """Make the modules of a function importable. Raises ImportError if this process has
        imported a different module of the same name.
        """
        folder = Path(function.folder)
        if not _are_unchanged(folder, function.files):
            # This is another machine, or the files have changed.
            folder = cache_folder() / "functions" / function.name.digest
            for path, content in function.files.items():
                keep_in_cache(folder / path, content)
        for path, content in function.files.items():
            name = Path(path).parts[0].removesuffix(".py")
            is_foreign = name in sys.modules and name not in self._folders
            if is_foreign or self._contents.setdefault(path, content) != content:
                raise ImportError(f"this process has imported another module {name}: rename it")
            self._folders[name] = str(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = self._folders.get(name)
        return PathFinder.find_spec(name, [folder]) if folder else None


_local_modules = _LocalModules()


def _are_unchanged(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Check whether the folder has all these files (path in it -> content), with this content."""
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            return False
    return True


def function_shape(name: FunctionName) -> Shape:
    """Return a shape that reads records with a user's function. The function is looked up when the
    first record is read.
    """
    return Shape(
        name=name.to_text(),
        gives=GIVES[name.gives].gives,
        reasons=FUNCTION_REASONS,
        parse=partial(_parse, name),
    )


def registered_function(shape: str | None) -> Function | None:
    """Return the function that a stream's shape names. None if the shape does not name a function,
    or this process does not have the function.
    """
    return _registry.get(FunctionName.from_text(shape)) if is_function(shape) else None


def import_function(shape: str | None) -> str | None:
    """Import the function that a stream's shape names, if it names one. Return a warning if that
    imports torch, otherwise None.
    """
    function = registered_function(shape)
    if function is None:
        return None
    had_torch = "torch" in sys.modules
    _ = function.call
    if had_torch or "torch" not in sys.modules:
        return None
    return (
        f"{function.name.shape} imports torch: every process of this conversion loads it, "
        "and starts seconds later"
    )


def _parse(name: FunctionName, raw: RawRecord) -> Any:
    """Read a record with a user's function. The function prints to stderr.

    Raises RecordRefused if the function fails, returns a string (its reason to refuse the record),
    or returns a record that breaks a rule.
    """
    try:
        call = _registry[name].call
        with redirect_stdout(sys.stderr):
            answer = call(dict(raw.record))
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}"
        raise RecordRefused("function_failed", error=message[:MAX_MESSAGE]) from error
    if isinstance(answer, str):
        raise RecordRefused("function_refused", said=answer[:MAX_MESSAGE])
    return _read_answer(answer, name.gives)


def _read_answer(answer: Any, gives: str) -> Any:
    """Return the record that a function returned, after checking it by the rules of its shape.

    Raises RecordRefused if it breaks these rules, or is not of the type that the stream takes.

    Args:
        answer: a Document, Pair or Conversation, or a dict such as `{"text": ...}`.
        gives: the type that the stream takes, a key of GIVES.
    """
    is_record = isinstance(answer, Document | Pair | Conversation)
    tree = answer._asdict() if is_record else answer
    keys = set(tree) if isinstance(tree, dict) else set[Any]()
    form = next((name for name, shape in GIVES.items() if shape.fields[0] in keys), "")
    if not form:
        raise RecordRefused("function_gave_other", said=type(answer).__name__)
    if form != gives:
        why = f"a {form} in a stream of {gives}s: write source.gives: {form} for {form}s"
        raise RecordRefused("function_gave_other", said=why)
    has_tools = form == "conversation" and bool(tree.get("tools"))
    shape = OPENAI if has_tools else GIVES[gives]
    fields = shape.own_fields
    if gives == "pair" and "response" not in keys:
        fields["response"] = "completion"
    record = shape.parse(RawRecord(tree, fields, {}))
    if isinstance(answer, Conversation):
        record = record._replace(trained=answer.trained, variables=answer.variables)
    return record
