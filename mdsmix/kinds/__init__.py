"""Kinds of stream: one file each, registered here. `open_recipe` reads a recipe by the rules of all
kinds.

Another kind is one more file and one more class in `encodings.KINDS`; no other room asks which kind
a stream is of.
"""

from __future__ import annotations

from mdsmix.kinds.encodings import (
    KINDS,
    is_data,
    kind_of,
    kind_of_stream,
    open_recipe,
    shape_of,
)
from mdsmix.kinds.kind import Kind, Piece, stored_pieces

__all__ = [
    "KINDS",
    "Kind",
    "Piece",
    "is_data",
    "kind_of",
    "kind_of_stream",
    "open_recipe",
    "shape_of",
    "stored_pieces",
]
