"""Describes a tokenizer as plain data. This runs in a separate process, since it imports
transformers.

`python -m mdsmix.tokenizer.describe` reads JSON with the keys `name` and `kwargs` on stdin. It
prints a JSON list of two items: the description, and an error message ("" if there was no error).
If a file will probably give the same ids as the tokenizer, it prints a line before the description
is ready, `{"file": PATH}`. A conversion opens fastokens' model from this file meanwhile.

The tokenizer is opened by `AutoTokenizer.from_pretrained(name, **kwargs)`, as in LLM-Foundry, since
a tokenizer's class may change what its tokenizer.json says: Llama's class adds a post-processor for
BOS. transformers is imported without torch, which takes a second or two, and 80 MB.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import orjson

from mdsmix.errors import Unusable
from mdsmix.freed_memory import release_freed_memory
from mdsmix.processor.server import try_to_answer
from mdsmix.tokenizer.bpe_json import BpeJson, parse_bpe_json
from mdsmix.tokenizer.content_hash import hash_content, hash_model
from mdsmix.tokenizer.differences import (
    describe_class_changes,
    describe_model_changes,
    is_bos_ignored,
)
from mdsmix.tokenizer.fields import read_fields, read_ids
from mdsmix.tokenizer.file_reader import FileFacts, FileReader
from mdsmix.tokenizer.lazy_transformers import read_models_late
from mdsmix.tokenizer.opening import (
    WITHOUT_FRAMEWORKS,
    find_file,
    find_unread_arguments,
    hide_torch,
    load_tokenizer,
)
from mdsmix.tokenizer.saving import (
    follow_live_flags,
    save_files,
    save_skeleton,
    without_output,
    write_uncut,
)
from mdsmix.tokenizer.transformers_five import GENERATION_CONFIG, TOKENIZER_JSON

SKELETON_CLASSES = frozenset(
    {
        "PreTrainedTokenizerFast",
        "LlamaTokenizerFast",
        "GemmaTokenizerFast",
        "Qwen2TokenizerFast",
        "GPT2TokenizerFast",
        "CohereTokenizerFast",
    }
)
"""Classes of transformers 4.51 to 4.57 that open a skeleton as they open the whole tokenizer: they
look up special tokens only, which are added tokens, and change neither the vocabulary nor the
merges. Only the correction of REGEX_FIX depends on the number of tokens.
"""
REGEX_FIX = "fix_mistral_regex"
"A key of tokenizer_config.json that changes the pre-tokenizer of a vocabulary above 100,000 ids."


def describe_tokenizer(
    name: str, kwargs: dict[str, Any], file: FileReader | None = None
) -> dict[str, Any]:
    """Return a description of the tokenizer: the fields of the dataclass `card.Tokenizer` as a
    dict. Its `files` is {name: text} of the tokenizer's files, instead of a list of names. It also
    has `is_as_file`: whether the folder's tokenizer.json is known to give the same ids for a text,
    without those that are added around it.

    If an argument of `kwargs` would have no effect, return {"wrong": message}.
    Raises Unusable with the reason if mdsmix cannot use the tokenizer.

    Args:
        name: the tokenizer's folder, file or hub name.
        kwargs: arguments for AutoTokenizer.from_pretrained, from the recipe.
        file: reads the folder's tokenizer.json, if there are no `kwargs`; None: nothing is known of
            it.
    """
    if file:
        with suppress(Exception):  # the whole tokenizer may be fine, or raises the error again
            description = _describe_by_skeleton(name, file)
            if description:
                return description
    facts = file.wait() if file else FileFacts()
    tokenizer, note = load_tokenizer(name, kwargs, facts.joined)
    release_freed_memory()  # reading Gemma 3 leaves 200 MB of it
    unread_names = find_unread_arguments(type(tokenizer), kwargs)
    if unread_names:
        wrong = (
            f"tokenizer.kwargs: {', '.join(unread_names)} would change nothing, since the class "
            f"{type(tokenizer).__name__} does not read this name. Correct the name or remove it "
            "from the recipe; a variable of the chat template belongs in tokenizer.template."
        )
        return {"wrong": wrong}
    _refuse_slow(tokenizer)
    opened = _read_opened(name, kwargs, tokenizer, note)
    return _describe_opened(name, kwargs, opened, facts)


class _Opened(NamedTuple):
    """A tokenizer that transformers has opened, and what is known of it already."""

    tokenizer: Any
    note: str
    "How its folder was read; empty if by the class that the folder names."
    fields: dict[str, Any]
    "The result of `read_fields`."
    files: dict[str, str]
    "The result of `save_files`."
    tree: dict[str, Any]
    "The JSON of its tokenizer.json."
    is_skeleton: bool = False
    "Whether `tokenizer` is only the skeleton of the tokenizer in `tree`."


def _read_opened(name: str, kwargs: dict[str, Any], tokenizer: Any, note: str) -> _Opened:
    """Return what a whole tokenizer says of itself, with the files that give the same tokenizer.

    Raises Unusable with the reason if mdsmix cannot use the tokenizer.

    Args:
        name: the tokenizer's folder, file or hub name.
        kwargs: the recipe's arguments, with which the tokenizer was opened.
        tokenizer: the tokenizer; the model in it may be replaced (`follow_live_flags`).
        note: how its folder was read.
    """
    content = write_uncut(tokenizer)
    if follow_live_flags(tokenizer, content, find_file(name, TOKENIZER_JSON, kwargs)):
        content = write_uncut(tokenizer)
    bpe = parse_bpe_json(content.encode())
    tree = bpe.to_tree() if bpe else orjson.loads(content)
    ids = read_ids(tokenizer, tree)
    _refuse_empty(tokenizer, ids)
    _refuse_splitting(tokenizer)
    fields = read_fields(tokenizer, ids)
    skeleton = bpe.to_skeleton(ids, fields["added_tokens"]) if bpe else ""
    del ids
    files = save_files(tokenizer, fields, content, skeleton)
    return _Opened(tokenizer, note, fields, files, tree)


def _describe_by_skeleton(name: str, file: FileReader) -> dict[str, Any] | None:
    """Return the description of a tokenizer that transformers opens from the skeleton of its
    tokenizer.json, which saves 1.5 s of 2.4 s for Gemma 3. Return None if the description of the
    whole tokenizer may be another one.

    Raises an error of any class if the skeleton does not suffice.

    Args:
        name: the tokenizer's folder.
        file: reads its tokenizer.json.
    """
    path = file.wait_for_skeleton()
    if path is None:
        return None
    with without_output():  # tokenizers prints the ids that the vocabulary of the skeleton skips
        tokenizer, note = load_tokenizer(name, {}, path)
        skeleton = write_uncut(tokenizer)
    is_known = type(tokenizer).__module__.startswith("transformers.") and (
        type(tokenizer).__name__ in SKELETON_CLASSES
    )
    if not is_known or REGEX_FIX in tokenizer.init_kwargs:
        return None
    small_tree = orjson.loads(skeleton)
    model = small_tree["model"]
    model_of_file = orjson.loads(path.read_bytes())["model"]
    if any(model[key] != model_of_file[key] for key in ("vocab", "merges")):
        return None  # its class has not opened the file, or changes its tokens
    ids = read_ids(tokenizer, small_tree)
    _refuse_empty(tokenizer, ids)
    _refuse_splitting(tokenizer)
    fields = read_fields(tokenizer, ids)
    files = save_skeleton(tokenizer, fields, skeleton)
    # The other process has read the whole file meanwhile.
    facts = file.wait()
    if facts.vocabulary is None or not files:
        return None
    vocab, merges = facts.vocabulary.read_bytes().split(b"\n")
    bpe = BpeJson(settings=small_tree, vocab=vocab, merges=merges)
    opened = _Opened(tokenizer, note, fields, files, bpe.to_tree(), is_skeleton=True)
    description = _describe_opened(name, {}, opened, facts)
    # Make the text when the tree is free: for Gemma 3 each of them takes 100 MB, while the parent
    # process makes the word form.
    del opened
    release_freed_memory()
    files[TOKENIZER_JSON] = bpe.put_into(skeleton.encode()).decode()
    return description


def _describe_opened(
    name: str, kwargs: dict[str, Any], opened: _Opened, facts: FileFacts
) -> dict[str, Any]:
    """Return the description of a tokenizer that transformers has opened.

    Raises ValueError if it depends on ids that the skeleton of a tokenizer does not give.

    Args:
        name: the tokenizer's folder, file or hub name.
        kwargs: the recipe's arguments.
        opened: the tokenizer.
        facts: what is known of its folder's tokenizer.json.
    """
    fields = opened.fields
    stop_ids = _read_stop_ids(name, kwargs)
    files = opened.files
    if stop_ids:
        files[GENERATION_CONFIG] = json.dumps({"eos_token_id": stop_ids})
    special_ids = {key: fields[key] for key in ("bos_id", "eos_id", "pad_id")}
    # Only a tokenizer without arguments is compared with its file.
    class_changes = ""
    is_as_file = False
    if not kwargs:
        file_hash = facts.file_hash
        model_hash = hash_model(opened.tree)
        is_as_file = file_hash is not None and file_hash.text_ids == model_hash.text_ids
        if opened.is_skeleton and not is_as_file:
            raise ValueError("the class changes more than the ids around texts")
        if file_hash != model_hash:
            class_changes = describe_class_changes(
                name, opened.tokenizer, model_hash, facts, is_skeleton=opened.is_skeleton
            )
    return fields | {
        "hash": hash_content(opened.tree, special_ids),
        "files": files,
        "stop_ids": stop_ids,
        "read_as": opened.note,
        # A folder with a note is read from its tokenizer.json only, as the note says.
        "is_bos_ignored": not opened.note and is_bos_ignored(name, kwargs, fields),
        "class_changes": class_changes,
        "model_changes": describe_model_changes(opened.tokenizer),
        "is_as_file": is_as_file,
    }


def _refuse_slow(tokenizer: Any) -> None:
    """Raise Unusable if a tokenizer's class does not use a tokenizer.json."""
    if not getattr(tokenizer, "is_fast", False):
        raise Unusable(
            f"its class {type(tokenizer).__name__} has no fast form (tokenizer.json), which "
            "mdsmix needs; name a folder or hub name of the same model that has a tokenizer.json, "
            "or make one with transformers.convert_slow_tokenizer"
        )


