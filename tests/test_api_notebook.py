"""The example notebook, in a real kernel: every cell runs, shows its result, and prints nothing on
stderr. Interrupt stops a conversion, and the kernel goes on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/notebook.ipynb"
INTERRUPT = """
import multiprocessing
import os
import signal

def interrupt(progress):
    os.kill(os.getpid(), signal.SIGINT)

try:
    mdsmix.convert(recipe, ["local=other"], workers=2, progress=interrupt)
except KeyboardInterrupt:
    print("interrupted", multiprocessing.active_children())
"""
CONTINUE = 'print(len(mdsmix.convert(recipe, ["local=other"], progress=False).streams))'


def test_the_notebook_has_no_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, 4).cells:  # type: ignore[no-untyped-call]
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_notebook_runs_and_an_interrupt_leaves_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook: Any = nbformat.read(NOTEBOOK, 4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for source in (INTERRUPT, CONTINUE):
        notebook.cells.append(nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    for cell in cells[1:]:
        assert [output for output in cell.outputs if output.get("name") == "stderr"] == []
        assert "mdsmix-result" in cell.outputs[-1]["data"]["text/html"]
    # The progress of a conversion is one element, which was changed in place.
    kinds = [output.output_type for output in cells[1].outputs]
    assert kinds == ["display_data", "execute_result"]
    assert "tokens read in" in cells[1].outputs[0]["data"]["text/plain"]
    interrupted, continued = notebook.cells[-2:]
    assert interrupted.outputs[0]["text"] == "interrupted []\n"
    assert continued.outputs[0]["text"] == "3\n"
    assert (tmp_path / "example/mixed.yaml").exists()
