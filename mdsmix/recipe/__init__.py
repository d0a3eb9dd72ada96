"""The recipe: one YAML file that describes a whole run, read into frozen dataclasses.

Mistakes that show in the recipe alone are refused here, before any data is read.
"""

from __future__ import annotations

from mdsmix.recipe.amounts import read_share
from mdsmix.recipe.read import load_recipe
from mdsmix.recipe.spec import MAX_BAD, PhaseSpec, Recipe, TokenizerSpec, WeightSpec
from mdsmix.recipe.stream_spec import ImagesSpec, SourceSpec, StreamSpec

__all__ = [
    "MAX_BAD",
    "ImagesSpec",
    "PhaseSpec",
    "Recipe",
    "SourceSpec",
    "StreamSpec",
    "TokenizerSpec",
    "WeightSpec",
    "load_recipe",
    "read_share",
]
