"""What must hold in a loader's section, stated once: `mdsmix check` reports it, `mdsmix.load` refuses what breaks it.

Rules see the YAML alone; what needs the streams themselves is a check of `mdsmix.mix`. Importing this package registers all of them, in
this order.
"""

from mdsmix.training.rules import keys, places, values, weights  # noqa: F401
