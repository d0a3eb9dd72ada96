"""YAML -> Recipe.

OmegaConf reads the file, so `${...}` interpolation and `key=value` overrides work as in LLM-Foundry's configs. Relative
paths become absolute here, from the recipe's folder; a section becomes its dataclass by that class's annotations.
"""

from __future__ import annotations

import glob
import io
import os
import re
import typing
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.recipe import secrets
from mdsmix.recipe.rules import contradictions, with_held_out
from mdsmix.recipe.spec import ImagesSpec, Recipe, SourceSpec, StreamSpec, TokenizerSpec, WeightSpec

OVERRIDE = re.compile(r"[\w.\-\[\]]+=")
LONGEST = 1 << 20
"Bytes of a recipe or a training YAML: 1 MiB is some 5,000 streams."


def parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What of a command's words names something, and what is a `key=value` that overrides a recipe."""
    overrides = [word for word in words if OVERRIDE.match(word) and not os.path.exists(word)]
    return [word for word in words if word not in overrides], overrides


def read_text(path: Path) -> str:
    """The text of a YAML, read once, so that it may come through a pipe; RecipeError where it is too long for one."""
    with path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise RecipeError(
            f"{path} is longer than {LONGEST:,} bytes, so it is no recipe: name the YAML file, not the data."
        )
    return content.decode()


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `key=value` overrides; RecipeError says in a sentence what is wrong."""
    tree = _read_yaml(Path(path), overrides)
    try:
        recipe = typed.read(Recipe, _settled(tree, Path(path).resolve()))
    except typed.UnknownKey as unknown:
        streams = tree.get("streams")
        names = streams if isinstance(streams, dict) else ()
        raise RecipeError(f"{path}: {placed(unknown, names)}") from None
    except typed.Misfit as misfit:
        raise RecipeError(f"{path}: {misfit}") from None
    for sentence in contradictions(recipe):
        raise RecipeError(f"{path}: {sentence}")
    return with_held_out(recipe)


def _read_yaml(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if not OVERRIDE.match(override):
            raise RecipeError(
                f"`{override}` is no override: write key=value, for example max_seq_len=4096."
            )
    try:
        loaded = OmegaConf.load(io.StringIO(read_text(path)))
        if not isinstance(loaded, DictConfig):
            raise RecipeError(f"{path} is not a recipe: its top level must be keys and values.")
        changes = OmegaConf.from_dotlist(list(overrides))
        if isinstance(changes.get("tokenizer"), str):
            loaded[
                "tokenizer"
            ] = {}  # another tokenizer: the arguments of the old one are not its own
        for config in (loaded, changes):
            if isinstance(name := config.get("tokenizer"), str):
                config["tokenizer"] = {"name": name}
        # A third of the time that reading takes, which nobody pays who overrides nothing.
        merged = OmegaConf.merge(loaded, changes) if overrides else loaded
        written = OmegaConf.to_container(merged)
        _refuse_secrets(path, secrets.asked_for(written))
        tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe {path}: name an existing YAML file.") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read as a recipe: {error.strerror}.") from None
    except RecursionError:
        raise RecipeError(
            f"{path} is not a readable recipe: it nests too deeply, or refers to itself."
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        reason = secrets.without_secrets(" ".join(str(error).split()).rstrip("."))
        raise RecipeError(f"{path} is not a readable recipe: {reason}.") from None
    _refuse_secrets(path, secrets.held(tree))
    return typing.cast("dict[str, Any]", tree)


def _refuse_secrets(path: Path, found: tuple[str, str] | None) -> None:
    if found:
        raise RecipeError(f"{path}: {secrets.refusal(*found)}")


def _settled(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """The tree with what only this file knows: streams know their names, paths are absolute."""
    if "folder" in tree:
        raise typed.Misfit("folder is not a known key; it is where the recipe lies.")
    folder = path.parent
    settled: dict[str, Any] = _rooted(tree, folder) | {"folder": folder}
    if isinstance(tree.get("tokenizer"), dict):
        settled["tokenizer"] = _tokenizer(tree["tokenizer"], folder)
    if isinstance(name := tree.get("processor"), str):
        settled["processor"] = _tokenizer({"name": name}, folder)["name"]
    if isinstance(tree.get("streams"), dict):
        settled["streams"] = {n: _stream(n, s, folder) for n, s in tree["streams"].items()}
    return settled


def _tokenizer(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A tokenizer found beside the recipe is that folder or file; anything else is a hub name."""
    beside = folder / os.path.expanduser(str(section.get("name", "")))
    if section.get("name") and beside.exists():
        return section | {"name": os.path.normpath(beside)}
    return section


def _stream(name: Any, section: Any, folder: Path) -> Any:
    if not isinstance(section, dict):
        return section
    if "held_out_of" in section:
        raise typed.Misfit(
            f"streams.{name}.held_out_of is not a known key; holdout names the share."
        )
    section = _rooted(section, folder) | {"name": str(name)}
    if section.get("date_string") is not None:
        section["date_string"] = str(section["date_string"])
    if isinstance(images := section.get("images"), dict) and images.get("root"):
        section["images"] = images | {"root": _absolute(images["root"], folder)}
    if isinstance(source := section.get("source"), dict) and source.get("path"):
        paths = source["path"] if isinstance(source["path"], list) else [source["path"]]
        home = Path(glob.escape(str(folder)))  # a [ or * in its own name is no pattern
        section["source"] = source | {"path": [_absolute(p, home) for p in paths]}
    return section


def _rooted(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    return section | {
        k: _absolute(section[k], folder) for k in ("remote", "local") if section.get(k)
    }


def _absolute(url: Any, folder: Path) -> str:
    text = str(url)
    if "://" in text:
        return text if text.endswith("://") else text.rstrip("/")
    return os.path.normpath(folder / os.path.expanduser(text))


SECTIONS: dict[str, Any] = {
    "": Recipe,
    "streams.{}.": StreamSpec,
    "streams.{}.source.": SourceSpec,
    "streams.{}.images.": ImagesSpec,
    "mix.{}.": WeightSpec,
    "tokenizer.": TokenizerSpec,
}
"Where a section stands, a stream's with its name, and what it holds. A key that several have is told of the first."


def placed(unknown: typed.UnknownKey, streams: Collection[str]) -> str:
    """The sentence on a key that its section does not know, with the section that does. `streams`: all names."""
    top, _, rest = unknown.where.partition(".")
    name, _, section = rest.partition(".") if top in ("streams", "mix") else ("", "", "")
    homes = (at for at, of in SECTIONS.items() if unknown.key in _keys(of))
    home = None if unknown.is_synonym or "." in section else next(homes, None)
    if home is None:
        return str(unknown)
    only = next(iter(streams)) if len(streams) == 1 else "NAME"
    at = f"{unknown.where}.{unknown.key}".lstrip(".")
    to = f"{home.format(name or only)}{unknown.key}"
    where = to if home else f"it at the top: {to} is of the whole recipe"
    many = ", under each stream that it is for" if "NAME" in to else ""
    return f"{at} is not a known key; write {where}{many}."


def _keys(section: Any) -> list[str]:
    return [f.name for f in fields(section) if "set by" not in f.metadata]
