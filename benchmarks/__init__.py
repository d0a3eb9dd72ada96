"""Benchmarks that compare mdsmix with tools that do the same work: `make bench`."""
