"""The data, tokenizer, recipe and training YAML of `mdsmix example`, for a first run offline."""
