"""`mdsmix doctor`: will this machine and its stores let the recipe's run do what it does?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from mdsmix.cli.options import AS_JSON, OVERRIDES, RECIPE, Texts, echo, echo_json
from mdsmix.errors import Unreachable


def doctor(recipe: Path = RECIPE, overrides: Texts = OVERRIDES, as_json: bool = AS_JSON) -> None:
    """Look at all that RECIPE's run needs: versions, memory, tokenizer, sources, endpoint,
    credentials, rights, clock, disk.

    Each right is tried with a small object at the target, which is deleted again. Exit code 4:
    something would end the run.
    """
    from mdsmix.doctor import diagnose
    from mdsmix.kinds import open_recipe

    found = []
    for diagnosis in diagnose(open_recipe(recipe, overrides or ())):
        found.append(diagnosis)
        if not as_json:
            echo(str(diagnosis))
    if as_json:
        echo_json({"diagnoses": [asdict(diagnosis) for diagnosis in found]})
    if any(diagnosis.state == "problem" for diagnosis in found):
        raise typer.Exit(Unreachable.exit_code)
