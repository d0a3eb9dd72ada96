"""Reads a recipe's YAML into a Recipe.

OmegaConf reads the file, so `${...}` interpolation and `key=value` overrides work as in
LLM-Foundry's configs. Relative paths become absolute here, from the recipe's folder; a section
becomes its dataclass by that class's annotations.

Credentials have no place in a recipe: its values are written into manifests, training YAMLs and
messages. A recipe is refused that asks for an environment variable whose name tells of a credential
(`SECRET_NAME`), or that holds the value of one. boto3 and transformers read their credentials from
the environment themselves.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mdsmix import schema
from mdsmix.errors import RecipeError
from mdsmix.messages import flatten_error
from mdsmix.recipe.rules import contradictions, with_held_out
from mdsmix.recipe.spec import Recipe
from mdsmix.recipe.stream_spec import ImagesSpec, StreamSpec
from mdsmix.storage import begins_like_url, is_url

Section = TypeVar("Section", Recipe, StreamSpec, ImagesSpec)
OVERRIDE = re.compile(r"[\w.\-\[\]]+=")
BY_STREAM = ("streams", "mix")
"Sections of a recipe whose keys are names of streams."
LONGEST = 1 << 20
"Bytes of a recipe or a training YAML: 1 MiB is some 5,000 streams."
SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(ACCESS|API|PRIVATE|ACCOUNT|ENCRYPTION)_?KEY"
    r"|(^|_)(TOKEN|PAT|AUTH)(_|$)",
    re.IGNORECASE,
)
_ASKED = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?(\w+)")
_LONG = 12
"The least characters of a credential's value: a shorter value may stand in a recipe by chance."


def parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's words in two lists: names, and `key=value` overrides of a recipe. A word that is
    an existing path is a name.
    """
    overrides = [word for word in words if OVERRIDE.match(word) and not os.path.exists(word)]
    return [word for word in words if word not in overrides], overrides


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a YAML file, read once, so that a pipe works too. RecipeError: it cannot be read,
    is no UTF-8, or exceeds 1 MiB.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        if begins_like_url(path):
            raise RecipeError(
                f"{path} is not a file of this machine: a YAML is read from a local path alone; copy it here and name the copy."
            ) from None
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RecipeError(f"{path} cannot be read as YAML: {why}; name a YAML file.") from None
    if len(content) > LONGEST:
        raise RecipeError(
            f"{path} is longer than {LONGEST:,} bytes, so it is no recipe: name the YAML file, not the data."
        )
    return text


def load_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), folder: Path | None = None
) -> Recipe:
    """Reads a recipe and applies `key=value` overrides; RecipeError says in a sentence what is
    wrong. `folder`: the base of relative paths, if that is not the recipe's own folder.
    """
    try:
        tree = _read_yaml(Path(path), overrides)
        if "model" in tree and "streams" not in tree:
            raise RecipeError(
                f"{path} is a training YAML, which says what is loaded: name the recipe, which says how its streams are made."
            )
        recipe = _located(schema.parse_mapping(Recipe, tree), folder or Path(path).resolve().parent)
    except schema.Misfit as misfit:
        raise RecipeError(f"{path}: {misfit}") from None
    for sentence in contradictions(recipe):
        raise RecipeError(f"{path}: {sentence}")
    return with_held_out(recipe)


def _read_yaml(path: Path, overrides: Sequence[str]) -> Any:
    from omegaconf import OmegaConf

    for override in overrides:
        if not OVERRIDE.match(override):
            raise RecipeError(
                f"`{override}` is no override: write key=value, for example max_seq_len=4096."
            )
    text = read_text(path)
    with readable(path, "recipe"):
        _refuse_secrets("\n".join([text, *overrides]))
        loaded = config_of(text)
        names = loaded.get("streams")
        dotted = [str(name) for name in names or () if "." in str(name)]
        changes = OmegaConf.from_dotlist([_with_whole_name(each, dotted) for each in overrides])
        if isinstance(changes.get("tokenizer"), str):
            loaded["tokenizer"] = {}  # the file's arguments are those of the other tokenizer
        for config in (loaded, changes):
            if isinstance(name := config.get("tokenizer"), str):
                config["tokenizer"] = {"name": name}
        # A merge is a third of the reading time, so it is left out where nothing is overridden.
        merged = OmegaConf.merge(loaded, changes) if overrides else loaded
        tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        _refuse_secrets(json.dumps(tree, default=str))
    return tree


