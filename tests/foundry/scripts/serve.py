"""Runs in Foundry's environment and answers calls until there is nobody to ask: all tests share it.

A call is {"call": "module.function", "arguments": {...}}, an answer {"value": ...} or {"error":
traceback}, as texts of JSON.
"""

from __future__ import annotations

import importlib
import json
import traceback
from contextlib import suppress
from multiprocessing.connection import Client
from typing import Any


def answer(call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module, function = call.split(".")
    try:
        return {"value": getattr(importlib.import_module(module), function)(**arguments)}
    except Exception:
        return {"error": traceback.format_exc()}


def main(port: int) -> None:
    with Client(("127.0.0.1", port)) as tests, suppress(EOFError):
        while True:
            tests.send(json.dumps(answer(**json.loads(tests.recv()))))
