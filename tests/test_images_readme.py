"""Every reason code of an image is explained in the README beside it, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import mdsmix.images

FOLDER = Path(mdsmix.images.__file__).parent


def test_the_readme_explains_every_reason_code() -> None:
    source = "\n".join(path.read_text("utf-8") for path in FOLDER.glob("*.py"))
    given = r"""(?:Bad\(|BadImage\(|reason=|Rejected\(position, )"(\w+)"|"(image_\w+)" if|else "(image_\w+)\""""
    found = {code for match in re.findall(given, source) for code in match if code}
    section = (FOLDER / "README.md").read_text("utf-8").split("## Reason codes")[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} == found
    assert len(found) > 12
