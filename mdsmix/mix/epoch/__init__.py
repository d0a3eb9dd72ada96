"""What an epoch draws and contains: samples by weight, tokens, shares, the cache it needs."""
