"""Real text without a download: documents and conversations from the docstrings of Python's
standard library, as the running Python has them on its disk.

The same Python version always gives the same records; another version has another library.
"""

from __future__ import annotations

import ast
import inspect
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mdsmix.frozen import frozen

Record = dict[str, Any]
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
SHUFFLE_SEED = 0
MOST_EXCHANGES = 3
"Questions with an answer in one conversation."


@frozen
class Described:
    """A public function or class that has a docstring."""

    name: str
    "Its full name, such as `shutil.move`."
    call: str
    "How it is called, such as `shutil.move(src, dst, copy_function=copy2)`."
    docstring: str


@frozen
class Module:
    """The docstrings of a module of Python's standard library."""

    name: str
    docstrings: list[str]
    "The docstrings of the module and of its functions, classes and methods."
    described: list[Described]


def read_modules() -> Iterator[Module]:
    """Yield the modules of the standard library, in a fixed shuffled order, so that the first few
    are a fair sample.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = list[Path]()
    for folder, folders, names in os.walk(library):
        folders[:] = set(folders) - SKIPPED_FOLDERS
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort()
    random.Random(SHUFFLE_SEED).shuffle(paths)
    for path in paths:
        module = _read_module(path, library)
        if module:
            yield module


def make_documents(modules: Iterable[Module]) -> Iterator[Record]:
    """Yield the docstrings of two lines or more as `{"text": ...}`, each text once."""
    yielded = set[str]()
    for module in modules:
        for text in module.docstrings:
            if "\n" in text and text not in yielded:
                yielded.add(text)
                yield {"text": text}


def make_chats(modules: Iterable[Module]) -> Iterator[Record]:
    """Yield conversations `{"messages": [{"role": "user", "content": "What does ..."}, ...]}` on
    the functions of each module. A third of them begin with a system message.
    """
    for module in modules:
        chance = random.Random(module.name)
        remaining = module.described
        while remaining:
            count = chance.randint(1, MOST_EXCHANGES)
            yield {"messages": _make_messages(module.name, remaining[:count], chance)}
            remaining = remaining[count:]


def _make_messages(module: str, topics: list[Described], chance: random.Random) -> list[Record]:
    """Return the messages of one conversation on these functions and classes."""
    messages = list[Record]()
    if chance.random() < 1 / 3:
        system = f"You explain Python's {module} module."
        messages.append({"role": "system", "content": system})
    for topic in topics:
        if chance.random() < 1 / 4:
            question = f"How is {topic.name} called?"
            answer = topic.call
        else:
            question = f"What does {topic.name} do?"
            answer = topic.docstring.split("\n\n")[0]
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _read_module(path: Path, library: Path) -> Module | None:
    """Return a module's docstrings; None if its file is not UTF-8 or not this Python's syntax."""
    try:
        tree = ast.parse(path.read_bytes().decode("utf-8"))
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    parts = path.relative_to(library).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    docstrings = [_read_docstring(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            docstrings.append(_read_docstring(node))
    described = list[Described]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            docstring = _read_docstring(node)
            if docstring:
                described.append(_describe(f"{name}.{node.name}", node, docstring))
    return Module(name, docstrings, described)


def _describe(name: str, node: ast.FunctionDef | ast.ClassDef, docstring: str) -> Described:
    arguments = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else "..."
    return Described(name, f"{name}({arguments})", docstring)


def _read_docstring(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
    """Return the docstring without its indentation; empty if there is none."""
    return inspect.cleandoc(ast.get_docstring(node) or "").strip()
