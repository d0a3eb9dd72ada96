"""Folders of tokenizers and processors in the form that transformers 4 and 5 both open.

A folder that transformers 5 saved differs from one of transformers 4 in three things:
- Its tokenizer_config.json names a class that transformers 4 does not have (TokenizersBackend), or
  a class that transformers 4 has, but builds in another way.
- Its list of special tokens has another key.
- The settings of an image processor are a section of processor_config.json, whereas some versions
  of transformers 4 need a preprocessor_config.json.

In all of these cases tokenizer.json defines the tokens, and PreTrainedTokenizerFast follows that
file only, in transformers 4.51, 4.57 and 5.24. The same class reads a tokenizer.json whose own
class is unknown to every version of transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_JSON = "tokenizer.json"
PROCESSOR_CONFIG = "processor_config.json"
GENERATION_CONFIG = "generation_config.json"
ADDITIONAL = "additional_chat_templates"
NEW_CLASS = "TokenizersBackend"
PLAIN_CLASS = "PreTrainedTokenizerFast"
SAVED_BY_FIVE = "backend"
"A key of tokenizer_config.json that only transformers 5 writes."
SECTIONS = {
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
}
"Section of processor_config.json -> the file that transformers 4 saves instead."


class Readable(NamedTuple):
    """A folder that the installed version of transformers can open."""

    name: str
    "Path of a temporary copy, or the original name, which may be a hub name."
    note: str
    "How the copy differs from the original, for the user; empty if it is the original."


@contextmanager
def open_readable_folder(name: str, tokenizer_json: Path | None = None) -> Iterator[Readable]:
    """Give a `with` block a folder from which the installed version of transformers can open a
    tokenizer or processor: the original, or a temporary copy with changed files.

    Args:
        name: the tokenizer's or processor's folder, or its hub name, which is not changed.
        tokenizer_json: a file that takes the place of the folder's tokenizer.json; None: it stays.
    """
    folder = Path(name)
    if not os.path.isdir(name):
        yield Readable(name, "")
        return
    changed = _convert_for_four(folder)
    note = ""
    config = _read_json(folder / TOKENIZER_CONFIG)
    own_class = config.get("tokenizer_class") or "a tokenizer without a class"
    if is_five():
        changed.pop(TOKENIZER_CONFIG, None)
    if TOKENIZER_CONFIG in changed:
        note = f"saved by transformers 5 as {own_class}, and is read from its tokenizer.json only"
    elif _is_only_unknown(folder, config):
        changed[TOKENIZER_CONFIG] = config | {"tokenizer_class": PLAIN_CLASS}
        note = f"read from its tokenizer.json only, since transformers has no class {own_class}"
    if not changed and tokenizer_json is None:
        yield Readable(name, "")
        return
    from tempfile import TemporaryDirectory  # 1.5 ms, and few tokenizers need a copy

    # The copy has the changed files, and links to all others.
    with TemporaryDirectory(prefix="mdsmix-") as copy:
        for path in folder.resolve().iterdir():
            if path.name == TOKENIZER_JSON and tokenizer_json:
                (Path(copy) / path.name).symlink_to(tokenizer_json)
            elif path.name not in changed:
                (Path(copy) / path.name).symlink_to(path)
        _write_json(Path(copy), changed)
        yield Readable(copy, note)


def is_five() -> bool:
    """Return whether the installed transformers is version 5 or later."""
    from transformers import __version__

    major, _, _ = __version__.partition(".")
    return int(major) >= 5


def is_known_class(name: str) -> bool:
    """Check whether transformers has a tokenizer class of this name, slow or fast."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    names = (name, f"{name}Fast", name.removesuffix("Fast"))
    return any(tokenizer_class_from_name(candidate) is not None for candidate in names)


def make_readable(folder: Path) -> None:
    """Rewrite a folder that transformers saved, so that transformers 4 and 5 open it."""
    _write_json(folder, _convert_for_four(folder))


