"""YAML -> Recipe. OmegaConf reads the file, so `${...}` interpolation and `key=value` overrides work as they do in
LLM-Foundry's configs; a section becomes its dataclass by the dataclass's own annotations, so a new key is one line there.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from mdsmix.errors import RecipeError
from mdsmix.recipe.rules import contradictions
from mdsmix.recipe.spec import Recipe, SourceSpec, StreamSpec, TokenizerSpec, WeightSpec

T = TypeVar("T")
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `key=value` overrides; RecipeError says in one sentence what is wrong."""
    tree = _read_yaml(Path(path), overrides)
    recipe = _recipe_from(tree, Path(path).resolve())
    for sentence in contradictions(recipe):
        raise RecipeError(f"{path}: {sentence}")
    return recipe


def _read_yaml(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if not re.match(r"[\w.\-\[\]]+=", override):
            raise RecipeError(
                f"`{override}` is no override: write key=value, for example max_seq_len=4096."
            )
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise RecipeError(
                f"{path} is not a recipe: its top level must be keys such as tokenizer and streams."
            )
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe {path}: name an existing YAML file.") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read as a recipe: {error.strerror}.") from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, ValueError) as error:
        raise RecipeError(f"{path} is not a readable recipe: {_one_line(error)}.") from None
    return typing.cast("dict[str, Any]", tree)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _recipe_from(tree: dict[str, Any], path: Path) -> Recipe:
    where, folder = path.name, path.parent
    streams = _mapping(tree.get("streams"), f"{where}: streams")
    mix = _mapping(tree.get("mix") or {}, f"{where}: mix")
    loader = _mapping(tree.get("train_loader") or {}, f"{where}: train_loader")
    known = {**tree, "streams": {}, "mix": {}, "train_loader": {}, "tokenizer": None, "path": None}
    if "path" in tree:
        raise RecipeError(f"{where}: path is not a key here; a source's path stands in its stream.")
    _refuse_unknown(Recipe, known, where)
    if "tokenizer" not in tree:
        raise RecipeError(f"{where}: tokenizer is missing; without it no text becomes tokens.")
    section = tree["tokenizer"]
    section = {"name": section} if isinstance(section, str) else section
    rooted = {k: _rooted(tree[k], folder) for k in ("remote", "local") if tree.get(k)}
    return _section(
        Recipe,
        tree
        | rooted
        | {
            "path": path,
            "tokenizer": _tokenizer(section, folder, f"{where}: tokenizer"),
            "streams": {n: _stream(n, s, folder, where) for n, s in streams.items()},
            "mix": {n: _section(WeightSpec, w, f"{where}: mix.{n}") for n, w in mix.items()},
            "train_loader": loader,
        },
        where,
    )


def _tokenizer(section: Any, folder: Path, where: str) -> TokenizerSpec:
    spec = _section(TokenizerSpec, section, where)
    beside = folder / spec.name
    return dataclasses.replace(spec, name=str(beside.resolve())) if beside.exists() else spec


def _stream(name: Any, section: Any, folder: Path, where: str) -> StreamSpec:
    where = f"{where}: streams.{name}"
    if not isinstance(name, str) or not STREAM_NAME.fullmatch(name):
        raise RecipeError(
            f"{where}: a stream's name becomes a folder: use letters, digits, '.', '_' and '-'."
        )
    section = dict(_mapping(section, where))
    if section.get("source") is not None:
        source = dict(_mapping(section["source"], f"{where}.source"))
        if "path" in source:
            paths = source["path"] if isinstance(source["path"], list) else [source["path"]]
            source["path"] = [_rooted(p, folder) for p in paths]
        section["source"] = _section(SourceSpec, source, f"{where}.source")
    if section.get("date_string") is not None:
        section["date_string"] = str(section["date_string"])
    rooted = {k: _rooted(section[k], folder) for k in ("remote", "local") if section.get(k)}
    return _section(StreamSpec, section | rooted | {"name": name}, where)


def _rooted(url: Any, folder: Path) -> str:
    """A relative path made absolute from the recipe's folder; a URL stays."""
    text = str(url)
    return (
        text.rstrip("/") if "://" in text else os.path.normpath(folder / os.path.expanduser(text))
    )


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecipeError(f"{where} must hold keys and values, not {value!r}.")
    return value


def _section(cls: type[T], values: Any, where: str) -> T:
    """The dataclass from a mapping: unknown keys, missing keys and wrong types are refused by name."""
    values = _mapping(values, where)
    _refuse_unknown(cls, values, where)
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = (
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        )
        if required and values.get(item.name) is None:
            raise RecipeError(f"{where}: {item.name} is missing.")
        if item.name in values and not _fits(values[item.name], hints[item.name]):
            raise RecipeError(
                f"{where}: {item.name} is {values[item.name]!r}; it must be {_spelled(hints[item.name])}."
            )
    return cls(**values)


def _refuse_unknown(cls: type, values: Mapping[str, Any], where: str) -> None:
    known = [f.name for f in dataclasses.fields(cls) if f.name != "path" or cls is SourceSpec]
    for key in values:
        if key not in [f.name for f in dataclasses.fields(cls)]:
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}."
            raise RecipeError(f"{where}: {key} is not a key here; {hint}")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args and not isinstance(value, bool)
    if hint in (int, float):
        return isinstance(value, hint) and not isinstance(value, bool)
    kind = origin or hint
    return hint is Any or isinstance(value, kind)


def _spelled(hint: Any) -> str:
    """A type as a user would say it."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, args))
    if args and typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_spelled(a) for a in args)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(
        hint, "null" if hint is type(None) else "keys and values" if args else "a list"
    )
