"""`mdsmix doctor`: diagnoses the environment of a recipe's run."""
