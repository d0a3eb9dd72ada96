"""Plan a run before money is spent on it: compute its steps, tokens, cache and settings by formulas
from indexes and manifests alone.
"""
