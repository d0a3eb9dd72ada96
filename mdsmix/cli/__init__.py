"""The command line: one file per command, which parses, calls and prints."""

from __future__ import annotations

from gc import set_threshold

# Imports make no garbage: with Python's threshold of 700, searching them took 0.1 s, and with
# 50,000 still 15 ms. It is set here, before typer is imported: in `run` it was 7 ms too late.
set_threshold(200_000)
