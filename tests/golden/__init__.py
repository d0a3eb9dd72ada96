"""The rows of streams of every kind, compared with hashes in a file (README.md)."""
