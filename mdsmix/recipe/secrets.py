"""Credentials have no place in a recipe: what it says is written into manifests, training YAMLs and messages.

`${oc.env:BUCKET}` is as good a place for a bucket's name as any. A variable that by its name holds a credential is
refused where a recipe asks for it, and where its value has come into the recipe by another way. boto3 and transformers
read theirs from the environment themselves.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from mdsmix.errors import RecipeError

SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(ACCESS|API|PRIVATE|ACCOUNT|ENCRYPTION)_?KEY"
    r"|(^|_)(TOKEN|PAT|AUTH)(_|$)",
    re.IGNORECASE,
)
_ASKED = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?(\w+)")
_LONG = 12
"A value of fewer characters may stand in a recipe for something else."


def refuse_asked(text: str) -> None:
    """RecipeError where a text asks for a variable that holds a credential."""
    for name in _ASKED.findall(text):
        if SECRET_NAME.search(name):
            raise _refusal(name)


def refuse_held(tree: Any) -> None:
    """RecipeError where a tree holds the value of such a variable."""
    text = json.dumps(tree, default=str)
    for name, value in _values().items():
        if json.dumps(value)[1:-1] in text:
            raise _refusal(name)


def without_secrets(text: str) -> str:
    """The text of another library's error with the values of such variables struck out."""
    for name, value in _values().items():
        text = text.replace(value, f"<{name}>")
    return text


def _refusal(name: str) -> RecipeError:
    return RecipeError(
        f"It holds the environment's {name}, a credential, which would be written into the manifest and the training "
        "YAML for everyone to read; take it out: S3 and Hugging Face clients read it from the environment themselves."
    )


def _values() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if SECRET_NAME.search(n) and len(v) >= _LONG}
