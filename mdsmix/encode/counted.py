"""A template's syntax tree with a filter around what can grow: what the sandbox compiles in place of the template.

Looking at every text that a template makes would slow all of them. A text grows without end only where it is kept and
used again, or made in a loop; so loops, `~`, and sums and lists that are kept are looked at, and what is only printed is
left to the sandbox's `concat`. It costs a rendering 5 to 20 %.
"""

# ruff: noqa: N802, N815  (jinja2 finds a visitor by the name of its node)

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

HELD, SHARED, JOINED, STEPPED = "_held", "_shared", "_joined", "_stepped"
"The filters: a value that is kept, one that is put into a namespace, the parts of `~`, the items of a loop."
_PLAIN_PARTS = 32


class Counted(NodeTransformer):
    """The template with a filter around what can grow."""

    def __init__(self) -> None:
        self.is_kept = False
        "Inside of a macro or a block that is set: what is printed there is not seen by `concat` before its end."

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, STEPPED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), JOINED)

    def visit_Add(self, node: nodes.Add) -> Any:
        return _filtered(self._sum(node)[0], HELD)

    def visit_List(self, node: nodes.List) -> Any:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> Any:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> Any:
        return node if node.ctx == "store" else self._literal(node)

    def _literal(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filtered(node, HELD) if any(node.find_all((nodes.Name, nodes.Call))) else node

    def visit_Assign(self, node: nodes.Assign) -> Any:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):
            node.node = _filtered(node.node, SHARED)
        elif isinstance(node.node, (nodes.Call, nodes.Filter)):
            node.node = _filtered(node.node, HELD)
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        node.nodes = [self._printed(child) for child in node.nodes]
        return node

    def _printed(self, node: Any) -> Any:
        if isinstance(node, nodes.Add) and not self.is_kept:
            return self._sum(node)[0]
        shown: Any = self.visit(node)
        grown = isinstance(node, (nodes.Call, nodes.Filter, nodes.CondExpr))
        return _filtered(shown, HELD) if self.is_kept and grown else shown

    def _sum(self, node: Any) -> tuple[Any, int]:
        """A sum and its parts, so many of which are not much longer than one of them."""
        if not isinstance(node, nodes.Add):
            return self.visit(node), 1
        (node.left, lefts), (node.right, rights) = self._sum(node.left), self._sum(node.right)
        few = lefts + rights <= _PLAIN_PARTS
        return (node, lefts + rights) if few else (_filtered(node, HELD), 1)

    def _visit_kept(self, node: nodes.Node) -> Any:
        before, self.is_kept = self.is_kept, True
        self.generic_visit(node)
        self.is_kept = before
        return node

    visit_Macro = visit_AssignBlock = visit_CallBlock = visit_FilterBlock = _visit_kept


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
