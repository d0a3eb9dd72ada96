"""Published streams -> a checked, weighted mix and the LLM-Foundry YAML that trains on it."""
