"""Folders of tokenizers and processors in the form that transformers 4 and 5 both open.

A folder that transformers 5 saved differs in three things:
- Its tokenizer_config.json names a class that transformers 4 does not know (TokenizersBackend), or
  one of the same name that transformers 4 builds in another way.
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
from tempfile import TemporaryDirectory
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
    """A folder that this version of transformers can open."""

    name: str
    "A temporary copy, or the name of the original, which may be a hub name."
    note: str
    "How the copy differs from the original, for the user; empty for the original."


@contextmanager
def open_readable_folder(name: str) -> Iterator[Readable]:
    """Yield a folder from which the installed transformers can open the tokenizer or processor
    `name`: the original, or a temporary copy with changed files. A hub name is yielded unchanged.
    """
    folder = Path(name)
    if not os.path.isdir(name):
        yield Readable(name, "")
        return
    changed = _convert_for_four(folder)
    note = ""
    config = _read_json(folder / TOKENIZER_CONFIG)
    own_class = config.get("tokenizer_class") or "a tokenizer without a class"
    if is_known_class(NEW_CLASS):  # this is transformers 5
        changed.pop(TOKENIZER_CONFIG, None)
    if TOKENIZER_CONFIG in changed:
        note = f"saved by transformers 5 as {own_class}, and is read from its tokenizer.json only"
    elif _is_only_unknown(folder, config):
        changed[TOKENIZER_CONFIG] = config | {"tokenizer_class": PLAIN_CLASS}
        note = f"read from its tokenizer.json only, since transformers has no class {own_class}"
    if not changed:
        yield Readable(name, "")
        return
    with TemporaryDirectory(prefix="mdsmix-") as copy:
        for path in folder.resolve().iterdir():
            if path.name not in changed:
                (Path(copy) / path.name).symlink_to(path)
        _write_json(Path(copy), changed)
        yield Readable(copy, note)


def is_known_class(name: str) -> bool:
    """Check whether transformers has a tokenizer class of this name, slow or fast."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    names = (name, f"{name}Fast", name.removesuffix("Fast"))
    return any(tokenizer_class_from_name(each) is not None for each in names)


def make_readable(folder: Path) -> None:
    """Rewrite a folder that transformers saved, so that transformers 4 and 5 open it."""
    _write_json(folder, _convert_for_four(folder))


def add_named_templates(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer the templates of `additional_chat_templates` in its folder.

    transformers reads that folder from 4.52 on. Older versions silently ignore it.
    """
    from transformers import utils

    files = sorted((folder / ADDITIONAL).glob("*.jinja"))
    if not files or hasattr(utils, "CHAT_TEMPLATE_DIR"):
        return
    template = tokenizer.chat_template
    named = dict(template) if isinstance(template, dict) else {}
    if isinstance(template, str):
        named["default"] = template
    tokenizer.chat_template = named | {path.stem: path.read_text("utf-8") for path in files}


def is_saved_by_five(folder: str) -> bool:
    """Check whether transformers 5 saved the tokenizer in this folder in a form that transformers 4
    cannot open. False for a hub name.
    """
    return os.path.isdir(folder) and TOKENIZER_CONFIG in _convert_for_four(Path(folder))


def _is_only_unknown(folder: Path, config: dict[str, Any]) -> bool:
    """Check whether transformers does not have the tokenizer's class, but the tokenizer can be read
    without that class: it has a tokenizer.json and no code of its own.
    """
    own_class = config.get("tokenizer_class")
    if not isinstance(own_class, str) or "auto_map" in config:
        return False
    return (folder / TOKENIZER_JSON).is_file() and not is_known_class(own_class)


def _convert_for_four(folder: Path) -> dict[str, Any]:
    """Return file name -> content in the form of transformers 4, for each file that the folder has
    in the form of transformers 5 or lacks.
    """
    changed = dict[str, Any]()
    tokenizer = _read_json(folder / TOKENIZER_CONFIG)
    if _is_of_five(tokenizer) and (folder / TOKENIZER_JSON).is_file():
        changed[TOKENIZER_CONFIG] = _tokenizer_for_four(tokenizer)
    processor = _read_json(folder / PROCESSOR_CONFIG)
    for section, file in SECTIONS.items():
        settings = processor.get(section)
        if isinstance(settings, dict) and not (folder / file).exists():
            shared = {key: processor[key] for key in ("processor_class",) if key in processor}
            changed[file] = shared | settings
            # transformers 4.51 mistakes a section for an argument of the processor.
            config = changed.get(PROCESSOR_CONFIG, processor)
            changed[PROCESSOR_CONFIG] = {key: config[key] for key in config.keys() - {section}}
    return changed


def _is_of_five(config: dict[str, Any]) -> bool:
    """Check whether a tokenizer's config has any key or value that transformers 4 cannot read or
    would read differently. One is enough: a config that was edited by hand may have only some of
    them.
    """
    has_list = isinstance(config.get("extra_special_tokens"), list)
    return SAVED_BY_FIVE in config or config.get("tokenizer_class") == NEW_CLASS or has_list


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
    """Write JSON files, given as name -> content, into a folder."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; {} if there is no such file or it contains something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
