"""The checks, a file for each thing that must fit. Importing this package registers all of them, in this order."""

from mdsmix.mix.checks import (  # noqa: F401, I001 - registered in the order in which findings are printed
    columns,
    samples,
    tokenizers,
    conversion,
    recipe_changed,
    outdated,
    batches,
    publication,
)
