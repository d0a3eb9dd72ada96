"""`python -m tests.golden --write` rewrites rows.json; `--convert FOLDER` makes the streams there
and reads none.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.golden.convert import convert_all


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--convert", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = given.convert or Path(temporary)
        # A cache of its own: one that is kept remembers which records were duplicates.
        os.environ["MDSMIX_CACHE"] = str(folder / "cache")
        convert_all(folder)
        if given.write:
            from tests.golden.rows import Made, write_kept

            write_kept(Made(folder))


if __name__ == "__main__":
    main()
