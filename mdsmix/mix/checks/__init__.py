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
    config,
)
from mdsmix.mix.findings import check_rule
from mdsmix.training.rules import RULES

for _rule in RULES.values():
    check_rule(_rule)

__all__ = [
    "batches",
    "columns",
    "config",
    "policies",
    "publication",
    "storage",
    "tokenizers",
    "tokens",
    "weights",
]
