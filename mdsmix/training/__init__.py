"""A training YAML of LLM-Foundry, read once for all who look at it: `training_yaml.py` reads its sections, the rules of `section_*.py` judge them."""
