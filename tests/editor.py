"""What an editor says of a recipe by the JSON Schema that `mdsmix schema` prints."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from mdsmix.kinds.recipe_schema import describe_recipe


@cache
def open_schema() -> Draft202012Validator:
    schema = describe_recipe()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def list_marks(recipe: Any) -> list[str]:
    """Return the mistakes that an editor marks in a recipe, each with its place.

    Args:
        recipe: the text of a file, or its keys and values. Interpolations stay as they are written.
    """
    tree = OmegaConf.to_container(OmegaConf.create(recipe), resolve=False)
    errors = open_schema().iter_errors(_name_by_text(tree))
    return [f"{error.json_path}: {error.message}" for error in errors]


def _name_by_text(tree: Any) -> Any:
    """Return the tree with all keys as texts, as JSON has them."""
    if isinstance(tree, dict):
        return {str(key): _name_by_text(value) for key, value in tree.items()}
    return [_name_by_text(value) for value in tree] if isinstance(tree, list) else tree
