"""The rules of a loader's section (of a training YAML), as a table."""

from __future__ import annotations

from collections.abc import Collection

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml import section_keys, section_values
from mdsmix.foundry_yaml.findings import Check, make_refusal_message
from mdsmix.foundry_yaml.training_yaml import LoaderSection

RULES: tuple[Check, ...] = (*section_keys.CHECKS, *section_values.CHECKS)
"All rules. Broken rules are printed in this order."


def refuse_broken_rules(section: LoaderSection, ignored: Collection[str]) -> None:
    """Raise RecipeError on the first error that a rule finds in the section.

    Args:
        section: the loader's section.
        ignored: ids of rules that are not checked.
    """
    for rule in RULES:
        if rule.severity == "error" and rule.id not in ignored:
            for finding in rule.run_rule(section):
                raise RecipeError(make_refusal_message(finding, section))
