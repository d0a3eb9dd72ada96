"""The checks, a file for each thing that must fit. Importing this package registers all of them, in this order."""

from mdsmix.mix.checks import (  # noqa: I001 - the order in which findings are printed
    columns,
    tokens,
    tokenizers,
    policies,
    weights,
    batches,
    storage,
    publication,
    keys,
    config,
)

__all__ = [
    "batches",
    "columns",
    "config",
    "keys",
    "policies",
    "publication",
    "storage",
    "tokenizers",
    "tokens",
    "weights",
]