def _with_whole_name(override: str, dotted: Sequence[str]) -> str:
    """Return the override with the name of a stream in brackets, if that has a dot: OmegaConf would
    take `streams.a.b.kind` for a stream `a`. Of several names that fit the longest counts.

    Args:
        dotted: the names of the recipe's streams that have a dot.
    """
    for name in sorted(dotted, key=len, reverse=True):
        for section in BY_STREAM:
            begin = f"{section}.{name}"
            if override.startswith((f"{begin}.", f"{begin}[", f"{begin}=")):
                return f"{section}[{name}]{override[len(begin) :]}"
    return override


@contextmanager
def readable(origin: object, what: str) -> Iterator[None]:
    """Turns errors of reading YAML in the block into a RecipeError with the origin and the
    library's reason. A YAML that nests too deeply, or refers to itself, raises RecursionError.
    `what`: the noun in the message, such as `recipe`.
    """
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    refused = (RecipeError, ValueError, TypeError, RecursionError)
    try:
        yield
    except (yaml.YAMLError, OmegaConfBaseException, *refused) as error:
        reason = _without_secrets(flatten_error(error))
        raise RecipeError(f"{origin} is not a readable {what}: {reason}.") from None


def config_of(tree: Any) -> Any:
    """OmegaConf's config of a text or a tree; RecipeError where the top level is no mapping."""
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.create(tree)
    if not isinstance(config, DictConfig):
        raise RecipeError("its top level must be keys and values.")
    return config


def _located(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the names of its streams set and its paths made absolute."""
    return replace(
        _rooted(recipe, folder, "remote", "local"),
        folder=folder,
        tokenizer=replace(recipe.tokenizer, name=_beside(recipe.tokenizer.name, folder)),
        processor=recipe.processor and _beside(recipe.processor, folder),
        streams={str(n): _stream(str(n), s, folder) for n, s in recipe.streams.items()},
    )


def _beside(name: str, folder: Path) -> str:
    """The path of a tokenizer or processor that lies in the recipe's folder; any other name stays,
    as a hub name.
    """
    path = folder / os.path.expanduser(name)
    return os.path.normpath(path) if name and path.exists() else name


def _stream(name: str, stream: StreamSpec, folder: Path) -> StreamSpec:
    source, images = stream.source, stream.images
    if source:
        home = Path(glob.escape(str(folder)))  # a [ or * in the folder's own name is no pattern
        source = replace(source, path=[_absolute(path, home) for path in source.path])
    images = images and _rooted(images, folder, "root")
    stream = _rooted(stream, folder, "remote", "local")
    return replace(stream, name=name, source=source, images=images)


def _rooted(section: Section, folder: Path, *keys: str) -> Section:
    """The section in which the paths under these keys are absolute."""
    given = {key: url for key in keys if (url := getattr(section, key))}
    changed: dict[str, Any] = {key: _absolute(url, folder) for key, url in given.items()}
    return replace(section, **changed)


def _absolute(url: str, folder: Path) -> str:
    if is_url(url):
        return url if url.endswith("://") else url.rstrip("/")
    return os.path.normpath(folder / os.path.expanduser(url))


def _refuse_secrets(text: str) -> None:
    """RecipeError where a text asks for an environment variable with a credential, or holds the
    variable's value.
    """
    asked = [name for name in _ASKED.findall(text) if SECRET_NAME.search(name)]
    held = [name for name, value in _values().items() if json.dumps(value)[1:-1] in text]
    for name in asked + held:
        raise RecipeError(
            f"It holds the environment's {name}, a credential, which would be written into the manifest and the training "
            "YAML for everyone to read; take it out: S3 and Hugging Face clients read it from the environment themselves."
        )


def _without_secrets(text: str) -> str:
    """The text of another library's error, in which `<NAME>` of its variable replaces a
    credential's value.
    """
    for name, value in _values().items():
        text = text.replace(value, f"<{name}>")
    return text


def _values() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if SECRET_NAME.search(n) and len(v) >= _LONG}