def _refuse_empty(tokenizer: Any, ids: dict[str, int]) -> None:
    """Raise Unusable if a tokenizer has only special tokens. transformers 5 makes such a
    tokenizer from a folder without a vocabulary.

    Args:
        tokenizer: the tokenizer.
        ids: its vocabulary, with added tokens: token -> id.
    """
    ordinary = ids.keys() - tokenizer.get_added_vocab().keys()
    if len(ordinary) <= 1:  # every real vocabulary has many ordinary tokens
        raise Unusable(
            "it opens as an empty tokenizer, since it has no file with a vocabulary "
            "(tokenizer.json); name a folder or hub name that has one"
        )


def _refuse_splitting(tokenizer: Any) -> None:
    """Raise Unusable if a tokenizer splits special tokens, such as `<|im_end|>`, into pieces."""
    if getattr(tokenizer, "split_special_tokens", False):
        raise Unusable(
            "it has split_special_tokens: true, by its tokenizer_config.json or the recipe's "
            "tokenizer.kwargs, so transformers splits special tokens such as the end of a turn "
            "into pieces, and mdsmix writes each as one id; remove the key, or set it to false in "
            "tokenizer.kwargs"
        )


def _read_stop_ids(name: str, kwargs: dict[str, Any]) -> list[int]:
    """Return the ids of `eos_token_id` in the generation_config.json that is in the tokenizer's
    folder or hub repository; [] if the file or the key is missing.

    Args:
        name: the tokenizer's folder, file or hub name.
        kwargs: the recipe's arguments, which may name a revision or a subfolder.
    """
    path = find_file(name, GENERATION_CONFIG, kwargs)
    if path is None:
        return []
    with suppress(ValueError):
        config = orjson.loads(Path(path).read_bytes())
        ids = config.get("eos_token_id") if isinstance(config, dict) else None
        listed = ids if isinstance(ids, list) else [ids]  # the key may be one id or a list
        return [id for id in listed if type(id) is int]
    return []


def main() -> None:
    """Read the question on stdin, describe the tokenizer and print the answer as JSON."""
    # Searching for garbage takes 0.1 to 0.2 s, and finds none: the process ends soon.
    gc.disable()
    os.environ.update(WITHOUT_FRAMEWORKS)
    question = json.load(sys.stdin)
    if not question["kwargs"].get("trust_remote_code"):
        hide_torch()
        read_models_late()
    # transformers asks on stdout whether to run a tokenizer's own code.
    with redirect_stdout(sys.stderr), TemporaryDirectory() as folder:
        path = Path(question["name"]) / TOKENIZER_JSON
        if path.is_file() and not question["kwargs"]:
            question["file"] = FileReader(path, Path(folder) / TOKENIZER_JSON)
            with suppress(Exception):  # `describe_tokenizer` reports it
                from transformers import AutoTokenizer  # noqa: F401
        answer = try_to_answer(lambda arguments: describe_tokenizer(**arguments), question)
    # Gemma 3's text takes four bytes a character, so let only one form of it exist.
    text = json.dumps(answer)
    del answer
    release_freed_memory()
    print(text)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # Python would free the vocabulary and all modules first
