"""Rows of every kind, shape, format and policy are as the golden file has them, whoever made them: tests/golden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.golden.rows import Made, differences, read_kept

ROOT = Path(__file__).parents[2]


def test_every_row_is_as_the_golden_file_has_it(tmp_path: Path) -> None:
    """Made by a process without torch, whose workers are forked in a twentieth of the time."""
    command = [sys.executable, "-m", "tests.golden", "--convert", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = list(differences(Made(tmp_path), read_kept()))
    assert not told, "\n\n".join([f"{len(told)} streams differ:", *told[:20]])
