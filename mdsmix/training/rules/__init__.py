"""What must hold in a loader's section, stated once: `mdsmix check` reports it, `mdsmix.load` refuses what breaks it.

Rules see the YAML alone; what needs the streams themselves is a check of `mdsmix.mix`. Importing this package registers all of them, in
this order.
"""

from __future__ import annotations

from collections.abc import Collection

from mdsmix.errors import RecipeError
from mdsmix.training.findings import CHECKS, refusal
from mdsmix.training.rules import keys, places, values, weights  # noqa: F401
from mdsmix.training.sections import LoaderSection


def refuse(loader: LoaderSection, but: Collection[str] = ()) -> None:
    """RecipeError on the first rule that the section breaks, those named in `but` left out."""
    for each in CHECKS.values():
        if each.of == "section" and each.severity == "error" and each.id not in but:
            for finding in each.found(loader):
                raise RecipeError(refusal(finding, loader))
