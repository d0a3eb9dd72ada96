"""Rows of every kind, shape, format and policy are as the golden file has them, whoever made them:
tests/golden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.golden.rows import Made, differences, read_kept


def test_every_row_is_as_the_golden_file_has_it(golden_streams: Callable[[], Path]) -> None:
    told = list(differences(Made(golden_streams()), read_kept()))
    assert not told, "\n\n".join([f"{len(told)} streams differ:", *told[:20]])
