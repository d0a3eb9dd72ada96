"""The real llm-foundry has an environment of its own: these tests convert here and run it there.

`MDSMIX_FOUNDRY_PYTHON` names another such interpreter. A missing one fails the tests; a skipped
test of the real thing would look like a passed one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / ".venv-foundry" / "bin" / "python"


@pytest.fixture(scope="session")
def foundry_python() -> Path:
    """The interpreter that has llm-foundry 0.22 and mdsmix; scripts run in it as subprocesses."""
    python = Path(os.environ.get("MDSMIX_FOUNDRY_PYTHON", HERE))
    if not os.access(python, os.X_OK):
        pytest.fail(f"no Foundry environment at {python}: run `make foundry-env`", pytrace=False)
    return python
