"""mdsmix beside the tools that do the same work, measured from outside: `make bench`."""
