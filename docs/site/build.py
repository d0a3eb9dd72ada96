"""The pages as a site: `make docs` writes it into .site/html, and ends with an error where a link
inside leads nowhere.

Pages link to each other, to code and to READMEs of packages by the paths of the repository, as they
are read there. So the generator is given a tree in which everything that is linked lies where it
lies here: README.md is the first page, a README the page of its folder, and other files (tests,
recipes) are copied as they are.

    python docs/site/build.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".site"
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)[^)]*\)")
STYLE = "docs/site/wide.css"
FOLDERS = ("docs", "mdsmix", "tests", "benchmarks", "yamls")


def pages() -> list[Path]:
    found = [
        ROOT / "README.md",
        *(page for f in FOLDERS for page in sorted((ROOT / f).rglob("*.md"))),
    ]
    return [page for page in found if not page.is_relative_to(SITE)]


def linked(page: Path) -> set[Path]:
    """Files that the page links to, those of a folder too; a link that leads nowhere ends the
    build.
    """
    found = set[Path]()
    for link in LINK.findall(page.read_text("utf-8")):
        target = (page.parent / link).resolve()
        if not target.exists():
            sys.exit(f"{page.relative_to(ROOT)}: the link {link} leads nowhere")
        if not target.is_dir():
            found.add(target)
        elif not (target / "README.md").exists():
            sys.exit(
                f"{page.relative_to(ROOT)}: {link} is a folder without a README, so the site has "
                "no page of it: link a file"
            )
    return found


def stage(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    all_pages = pages()
    for path in {*all_pages, *(each for page in all_pages for each in linked(page))}:
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (tree / STYLE).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / STYLE, tree / STYLE)


def navigation() -> str:
    """The configuration, whose last section gets the pages that nobody has given a place yet."""
    text = (ROOT / "docs/site/mkdocs.yml").read_text("utf-8")
    paths = [page.relative_to(ROOT).as_posix() for page in pages()]
    left = [path for path in paths if f": {path}\n" not in text]
    titles = {path: (ROOT / path).read_text("utf-8").splitlines()[0].lstrip("# ") for path in left}
    more = "".join(f"      - {json.dumps(titles[path])}: {path}\n" for path in left)
    return text + (f"  - More:\n{more}" if more else "")


def main() -> None:
    stage(SITE / "pages")
    config = SITE / "mkdocs.yml"
    config.write_text(navigation(), "utf-8")
    command = [
        Path(sys.executable).with_name("zensical"),
        "build",
        "--strict",
        "--clean",
        "--config-file",
        config,
    ]
    sys.exit(subprocess.run(command, cwd=SITE, check=False).returncode)


if __name__ == "__main__":
    main()