def add_named_templates(tokenizer: Any, folder: Path) -> None:
    """Add the chat templates in the subfolder `additional_chat_templates` to a tokenizer.

    transformers reads that subfolder from version 4.52 on. Older versions silently ignore it.

    Args:
        tokenizer: the loaded tokenizer; changed in place.
        folder: the folder from which it was loaded.
    """
    from transformers import utils

    files = sorted((folder / ADDITIONAL).glob("*.jinja"))
    if not files or hasattr(utils, "CHAT_TEMPLATE_DIR"):  # 4.52 or later, which has read them
        return
    template = tokenizer.chat_template
    named = dict(template) if isinstance(template, dict) else {}
    if isinstance(template, str):
        named["default"] = template
    tokenizer.chat_template = named | {path.stem: path.read_text("utf-8") for path in files}


def is_saved_by_five(folder: str) -> bool:
    """Return whether transformers 5 saved a tokenizer in this folder, in a form that transformers 4
    cannot open. Return False for a hub name.
    """
    return os.path.isdir(folder) and TOKENIZER_CONFIG in _convert_for_four(Path(folder))


def _is_only_unknown(folder: Path, config: dict[str, Any]) -> bool:
    """Return whether transformers lacks the tokenizer's class, but can read the tokenizer without
    that class: the folder has a tokenizer.json and no code of its own.

    Args:
        folder: the tokenizer's folder.
        config: its tokenizer_config.json.
    """
    own_class = config.get("tokenizer_class")
    if not isinstance(own_class, str) or "auto_map" in config:
        return False
    return (folder / TOKENIZER_JSON).is_file() and not is_known_class(own_class)


def _convert_for_four(folder: Path) -> dict[str, Any]:
    """Return {file name: content in the form of transformers 4} for the files that must change.
    These are files in the form of transformers 5, and files of transformers 4 that the folder
    lacks.
    """
    changed = dict[str, Any]()
    tokenizer = _read_json(folder / TOKENIZER_CONFIG)
    if _is_of_five(tokenizer) and (folder / TOKENIZER_JSON).is_file():
        changed[TOKENIZER_CONFIG] = _tokenizer_for_four(tokenizer)
    processor = _read_json(folder / PROCESSOR_CONFIG)
    for section, file in SECTIONS.items():
        settings = processor.get(section)
        if isinstance(settings, dict) and not (folder / file).exists():
            changed[file] = settings
            if "processor_class" in processor:
                changed[file] = {"processor_class": processor["processor_class"], **settings}
            # transformers 4.51 mistakes a section for an argument of the processor.
            config = changed.get(PROCESSOR_CONFIG, processor)
            changed[PROCESSOR_CONFIG] = {key: config[key] for key in config.keys() - {section}}
    return changed


def _is_of_five(config: dict[str, Any]) -> bool:
    """Return whether a tokenizer_config.json has at least one sign of transformers 5: a key or
    value that transformers 4 cannot read or would read differently. A config that was edited by
    hand may have only some of the signs.
    """
    has_new_class = config.get("tokenizer_class") == NEW_CLASS
    has_list = isinstance(config.get("extra_special_tokens"), list)
    return SAVED_BY_FIVE in config or has_new_class or has_list


def _tokenizer_for_four(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's config with the class and the keys of transformers 4.

    In transformers 4 `extra_special_tokens` is a mapping of named special tokens, and
    `additional_special_tokens` is the list of all other special tokens.
    """
    old = {key: value for key, value in config.items() if key != SAVED_BY_FIVE}
    old["tokenizer_class"] = PLAIN_CLASS
    named = old.pop("model_specific_special_tokens", None)
    listed = old.get("extra_special_tokens")
    if isinstance(listed, list):
        old["additional_special_tokens"] = listed
        del old["extra_special_tokens"]
    if named:
        old["extra_special_tokens"] = named
    return old


def _write_json(folder: Path, files: dict[str, Any]) -> None:
    """Write JSON files into a folder.

    Args:
        folder: the folder.
        files: file name -> content.
    """
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or does not contain an object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
