"""What an epoch draws: samples by weight, tokens, shares; and the cache that a node needs."""
