"""The checks, a file for each thing that must fit. Importing this package registers all of them, in
this order.
"""

from __future__ import annotations

# Registered in the order in which findings are printed.
# isort: off
from mdsmix.mix.checks import (  # noqa: F401
    columns,
    samples,
    tokenizers,
    conversion,
    recipe_changed,
    outdated,
    batches,
    publication,
)
