"""Runs in Foundry's environment and answers calls until its input ends: all tests share one import of LLM-Foundry, 15 s.

A line in is {"call": "module.function", "arguments": {...}}, a line out {"value": ...} or {"error": traceback}. What the
libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any


def answer(call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module, function = call.split(".")
    try:
        return {"value": getattr(importlib.import_module(module), function)(**arguments)}
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(**json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
