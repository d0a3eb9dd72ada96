"""`mdsmix doctor`: do this machine and its stores have everything that a recipe's run needs?"""

from __future__ import annotations

import typer

from mdsmix.cli.json_document import echo_json
from mdsmix.cli.options import (
    AsJson,
    Overrides,
    RecipeFile,
    echo,
)
from mdsmix.errors import Unreachable


def doctor(recipe: RecipeFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check what RECIPE's run needs: versions, memory, tokenizer, sources, endpoint, credentials,
    permissions, clock, disk.

    Each permission is tested with a small object at the target, which is deleted again. Exit code
    4: a problem would end the run.
    """
    from mdsmix.doctor.diagnoses import diagnose
    from mdsmix.kinds import open_recipe

    diagnoses = []
    for diagnosis in diagnose(open_recipe(recipe, overrides or ())):
        diagnoses.append(diagnosis)
        if not as_json:
            echo(str(diagnosis))
    if as_json:
        echo_json({"diagnoses": [diagnosis.to_json() for diagnosis in diagnoses]})
    if any(diagnosis.state == "problem" for diagnosis in diagnoses):
        raise typer.Exit(Unreachable.exit_code)
