"""A late reading of transformers' models against a plain import: both know the same names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mdsmix.tokenizer.lazy_transformers import _change_import_utils

REPORT = """
import json, os, sys
from collections import Counter

os.environ.update(USE_TORCH="0", USE_TF="0", USE_FLAX="0", TRANSFORMERS_VERBOSITY="error")
sys.modules["torch"] = None
if sys.argv[1] == "late":
    from mdsmix.tokenizer.lazy_transformers import read_models_late
    read_models_late()
import transformers
from transformers import models

def state(package):
    return {
        "names": package._class_to_module,
        "modules": sorted(package._modules),
        "missing": {k: sorted(map(str, v)) for k, v in package._object_missing_backend.items()},
        "all": sorted(package.__all__),
    }

first = [state(transformers), state(models)]
# A name that no version has makes a package read all modules.
lacks = [hasattr(package, "NoSuchName") for package in (transformers, models)]
print(json.dumps([first, [state(transformers), state(models)], lacks]))
"""


def _report(how: str) -> Any:
    """Return what a new process knows of transformers: at first and after it lacked a name."""
    done = subprocess.run([sys.executable, "-c", REPORT, how], capture_output=True, check=True)
    return json.loads(done.stdout)


def test_late_import_knows_what_a_plain_import_knows() -> None:
    """This takes 3 s, since it imports transformers twice: the plain import is the oracle."""
    plain, _, _ = _report("plain")
    first, complete, lacks = _report("late")

    assert lacks == [False, False]
    assert complete == plain
    of_tokenizers = {"AutoTokenizer", "LlamaTokenizerFast"}
    for part, whole, needed in zip(first, plain, (of_tokenizers, {"AutoTokenizer"}), strict=True):
        assert 50 < len(part["names"]) < len(whole["names"]) / 2  # the code of models is unread
        assert needed <= part["names"].keys()
        assert part["names"].items() <= whole["names"].items()
        assert {*part["modules"]} <= {*whole["modules"]}
        assert part["missing"].items() <= whole["missing"].items()


def test_other_version_is_imported_as_it_is(tmp_path: Path) -> None:
    """A version that uses the structure of its models otherwise gets the whole structure."""
    (tmp_path / "models").mkdir()
    (tmp_path / "utils").mkdir()
    for file in ("__init__.py", "models/__init__.py"):
        (tmp_path / file).write_text("structure = define_import_structure(__file__)\n")

    def define_import_structure() -> None: ...

    import_utils = SimpleNamespace(
        __file__=str(tmp_path / "utils" / "import_utils.py"),
        define_import_structure=define_import_structure,
        _LazyModule=object,
    )
    _change_import_utils(import_utils)

    assert import_utils.define_import_structure is define_import_structure
    assert import_utils._LazyModule is object
