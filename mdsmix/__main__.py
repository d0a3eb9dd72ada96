"""`python -m mdsmix` is the command `mdsmix`."""

from __future__ import annotations

from mdsmix.cli.main import run

if __name__ == "__main__":
    run()
