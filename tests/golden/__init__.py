"""The rows of streams of every kind, as hashes that a file keeps: README.md beside this file."""
