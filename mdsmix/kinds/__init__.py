"""Kinds of stream, one file each, in the table `kind_table.KINDS`. `open_recipe` reads a recipe by
the rules of all kinds.
"""

from __future__ import annotations

from mdsmix.kinds.kind import Kind, Piece, stored_pieces
from mdsmix.kinds.kind_table import list_kinds
from mdsmix.kinds.recipes import is_data, open_recipe
from mdsmix.kinds.resolved_stream import ResolvedStream, kind_of

__all__ = [
    "Kind",
    "Piece",
    "ResolvedStream",
    "is_data",
    "kind_of",
    "list_kinds",
    "open_recipe",
    "stored_pieces",
]
