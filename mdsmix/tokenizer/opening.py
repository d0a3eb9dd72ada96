"""Opens a tokenizer with transformers, as LLM-Foundry does, and finds its files.

Importing this module does not import transformers.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mdsmix.tokenizer.transformers_five import (
    add_named_templates,
    is_saved_by_five,
    open_readable_folder,
)

WITHOUT_FRAMEWORKS = {"USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0"}
"""Environment variables that keep transformers from importing libraries that no tokenizer needs. It
then takes 2.7 s of CPU and 79 MB instead of 13.5 s and 1,014 MB.
"""


def hide_torch() -> None:
    """Make transformers 5 believe that torch is not installed, since it ignores USE_TORCH.

    The tokenizers of transformers do not need torch. Code that came with a tokenizer may need it.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def load_tokenizer(
    name: str, kwargs: dict[str, Any], joined: Path | None = None
) -> tuple[Any, str]:
    """Load a tokenizer with transformers. Return (tokenizer, note on how its folder was read). The
    note is "" if the folder was read by the class that it names.

    Args:
        name: the tokenizer's folder, file or hub name.
        kwargs: arguments for AutoTokenizer.from_pretrained.
        joined: a file to read in place of the folder's tokenizer.json, or None.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if os.path.isfile(name):
        return PreTrainedTokenizerFast(tokenizer_file=name, **kwargs), ""
    # A subfolder that transformers 5 saved is opened as a folder, so that it can be converted.
    inner = os.path.join(name, str(kwargs.get("subfolder") or ""))
    if inner != name and is_saved_by_five(inner):
        name = inner
        kwargs = {key: kwargs[key] for key in kwargs if key != "subfolder"}
    with open_readable_folder(name, joined) as folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder.name, **kwargs)
        except Exception as error:
            # Messages name the user's folder, not a temporary copy.
            error.args = tuple(
                arg.replace(folder.name, name) if isinstance(arg, str) else arg
                for arg in error.args
            )
            raise
        add_named_templates(tokenizer, Path(inner))
        return tokenizer, folder.note


def find_unread_arguments(tokenizer_class: type, kwargs: dict[str, Any]) -> list[str]:
    """Return the names of the keyword arguments that would have no effect, which are names that do
    not occur as words in transformers' code for this class and its bases.

    If the code of the class came with the tokenizer, return [], since it may read any argument.

    Args:
        tokenizer_class: the class of the loaded tokenizer.
        kwargs: the recipe's arguments.
    """
    from transformers import AutoTokenizer

    if tokenizer_class.__module__.startswith("transformers_modules."):
        return []
    classes = (AutoTokenizer, *tokenizer_class.__mro__[:-1])  # without `object`
    modules = {inspect.getmodule(base) for base in classes}
    code = "".join(inspect.getsource(module) for module in modules if module)
    return [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", code)]


def find_file(name: str, file: str, kwargs: dict[str, Any]) -> str | None:
    """Return the path of one of a tokenizer's files, in its folder or in the hub cache; None if
    it is missing, or if the tokenizer is a tokenizer.json alone.

    Args:
        name: the tokenizer's folder, file or hub name.
        file: the file's name, such as `tokenizer.json`.
        kwargs: the recipe's arguments, which may name a revision or a subfolder.
    """
    if os.path.isfile(name):
        return None
    from transformers.utils.hub import cached_file

    keys = ("revision", "subfolder", "token", "cache_dir", "local_files_only")
    options = {key: kwargs[key] for key in keys if key in kwargs}
    with suppress(OSError):  # the hub cannot be reached
        path = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **options,
        )
        return None if path is None else str(path)
    return None
