"""Every reason code that an encoder can give is explained in the README beside it, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import mdsmix.encode
import mdsmix.kinds
import mdsmix.shapes
from mdsmix.encode.labels import VERDICTS
from mdsmix.kinds.membership import DUPLICATE, HELD_OUT, NOT_HELD_OUT
from mdsmix.shapes.condition import LEFT_OUT
from mdsmix.shards.counts import NOT_SAMPLED

FOLDER = Path(mdsmix.encode.__file__).parent
KINDS = Path(mdsmix.kinds.__file__).parent
SHAPES = Path(mdsmix.shapes.__file__).parent
GIVEN = r"""(?:NotRendered|RecordRefused|NoRecord)\("(\w+)"[,)]|wrapped\(\w+, "(\w+)"|NOTHING_TRAINED = "(\w+)"|return "([a-z]+_[a-z_]+)"|Rejected\(.*?"(\w+)"|"(\w+)": .*(?:whole|bare)"""


def test_the_readme_explains_every_reason_code() -> None:
    source = "\n".join(
        path.read_text("utf-8")
        for folder in (FOLDER, KINDS, SHAPES)
        for path in folder.glob("*.py")
    )
    found = {code for match in re.findall(GIVEN, source) for code in match if code}
    found |= {
        "no_messages",
        "missing_field",
        DUPLICATE,
        HELD_OUT,
        NOT_HELD_OUT,
        NOT_SAMPLED,
        *LEFT_OUT,
    } | {code for code in VERDICTS if code}
    section = (FOLDER / "README.md").read_text("utf-8").split("## Reason codes")[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    explained = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert explained == found
    assert len(found) > 20
