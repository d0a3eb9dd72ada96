"""A function of the user's as a shape: `my_shapes.py:read` of a file, or `package.module:read` of
an installed package.

The function takes a raw record, a dict, and returns a Document, a Pair or a Conversation of
`mdsmix.record`, or a dict, as LLM-Foundry's preprocessing functions do: `{"text": ...}`,
`{"prompt": ..., "response": ...}` (or `completion`), or `{"messages": [...]}` with optional
`tools`. A preference is a dict `{"prompt": ..., "chosen": ..., "rejected": ...}`. A returned text
is the reason why the record is bad, and so is an exception.

A published stream knows the function by a name with a hash: of the file and the local files that it
imports, or of the package's version. After an edit the stream is converted again. Only `read`
imports anything: a recipe is opened, checked and planned without it. A job holds the content of the
files, so a worker on another machine needs none of them.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from itertools import accumulate, islice
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
    "function_refused": "The recipe's function returned a text, which the detail says.",
    "function_failed": "The recipe's function raised an exception, which the detail says.",
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
"""Value of a recipe's `source.gives` -> the shape whose rules a function's answer must keep. A dict
is known by the shape's first field.
"""
LONGEST = 1000
"Characters of a function's message that are kept beside a bad record."
_BY, _AT = " by ", " of hash "


@dataclass(frozen=True)
class Function:
    """A function with all files that decide what it does. Unpickling registers it in its process
    under its name.
    """

    name: str
    "The name in a published stream: `pair by my_shapes.py:read of hash 0f3a...`."
    files: Mapping[str, bytes]
    """Path in the folder -> content, of a file and the local files that it imports; empty for an
    installed package.
    """
    folder: str
    "The folder of these files on the machine that read them."

    def __post_init__(self) -> None:
        _known[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Function, (self.name, self.files, self.folder)

    @cached_property
    def call(self) -> Callable[[Any], Any]:
        """The function itself, imported; RecipeError where it cannot be."""
        written = _written(self.name)
        place, _, attribute = written.rpartition(":")
        try:
            with redirect_stdout(sys.stderr):  # stdout is the command's
                if self.files:
                    _local.add(self)
                    place = Path(place).stem
                found: Callable[[Any], Any] = getattr(importlib.import_module(place), attribute)
        except (Exception, SystemExit) as error:
            raise RecipeError(
                f"source.shape {written} cannot be imported ({type(error).__name__}: {error}): mend it, or install what it needs."
            ) from None
        if not callable(found):
            raise RecipeError(f"source.shape {written} is {found!r}, no function: name one.")
        return found


_known: dict[str, Function] = {}


def is_function(shape: str | None) -> TypeGuard[str]:
    """Whether a recipe's `shape:`, or a manifest's, names a function."""
    return shape is not None and ":" in shape


def fault(written: str) -> str | None:
    """A sentence on a `shape:` that cannot name a function; None for one that can."""
    if re.fullmatch(r"(.*\.py|\w+(\.\w+)*):[^\W\d]\w*", written):
        return None
    return f"source.shape is {written!r}, which names no function: write my_shapes.py:read, or package.module:read."


def find_function(written: str, gives: str, folder: Path) -> Function:
    """The function that a recipe in this folder names; nothing is imported. RecipeError where its
    file or package is missing.
    """
    place, _, name = written.rpartition(":")
    path = folder / place
    is_file = place.endswith(".py")
    if is_file and not path.is_file():
        raise RecipeError(f"source.shape {written}: there is no file {path}; correct its path.")
    files = _local_files(path) if is_file else {}
    digest = xxhash.xxh128_hexdigest(repr(sorted(files.items()) or _versions(place, written)))
    name = f"{gives}{_BY}{path.name if is_file else place}:{name}{_AT}{digest}"
    return Function(name, files, str(path.parent))


def _local_files(path: Path) -> dict[str, bytes]:
    """Path -> content, of a file and of the files in its folder that import lines name, directly or
    through each other.
    """
    files, waiting = dict[str, bytes](), {path.name: path}
    while waiting:
        name, file = waiting.popitem()
        files[name] = file.read_bytes()
        try:
            tree = ast.parse(files[name])
        except (SyntaxError, ValueError) as error:
            raise RecipeError(f"{file} is no Python that can be read: {error}; mend it.") from None
        for module in _imported(tree, file, path.parent):
            for each in (module / "__init__.py", module.with_suffix(".py")):
                if each.is_file() and each.is_relative_to(path.parent):
                    waiting[str(each.relative_to(path.parent))] = each
        waiting = {name: file for name, file in waiting.items() if name not in files}
    return files


def _imported(tree: ast.Module, file: Path, root: Path) -> Iterator[Path]:
    """Paths without suffix that a file's import lines may mean: a, a/b and a/b/c for `from a.b
    import c`.
    """
    for node in ast.walk(tree):
        start, names = root, list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [root, *file.parents][node.level]
            names = [".".join(filter(None, [node.module, alias.name])) for alias in node.names]
        for name in names:
            yield from islice(accumulate(name.split("."), Path.__truediv__, initial=start), 1, None)


def _versions(module: str, written: str) -> list[str]:
    """Name and version of the package of a module; for a package without a version, the hashes of
    its files.
    """
    top = module.partition(".")[0]
    if found := packages_distributions().get(top):
        return [f"{name} {version(name)}" for name in sorted(set(found))]
    spec = find_spec(top)
    if spec is None:
        raise RecipeError(
            f"source.shape {written}: no package {top} is installed here; install it, or name a file: my_shapes.py:read."
        )
    path = Path(str(spec.origin))
    paths = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return [xxhash.xxh128_hexdigest(each.read_bytes()) for each in paths if each.is_file()]


class _LocalModules(MetaPathFinder):
    """Finds the modules of functions in their folders, before Python looks for them anywhere."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._folders: dict[str, str] = {}
        sys.meta_path.insert(0, self)

    def add(self, function: Function) -> None:
        """Makes the modules of a function known; ImportError where this process has imported
        another module of one of their names.
        """
        folder, files = Path(function.folder), function.files
        if any(not (folder / n).is_file() or (folder / n).read_bytes() != files[n] for n in files):
            # This is another machine, or the files have changed.
            folder = cache_folder() / "functions" / function.name.partition(_AT)[2]
            for path, content in files.items():
                keep_in_cache(folder / path, content)
        for path, content in files.items():
            name = Path(path).parts[0].removesuffix(".py")
            is_other = name in sys.modules and name not in self._folders
            if is_other or self._contents.setdefault(path, content) != content:
                raise ImportError(f"this process has imported another module {name}: rename it")
            self._folders[name] = str(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = self._folders.get(name)
        return PathFinder.find_spec(name, [folder]) if folder else None


_local = _LocalModules()


def function_shape(name: str) -> Shape:
    """The shape of a function, by its `Function.name`."""
    return Shape(
        name=name,
        gives=GIVES[name.partition(_BY)[0]].gives,
        reasons=FUNCTION_REASONS,
        parse=partial(_parse, name),
    )


def load(name: str | None) -> str | None:
    """Imports the function of a shape, if the shape is one. Returns a sentence if that imports
    torch, else None.
    """
    if name not in _known:
        return None
    had_torch = "torch" in sys.modules
    _ = _known[name].call
    if had_torch or "torch" not in sys.modules:
        return None
    return f"{_written(name)} imports torch: every process of this conversion holds it, and starts seconds later"


def known(name: str | None) -> Function | None:
    """The function of a shape, if this process has found one of this name; else None."""
    return _known.get(name) if name else None


def _written(name: str) -> str:
    return name.partition(_BY)[2].partition(_AT)[0]


def _parse(name: str, raw: RawRecord) -> Any:
    try:
        call = _known[name].call
        with redirect_stdout(sys.stderr):
            said = call(dict(raw.record))
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecordRefused(
            "function_failed", error=f"{type(error).__name__}: {error}"[:LONGEST]
        ) from error
    if isinstance(said, str):
        raise RecordRefused("function_refused", said=said[:LONGEST])
    return _record(said, name.partition(_BY)[0])


def _record(said: Any, gives: str) -> Any:
    """The record of a function's answer, read by the shape in GIVES; RecordRefused where the answer
    breaks its rules.
    """
    tree = said._asdict() if isinstance(said, Document | Pair | Conversation) else said
    keys = set(tree) if isinstance(tree, dict) else set[Any]()
    given = next((each for each, shape in GIVES.items() if shape.fields[0] in keys), "")
    if given != gives:
        told = f"a {given} of a stream of {gives}s: source.gives: {given} makes one of {given}s"
        raise RecordRefused("function_gave_other", said=told if given else type(said).__name__)
    shape = OPENAI if given == "conversation" and tree.get("tools") else GIVES[gives]
    fields = shape.own_fields
    if gives == "pair" and "response" not in keys:
        fields["response"] = "completion"
    found = shape.parse(RawRecord(tree, fields, {}))
    if isinstance(said, Conversation):
        found = found._replace(trained=said.trained, variables=said.variables)
    return found
