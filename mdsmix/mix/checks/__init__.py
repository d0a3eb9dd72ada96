"""The checks of a mix, a file for each thing that must fit."""

from __future__ import annotations

from mdsmix.foundry_yaml.findings import Check
from mdsmix.mix.checks import (
    batches,
    callbacks,
    columns,
    conversion,
    outdated,
    publication,
    recipe_changed,
    samples,
    tokenizers,
    top_level_keys,
)

CHECKS: tuple[Check, ...] = (
    *columns.CHECKS,
    *samples.CHECKS,
    *tokenizers.CHECKS,
    *conversion.CHECKS,
    *recipe_changed.CHECKS,
    *outdated.CHECKS,
    *batches.CHECKS,
    *callbacks.CHECKS,
    *top_level_keys.CHECKS,
    *publication.CHECKS,
)
"All checks of a mix; findings are printed in this order."
