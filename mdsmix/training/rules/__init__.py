"""What must hold in a loader's section, stated once: `mdsmix check` reports it, `mdsmix.load` refuses what breaks it.

A rule is a plain function: a LoaderSection in, hits out. Its id, its severity and the reason why it matters stand at its
registration. Rules see the YAML alone; what needs the streams themselves is a check of `mdsmix.mix`.
"""

from mdsmix.training.rules import keys, places, values, weights
from mdsmix.training.rules.rule import RULES, Hit, Rule, Severity

__all__ = ["RULES", "Hit", "Rule", "Severity", "keys", "places", "values", "weights"]
