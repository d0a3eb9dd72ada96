"""Credentials have no place in a recipe: what it says is written into manifests, training YAMLs and messages.

`${oc.env:BUCKET}` is as good a place for a bucket's name as any. A variable that by its name holds a credential is
refused where a recipe asks for it, and where its value has come into the recipe by another way. boto3 and transformers
read theirs from the environment themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(ACCESS|API|PRIVATE|ACCOUNT|ENCRYPTION)_?KEY"
    r"|(^|_)(TOKEN|PAT|AUTH)(_|$)",
    re.IGNORECASE,
)
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?(\w+)")
_LONG = 12
"A value of fewer characters may stand in a recipe for something else."


def asked_for(tree: Any) -> tuple[str, str] | None:
    """The first key whose text asks for a variable that holds a credential, and the variable's name."""
    for key, text in texts(tree):
        for name in _ENVIRONMENT.findall(text):
            if SECRET_NAME.search(name):
                return key, name
    return None


def held(tree: Any) -> tuple[str, str] | None:
    """The first key that holds the value of such a variable, and the variable's name."""
    values = _values()
    for key, text in texts(tree):
        for name, value in values.items():
            if value in text:
                return key, name
    return None


def without_secrets(text: str) -> str:
    """The text of another library's error with the values of such variables struck out."""
    for name, value in _values().items():
        text = text.replace(value, f"<{name}>")
    return text


def refusal(key: str, name: str) -> str:
    return (
        f"{key} holds the environment's {name}, a credential, which would be written into the manifest and the training "
        "YAML for everyone to read; take it out: S3 and Hugging Face clients read it from the environment themselves."
    )


def _values() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if SECRET_NAME.search(n) and len(v) >= _LONG}


def texts(node: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a tree, keys too, with the key under which it stands."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield at or "the top level", str(key)
            yield from texts(value, f"{at}.{key}" if at else str(key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from texts(value, f"{at}[{number}]")
    elif isinstance(node, str):
        yield at, node
