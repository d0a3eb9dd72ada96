"""A training YAML of LLM-Foundry, read once for all who look at it: `read.py` makes sections of it, `rules/` judge them."""
