"""The LLM-Foundry YAML of a mix: its sections, set into a config or written as a file."""
