"""What the shell offers after Tab where a stream or a loader is named.

The recipe or training YAML on the command line is read as plain YAML, which is fast. A file that
cannot be read offers nothing: completion never prints an error into the user's prompt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

MOST_BYTES = 1 << 20
"Longer files are not recipes."


def complete_converted(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the streams that the recipe converts, each with its kind: `("web", "pretraining")`."""
    streams = _find_file(ctx, "streams").get("streams")
    names = list[tuple[str, str]]()
    for name, keys in _list_streams(streams):
        if "source" in keys:
            names.append((name, str(keys.get("kind", ""))))
    return names


def complete_published(ctx: typer.Context) -> list[str]:
    """Return where the recipe's streams are published, such as `s3://bucket/mix/web/train`.

    Folders are relative to the working directory.
    """
    recipe = _find_file(ctx, "streams")
    target = _find_folder(recipe, recipe.get("path", ""))
    splits = list[str]()
    for name, keys in _list_streams(recipe.get("streams")):
        folder = f"{target}/{name}" if target else ""
        if "source" not in keys:
            folder = _find_folder(keys, recipe["path"])
        if not folder:
            continue
        splits.append(f"{folder}/{keys.get('split', 'train')}")
        if "holdout" in keys:
            splits.append(f"{folder}/eval")
    return splits


def complete_stored(ctx: typer.Context) -> list[str]:
    """Return the recipe's streams, and the other folders in its local folder, which may be streams
    that it does not name. A remote store is not asked, since that could take seconds.
    """
    recipe = _find_file(ctx, "streams")
    names = [name for name, _ in _list_streams(recipe.get("streams"))]
    if recipe and not recipe.get("remote"):
        with suppress(OSError):
            for entry in os.scandir(_find_folder(recipe, recipe["path"])):
                if entry.is_dir() and entry.name not in names and "." not in entry.name:
                    names.append(entry.name)
    return names


def complete_loaders(ctx: typer.Context) -> list[str]:
    """Return the loaders of the training YAML: `train_loader`, `eval_loader.<label>`."""
    config = _find_file(ctx, "train_loader")
    if not config:
        return []
    loaders = ["train_loader"]
    evaluations = config.get("eval_loader")
    for entry in evaluations if isinstance(evaluations, list) else [evaluations]:
        if isinstance(entry, dict):
            label = entry.get("label")
            loaders.append(f"eval_loader.{label}" if label else "eval_loader")
    return loaders


def _find_file(ctx: typer.Context, key: str) -> dict[str, Any]:
    """Return the keys of the first file on the command line that has this key at its top, and under
    `path` the file's path. Return an empty dict if no file has it.
    """
    for word in _list_words(ctx):
        # Any file may be on the command line, and any error in it only means: nothing to offer.
        with suppress(Exception):
            tree = _read_yaml(word)
            if isinstance(tree, dict) and isinstance(tree.get(key), dict):
                return tree | {"path": word}
    return {}


def _read_yaml(path: str) -> Any:
    """Return the content of a YAML file; None if it is not a file or too long."""
    if not os.path.isfile(path) or os.path.getsize(path) > MOST_BYTES:
        return None
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with Path(path).open(encoding="utf-8") as file:
        return yaml.load(file, Loader=loader)


def _list_words(ctx: typer.Context) -> Iterator[str]:
    """Yield the arguments and option values before the cursor. An option without its value ends
    the parsing: the words before it are then in `ctx.args`.
    """
    for value in [*ctx.params.values(), ctx.args]:
        for word in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(word, (str, os.PathLike)):
                yield os.fspath(word)


def _list_streams(streams: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and keys of each stream that is a mapping."""
    if isinstance(streams, dict):
        for name, keys in streams.items():
            if isinstance(keys, dict):
                yield str(name), keys


def _find_folder(keys: dict[str, Any], recipe: str) -> str:
    """Return where a recipe or a stream is published, as the user would write it here: its remote,
    otherwise its local folder. Return an empty string if neither is set, or if the value has a
    variable (`${...}`).

    Args:
        keys: the keys of the recipe or of one of its streams.
        recipe: the path of the recipe, from whose folder paths are relative.
    """
    folder = str(keys.get("remote") or keys.get("local") or "").rstrip("/")
    if "${" in folder:
        return ""
    if not folder or "://" in folder or folder.startswith(("/", "~")):
        return folder
    return os.path.relpath(os.path.join(os.path.dirname(recipe), folder))
