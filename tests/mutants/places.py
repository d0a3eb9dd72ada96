"""Every place of a module where mutmut's operators know a fault, and the module with one of them.

The operators are mutmut's; what carries them is not. mutmut runs a mutant in a fork of the process that has imported the
module, and picks tests by what ran in that process: code that runs in forked workers and subprocesses, decorated
functions and module level (a fifth of the places) stay untried. Here a mutant is a file on disk.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import mutation_operators

HARMLESS_CALLS = {"len", "isinstance", "cast", "TypeVar"}
"Calls whose arguments mutmut leaves alone too, or that do nothing when they run."


@dataclass(frozen=True)
class Place:
    """One node of one module that has mutants."""

    file: str
    "Relative to the repository."
    line: int
    function: str
    "Qualified name of the innermost function around it; empty at module and class level."
    number: int
    "Which of the module's places."


def places(root: Path, file: str) -> list[Place]:
    """All places of a file, in their order; the same for the same bytes."""
    module = _Module(root / file)
    spans = functions(module.source)
    return [
        Place(file, line, function_at(spans, line), number)
        for number, (line, _) in enumerate(module.nodes)
    ]


def mutants(root: Path, place: Place) -> list[str]:
    """The module's source with each fault that is known at the place; what does not compile is left out."""
    module = _Module(root / place.file)
    _, node = module.nodes[place.number]
    found = (module.tree.deep_replace(node, changed) for changed in _changed(node))
    sources = [tree.code for tree in found if isinstance(tree, cst.Module)]
    return [source for source in sources if _is_other_program(source, module.source)]


def functions(source: str) -> list[tuple[str, int, int]]:
    """Qualified name, first and last line of every function, an inner one behind the one around it."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}.{child.name}".lstrip(".") if named else prefix
            if named and not isinstance(child, ast.ClassDef):
                yield name, child.lineno, child.end_lineno or child.lineno
            yield from walk(child, name)

    return list(walk(ast.parse(source), ""))


def function_at(spans: Sequence[tuple[str, int, int]], line: int) -> str:
    return next((name for name, start, stop in reversed(spans) if start <= line <= stop), "")


@lru_cache
class _Module:
    """A parsed file and its nodes with mutants, each with its line."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text()
        wrapper = MetadataWrapper(cst.parse_module(self.source))
        self.tree = wrapper.module
        visitor = _Nodes()
        wrapper.visit(visitor)
        self.nodes = visitor.found


class _Nodes(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom):
            return False
        if isinstance(node, cst.Call) and getattr(node.func, "value", "") in HARMLESS_CALLS:
            return False
        if isinstance(node, cst.Assign) and _names(node) == ["__all__"]:  # for import * alone
            return False
        if not self._is_prose(node) and any(True for _ in _changed(node)):
            self.found.append((self.get_metadata(PositionProvider, node).start.line, node))
        return True

    def _is_prose(self, node: cst.CSTNode) -> bool:
        """Documentation, or words for a reader: no test compares every one of them, and none should."""
        if not isinstance(node, cst.SimpleString):
            return False
        return " " in node.value or isinstance(
            self.get_metadata(ParentNodeProvider, node), cst.Expr
        )


def _names(node: cst.Assign) -> list[str]:
    return [getattr(target.target, "value", "") for target in node.targets]


def _changed(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            yield from operator(node)


def _is_other_program(mutated: str, original: str) -> bool:
    try:
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(original))
    except SyntaxError:
        return False
