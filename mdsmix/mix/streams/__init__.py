"""The streams of a mix: opened from a recipe, a training YAML or folders, with their facts."""
