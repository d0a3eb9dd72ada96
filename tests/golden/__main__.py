"""`python -m tests.golden --write` rewrites rows.json; `--convert FOLDER` only converts the streams
into a folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.golden.convert import convert_all


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("--write", action="store_true")
    actions.add_argument("--convert", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = arguments.convert or Path(temporary)
        # A cache of its own: a used one remembers which records were duplicates.
        os.environ["MDSMIX_CACHE"] = str(folder / "cache")
        convert_all(folder)
        if arguments.write:
            from tests.golden.rows import Made, write_kept

            write_kept(Made(folder))


if __name__ == "__main__":
    main()
