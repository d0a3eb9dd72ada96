"""Collects the reason codes of bad records: the codes that each format, shape and kind declares,
and the codes that several of them share (`record.BAD`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mdsmix.kinds.kind_table import list_kinds
from mdsmix.record import BAD
from mdsmix.shapes import SHAPES
from mdsmix.shapes.functions import FUNCTION_REASONS
from mdsmix.sources.formats import FORMATS


def list_bad_reasons() -> dict[str, str]:
    """Return reason code -> explanation for all bad records. The shared codes come first, then
    the codes of formats, of functions, of shapes and of kinds.
    """
    declared: list[Mapping[str, str]] = [BAD]
    declared += [get_format().reasons for get_format in FORMATS.values()]
    declared += [FUNCTION_REASONS]
    declared += [shape.reasons for shape in SHAPES.values()]
    declared += [kind.reasons for kind in list_kinds()]
    reasons: dict[str, str] = {}
    for table in declared:
        reasons |= table
    return reasons
