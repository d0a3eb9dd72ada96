"""The recipe: one YAML file that describes a whole run, read into frozen dataclasses.

Everything that can be known to be wrong from the recipe alone is refused here, before a byte of data is read.
"""

from mdsmix.recipe.read import load_recipe
from mdsmix.recipe.spec import (
    ImagesSpec,
    Recipe,
    SourceSpec,
    StreamSpec,
    TokenizerSpec,
    WeightSpec,
    share_of,
)

__all__ = [
    "ImagesSpec",
    "Recipe",
    "SourceSpec",
    "StreamSpec",
    "TokenizerSpec",
    "WeightSpec",
    "load_recipe",
    "share_of",
]
