"""A user's function as a shape: `my_shapes.py:read` from a file, or `package.module:read` from an
installed package.

The function gets a raw record (a dict). It returns a Document, a Pair or a Conversation of
`mdsmix.record`, or a dict in one of these forms:

- `{"text": ...}`
- `{"prompt": ..., "response": ...}`, or with `completion` in place of `response`
- `{"messages": [...]}`, with optional `tools`
- `{"prompt": ..., "chosen": ..., "rejected": ...}`, a preference
- `{"prompt": ..., "completion": ..., "label": true}`, an unpaired preference
- `{"prompt": ...}`, with optional `verified_answer` and `tools`, a prompt

If it returns a string or raises an exception, the record is bad for this reason.

The name of a published stream's shape contains a hash: of the file and the local files that it
imports, or of the package's version. So after an edit the stream is converted again. The function
is imported when the first record is read: a recipe is opened, checked and planned without it. A job
contains the content of the files, so a worker on another machine does not need the files.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cached_property, partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

import xxhash

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import RecipeError
from mdsmix.frozen import frozen
from mdsmix.record import Conversation, Document, Pair, RecordRefused
from mdsmix.shapes.messages import MESSAGES, OPENAI
from mdsmix.shapes.preference import PREFERENCE, PREFERENCE_OPENAI
from mdsmix.shapes.prompt import PROMPT
from mdsmix.shapes.shape import RawRecord, Shape
from mdsmix.shapes.spans import check_losses
from mdsmix.shapes.texts import PROMPT_RESPONSE, TEXT
from mdsmix.shapes.unpaired_preference import UNPAIRED_PREFERENCE

FUNCTION_REASONS = {
    "function_refused": "The recipe's function returned a string; the detail contains it.",
    "function_failed": "The recipe's function raised an exception; the detail contains it.",
    "function_gave_other": (
        "The recipe's function returned a value of a type that the stream does not take; the "
        "detail names the type."
    ),
}
"Reason codes of a shape that is a function -> their explanations."

GIVES: dict[str, Shape] = {
    "preference": PREFERENCE,  # before the pair: both have a prompt
    "conversation": MESSAGES,
    "pair": PROMPT_RESPONSE,
    "document": TEXT,
    "prompt": PROMPT,
    "unpaired_preference": UNPAIRED_PREFERENCE,
}
"""Value of a recipe's `source.gives` -> the shape whose rules the results of a function must
follow. If a function returns a dict, the first of these shapes whose first field is a key of the
dict is meant.
"""
WITH_TOOLS = {"preference": PREFERENCE_OPENAI, "conversation": OPENAI}
"The same for a dict that has tools."
FUNCTION_VERSIONS = {"preference": 3}
"""Value of `source.gives` -> the version of the rules for the results of a function; 1 if missing.
Version 1 ignored the tools of a preference, and version 2 found a prompt only at the beginning
of answers.
"""
MAX_MESSAGE = 1000
"How many characters of a function's message are stored with a bad record."
_BY = " by "
_OF_HASH = " of hash "


def is_function(shape: str | None) -> TypeGuard[str]:
    """Check whether the `shape:` of a recipe, or the shape that a published stream stores, names a
    user's function, such as `my_shapes.py:read`.
    """
    return shape is not None and ":" in shape


@frozen
class FunctionName:
    """The name of a user's function, in a recipe or in a published stream."""

    gives: str
    "The type of record that the function returns, a key of GIVES such as `pair`."
    module: str
    """`my_shapes.py`, or `package.module`. In a recipe a file may have a path, which begins in the
    recipe's folder.
    """
    attribute: str
    "The name of the function in the module, such as `read`."
    digest: str = ""
    "The hash of the function's files or of its package's version; empty in a recipe."

    @classmethod
    def in_recipe(cls, shape: str, gives: str) -> FunctionName:
        """Return the name from the `shape:` of a recipe, such as `my_shapes.py:read`.

        Args:
            shape: the recipe's `shape:`.
            gives: the type of record that the function returns, a key of GIVES such as `pair`.
        """
        module, _, attribute = shape.rpartition(":")
        return cls(gives, module, attribute)

    @classmethod
    def from_text(cls, text: str) -> FunctionName:
        """Return the name from a string that `to_text` has written."""
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


