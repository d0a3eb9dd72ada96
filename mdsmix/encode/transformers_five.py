"""Folders of tokenizers and processors that transformers 5 saved, for transformers 4.

Two things differ. The class of a tokenizer that only follows its tokenizer.json is
TokenizersBackend, which transformers 4 does not know: it is PreTrainedTokenizerFast there. The
settings of the image processor are a section of processor_config.json, which only some versions of
transformers 4 read: the others want a preprocessor_config.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TOKENIZER, PROCESSOR = "tokenizer_config.json", "processor_config.json"
NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
SECTIONS = {
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
}
"Section of processor_config.json -> the file that transformers 4 saves in its place."


@contextmanager
def readable_folder(name: str) -> Iterator[str]:
    """Give the folder in a form that transformers 4 opens: a temporary copy if transformers 5 saved
    `name`, else `name` itself, which may be a hub name.
    """
    changed = _changed_files(Path(name)) if os.path.isdir(name) else {}
    if not changed:
        yield name
        return
    with TemporaryDirectory(prefix="mdsmix-") as copy:
        for path in Path(name).resolve().iterdir():
            if path.name not in changed:
                (Path(copy) / path.name).symlink_to(path)
        for file, content in changed.items():
            (Path(copy) / file).write_text(json.dumps(content))
        yield copy


def _changed_files(folder: Path) -> dict[str, Any]:
    """Name -> content of the files that transformers 4 needs and the folder lacks or has
    otherwise.
    """
    changed = dict[str, Any]()
    tokenizer = _read(folder / TOKENIZER)
    if tokenizer.get("tokenizer_class") == NEW_CLASS:
        changed[TOKENIZER] = _tokenizer_of_four(tokenizer)
    processor = _read(folder / PROCESSOR)
    for section, file in SECTIONS.items():
        settings = processor.get(section)
        if isinstance(settings, dict) and not (folder / file).exists():
            of = {key: processor[key] for key in ("processor_class",) if key in processor}
            changed[file] = of | settings
    return changed


def _tokenizer_of_four(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's config with the class and the keys of transformers 4. Its named special
    tokens were one mapping, `extra_special_tokens`, and the others a list under another key.
    """
    old = config | {"tokenizer_class": OLD_CLASS}
    listed, named = (
        config.get("extra_special_tokens"),
        old.pop("model_specific_special_tokens", None),
    )
    if isinstance(listed, list):
        old["additional_special_tokens"] = listed
        del old["extra_special_tokens"]
    if named:
        old["extra_special_tokens"] = named
    return old


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; {} if there is no such file or it holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
