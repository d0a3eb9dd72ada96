"""A training YAML of LLM-Foundry: `training_yaml.py` reads its sections, the rules of
`section_*.py` judge them.
"""