@frozen
class Function:
    """A user's Python function that reads records, with its own file and the local files that it
    imports.

    When an object is created or unpickled, it registers itself in the process under its name. So a
    worker that receives it can find it by the name in the stream's settings.
    """

    name: FunctionName
    files: Mapping[str, bytes]
    """Path in the folder -> content, for the function's file and the local files that it imports.
    Empty for a function in an installed package.
    """
    folder: str
    "The folder of these files, on the machine where they were read."

    def __post_init__(self) -> None:
        _registry[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Function, (self.name, self.files, self.folder)

    @cached_property
    def call(self) -> Callable[[Any], Any]:
        """The imported Python function. Raises RecipeError if the function cannot be imported."""
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
                f"fix {self.name.module}, or install the packages that it needs."
            ) from None
        if not callable(function):
            raise RecipeError(
                f"source.shape {shape} is {function!r}, which is not a function: set source.shape "
                "to the name of a function."
            )
        loaded: Callable[[Any], Any] = function
        return loaded


_registry: dict[FunctionName, Function] = {}
"Name -> function, for each function that this process has found or received with a job."


def describe_bad_name(shape: str) -> str | None:
    """Return a message if a recipe's `shape:` cannot be the name of a function, such as
    `my_shapes.py:read`; otherwise None.
    """
    if re.fullmatch(r"(.*\.py|\w+(\.\w+)*):[^\W\d]\w*", shape):
        return None
    return (
        f"source.shape is {shape!r}, which does not name a function: write a name such as "
        "my_shapes.py:read or package.module:read."
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
    # A function in a file depends on local files, any other on the version of its package. The
    # hash of these becomes a part of the name, so a change of them is a change of the stream.
    files = dict[str, bytes]()
    if name.module.endswith(".py"):
        if not path.is_file():
            raise RecipeError(
                f"source.shape is {shape}, but there is no such file: {path}; correct source.shape."
            )
        files = _read_local_files(path)
        hashed: list[Any] = sorted(files.items())
        name = replace(name, module=path.name)
    else:
        hashed = _find_package_versions(name)
    name = replace(name, digest=xxhash.xxh128_hexdigest(repr(hashed)))
    return Function(name, files, str(path.parent))


def _read_local_files(path: Path) -> dict[str, bytes]:
    """Return a file, and all files in its folder that it imports directly or through other files:
    path in the folder -> content.

    Raises RecipeError if a file is not valid Python.
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
        for module in _find_imported_modules(tree, file, folder):
            for candidate in (module / "__init__.py", module.with_suffix(".py")):
                if candidate.is_file() and candidate.is_relative_to(folder):
                    name = str(candidate.relative_to(folder))
                    if name not in files:
                        unread[name] = candidate
    return files


def _find_imported_modules(tree: ast.Module, file: Path, root: Path) -> Iterator[Path]:
    """Yield the paths, without a suffix, that the import lines of a file may refer to. For
    `from a.b import c` these are a, a/b and a/b/c.

    Args:
        tree: the parsed file.
        file: the path of the file, where relative imports begin.
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


def _find_package_versions(name: FunctionName) -> list[str]:
    """Return the name and version of each installed package that contains the function's module:
    `["shapes-of-mine 1.2"]`. For a module that is in no installed package, return the hashes of the
    files of its top-level package.

    Raises RecipeError if the module cannot be found.
    """
    from importlib.metadata import packages_distributions, version  # 12 ms

    top = name.module.partition(".")[0]
    packages = packages_distributions().get(top)
    if packages:
        return [f"{package} {version(package)}" for package in sorted(set(packages))]
    spec = find_spec(top)
    if spec is None:
        raise RecipeError(
            f"source.shape is {name.shape}, but no package {top} is installed here: install the "
            "package, or set source.shape to a function in a file, such as my_shapes.py:read."
        )
    path = Path(str(spec.origin))
    is_package = path.name == "__init__.py"
    paths = sorted(path.parent.rglob("*.py")) if is_package else [path]
    return [xxhash.xxh128_hexdigest(file.read_bytes()) for file in paths if file.is_file()]


class _LocalModules:
    """Finds the modules of functions in their folders, for Python's `import`. It is asked before
    Python looks anywhere else.
    """

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        "Path of a module's file in its folder -> content."
        self._folders: dict[str, str] = {}
        "Name of a top-level module -> its folder."
        sys.meta_path.insert(0, self)

    def add(self, function: Function) -> None:
        """Make the modules of a function importable.

        Raises ImportError if this process has imported a different module of the same name.
        """
        folder = Path(function.folder)
        if not _are_unchanged(folder, function.files):
            # This is another machine, or the files have changed: write them to the cache.
            folder = cache_folder() / "functions" / function.name.digest
            for path, content in function.files.items():
                keep_in_cache(folder / path, content)
        for path, content in function.files.items():
            name = Path(path).parts[0].removesuffix(".py")
            is_foreign = name in sys.modules and name not in self._folders
            known_content = self._contents.setdefault(path, content)
            if is_foreign or known_content != content:
                raise ImportError(
                    f"this process has imported another module {name}: rename the module {name} "
                    "of the function"
                )
            self._folders[name] = str(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = self._folders.get(name)
        return PathFinder.find_spec(name, [folder]) if folder else None


_local_modules = _LocalModules()


def _are_unchanged(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Check whether the folder still has all these files with the same content.

    Args:
        folder: the folder.
        files: path in the folder -> content.
    """
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            return False
    return True


def make_function_shape(name: FunctionName) -> Shape:
    """Return a shape (how a stream's records are read) that calls a user's function for each
    record. The function is imported only when the first record is read.
    """
    return Shape(
        name=name.to_text(),
        version=FUNCTION_VERSIONS.get(name.gives, 1),
        gives=GIVES[name.gives].gives,
        reasons=FUNCTION_REASONS,
        parse=partial(_call_function, name),
    )


def find_registered_function(shape: str | None) -> Function | None:
    """Return the user's function that a stream's shape names, such as `my_shapes.py:read`. Return
    None if the shape does not name a function, or the function is not registered in this process.
    """
    return _registry.get(FunctionName.from_text(shape)) if is_function(shape) else None


def import_function(shape: str | None) -> str | None:
    """Import the user's function that a stream's shape names, such as `my_shapes.py:read`. Return a
    warning if this imports torch, otherwise None. Do nothing if the shape does not name a function.
    """
    function = find_registered_function(shape)
    if function is None:
        return None
    had_torch = "torch" in sys.modules
    _ = function.call  # reading this attribute imports the function
    if had_torch or "torch" not in sys.modules:
        return None
    return (
        f"the function {function.name.shape} imports torch: every process of this conversion "
        "loads torch too, and starts seconds later"
    )


def _call_function(name: FunctionName, raw: RawRecord) -> Any:
    """Read a record with a user's function. What the function prints goes to stderr.

    Raises RecordRefused if the function fails, returns a string (its reason to refuse the record),
    or returns a record that breaks a rule.
    Raises RecipeError if the function cannot be imported.
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
    """Make a record of what a user's function returned. It is checked like a record that was read
    from a file: a pair, for example, by the rules of the shape prompt_response.

    Raises RecordRefused if the record breaks a rule, or is not of the type that the stream takes.

    Args:
        answer: a Document, Pair or Conversation, or a dict such as `{"text": ...}`.
        gives: the type that the stream takes, a key of GIVES such as `pair`.
    """
    is_record = isinstance(answer, Document | Pair | Conversation)
    tree = answer._asdict() if is_record else answer
    keys = set(tree) if isinstance(tree, dict) else set[Any]()
    # The type of the record follows from its keys: a document has the key `text`.
    record_types = [name for name, shape in GIVES.items() if shape.fields[0] in keys]
    if not record_types:
        raise RecordRefused("function_gave_other", said=type(answer).__name__)
    record_type = record_types[0]
    # What looks like a pair may be a prompt alone, or an answer with a label.
    if record_type == "pair" and _is_prompt_or_unpaired(gives, keys):
        record_type = gives
    if record_type != gives:
        why = (
            f"a {record_type} in a stream of {gives}s: write source.gives: {record_type} for "
            f"{record_type}s"
        )
        raise RecordRefused("function_gave_other", said=why)
    # The shapes in GIVES read no tools. A pair may have the key `completion` in place of
    # `response`.
    shape = GIVES[gives]
    if tree.get("tools"):
        shape = WITH_TOOLS.get(gives, shape)
    fields = shape.own_fields
    if gives == "pair" and "response" not in keys:
        fields["response"] = "completion"
    record = shape.parse(RawRecord(tree, fields, {}))
    if isinstance(answer, Conversation):
        record = record._replace(trained=answer.trained, variables=answer.variables)
        if answer.losses:
            record = record._replace(losses=check_losses(answer.losses, record.messages))
    return record


def _is_prompt_or_unpaired(gives: str, keys: Set[str]) -> bool:
    """Check whether a dict with the key `prompt` is what its stream takes: a prompt alone (without
    an answer) in a stream of prompts, or an answer with a label in a stream of unpaired
    preferences.

    Args:
        gives: the type that the stream takes, a key of GIVES.
        keys: the keys of the dict.
    """
    if gives == "prompt":
        return keys.isdisjoint(("response", "completion"))
    return gives == "unpaired_preference" and "label" in keys
