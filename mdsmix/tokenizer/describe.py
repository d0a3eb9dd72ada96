"""Describes a tokenizer as plain data, in a process of its own, since it imports transformers.

`python -m mdsmix.tokenizer.describe` with {"name", "kwargs"} on stdin prints the description and
the error as JSON. The reference is `AutoTokenizer.from_pretrained(name, **kwargs)`, as in
LLM-Foundry, because a tokenizer's class may change its tokenizer.json (Llama's adds a BOS
post-processor). transformers is imported without torch: a second or two, and 80 MB.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from mdsmix.processor.loaded import read_saved_texts
from mdsmix.processor.server import try_to_answer
from mdsmix.tokenizer.content_hash import hash_content, normalize_model
from mdsmix.tokenizer.transformers_five import (
    GENERATION_CONFIG,
    TOKENIZER_JSON,
    add_named_templates,
    is_saved_by_five,
    make_readable,
    open_readable_folder,
)

PROBES = ("a", "Hello, world!", "one two  three\n", "déjà vu, 東京", "12345")
"Texts that show which tokens a tokenizer adds by itself."
RARE_PROBES = (
    *(" ", "\n", "  a\n\n  b", "\tx = {1: 'one'}", "don't HTMLParser camelCase", "1234567890"),
    *(
        "नमस्ते مرحبا שלום สวัสดี",
        "한국어 日本語 中文",
        "naïve ﬁ ½ ²",
        "a\u00a0b\u200bc",
        "🙂👍🏽",
        "</s> <s> [INST]",
        "a</s>b<s>c",
    ),
)
"Texts that two classes are likely to split in different ways."


def describe_tokenizer(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer as plain data; only `wrong`, a sentence, if an argument changes nothing.

    Raises ValueError, which says why, if mdsmix cannot use it.
    """
    tokenizer, note = _load(name, kwargs)
    if unread := _unread(type(tokenizer), kwargs):
        wrong = (
            f"tokenizer.kwargs: {', '.join(unread)} would change nothing, since {type(tokenizer).__name__} does not read it: "
            "correct or remove it; a variable of the chat template belongs in tokenizer.template."
        )
        return {"wrong": wrong}
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"its class {type(tokenizer).__name__} has no fast form (tokenizer.json), which mdsmix needs; "
            "convert it once with transformers.convert_slow_tokenizer and save it"
        )
    _refuse_empty(tokenizer)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    taken = _read_off(tokenizer)
    content = tokenizer.backend_tokenizer.to_str()
    ids = {key: taken[key] for key in ("bos_id", "eos_id", "pad_id")}
    tree = orjson.loads(content)
    files, stops = _files(tokenizer, taken, content), _stop_ids(name, kwargs)
    if stops:
        files[GENERATION_CONFIG] = json.dumps({"eos_token_id": stops})
    return taken | {
        "hash": hash_content(tree, ids),
        "files": files,
        "stop_ids": stops,
        "read_as": note,
        "class_changes": "" if kwargs else _class_changes(name, tokenizer, tree),
    }


def _refuse_empty(tokenizer: Any) -> None:
    """Raise ValueError if a tokenizer has no token but special ones.

    transformers 5 opens a folder with a config.json alone to such a tokenizer.
    """
    ordinary = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if len(ordinary) <= 1:
        raise ValueError(
            "it opens as an empty tokenizer, since it has no file with a vocabulary (tokenizer.json)"
        )


def _class_changes(name: str, tokenizer: Any, tree: dict[str, Any]) -> str:
    """Return a sentence with an example if the tokenizer's class gives other ids than its
    tokenizer.json says; else, or without such a file, an empty string. `tree`: what the class made
    of that file.
    """
    if os.path.isfile(name):
        return ""
    path = _file_beside(name, TOKENIZER_JSON, {})
    if path is None:
        return ""
    own = Path(path).read_bytes()
    with suppress(ValueError, KeyError, TypeError):
        if normalize_model(orjson.loads(own)) == normalize_model(tree):
            return ""
    from tokenizers import Tokenizer as Model

    alone = Model.from_str(own.decode())
    alone.no_truncation()
    alone.no_padding()
    for text in (*PROBES, *RARE_PROBES):
        ids = tokenizer.backend_tokenizer.encode(text).ids
        others = alone.encode(text).ids
        if ids != others:
            return (
                f"its class {type(tokenizer).__name__} gives other ids than its tokenizer.json: "
                f"{text!r} is {ids[:8]} by the class and {others[:8]} by the file"
            )
    return ""


def _stop_ids(name: str, kwargs: dict[str, Any]) -> list[int]:
    """Return the `eos_token_id` of the generation_config.json of a tokenizer, in its folder or at
    the hub; [] if there is none.
    """
    if os.path.isfile(name):
        return []
    path = _file_beside(name, GENERATION_CONFIG, kwargs)
    content = Path(path).read_bytes() if path else b"{}"
    with suppress(ValueError):
        config = orjson.loads(content)
        ids = config.get("eos_token_id") if isinstance(config, dict) else None
        listed = ids if isinstance(ids, list) else [ids]
        return [id for id in listed if type(id) is int]
    return []


def _file_beside(name: str, file: str, kwargs: dict[str, Any]) -> str | None:
    """Return the path of a tokenizer's file, in its folder or in the hub's cache; None if it is not
    there.
    """
    from transformers.utils.hub import cached_file

    keys = ("revision", "subfolder", "token", "cache_dir", "local_files_only")
    place = {key: kwargs[key] for key in keys if key in kwargs}
    with suppress(OSError):  # the hub cannot be reached
        path = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **place,
        )
        return None if path is None else str(path)
    return None


def _read_off(tokenizer: Any) -> dict[str, Any]:
    prefix, suffix = _added_around(tokenizer)
    added = sorted(tokenizer.added_tokens_decoder.items())
    special = {i: t.content for i, t in added if t.special}
    template = tokenizer.chat_template
    named = dict(template) if isinstance(template, dict) else {}
    return {
        "class_name": type(tokenizer).__name__,
        "vocab_size": max(len(tokenizer), *(i + 1 for i in tokenizer.get_vocab().values())),
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "pad_id": tokenizer.pad_token_id,
        "padding_side": tokenizer.padding_side,
        "prefix_ids": prefix,
        "suffix_ids": suffix,
        "special_tokens": list(special.values()),
        "special_ids": list(special),
        "added_tokens": {token.content: id for id, token in added},
        "chat_template": named.get("default") if named else template,
        "named_templates": named,
        "template_variables": _template_variables(tokenizer),
    }


def _template_variables(tokenizer: Any) -> dict[str, Any]:
    """Return the special tokens that a chat template may print, by the names of transformers 4.

    transformers 5 has the list `additional_special_tokens` under another name, and not among them.
    """
    variables = dict(tokenizer.special_tokens_map)
    listed = getattr(tokenizer, "extra_special_tokens", None)
    if isinstance(listed, list) and listed:
        variables.setdefault("additional_special_tokens", [str(token) for token in listed])
    return variables


def _files(tokenizer: Any, taken: dict[str, Any], content: str) -> dict[str, str]:
    """Return name -> text of the files that AutoTokenizer opens to this same tokenizer,
    tokenizer.json among them.

    transformers saves them, so the keyword arguments are in them, and no other file of the original
    folder or hub is. Their class is PreTrainedTokenizerFast if possible, which follows
    tokenizer.json alone, so that transformers 4 and 5 give the same ids: a class of its own may
    change the tokenizer in one version and not in the other. Raises ValueError if neither this
    class nor the tokenizer's own opens to the same tokenizer.
    """
    for make in (_plain, lambda own: own):
        with TemporaryDirectory() as folder, suppress(Exception):
            make(tokenizer).save_pretrained(folder, legacy_format=False)
            (Path(folder) / TOKENIZER_JSON).write_text(content)
            make_readable(Path(folder))
            opened, _ = _load(folder, {"trust_remote_code": False})
            is_same = opened.backend_tokenizer.to_str() == content
            if is_same and _read_off(opened) | {"class_name": taken["class_name"]} == taken:
                return read_saved_texts(folder)
    raise ValueError("what transformers saves of it does not open to the same tokenizer again")


def _plain(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        padding_side=tokenizer.padding_side,
        model_max_length=tokenizer.model_max_length,
        **_special_tokens(tokenizer),
    )


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer's special tokens as arguments of PreTrainedTokenizerFast.

    Tokens with a name that only some models have, such as `image_token`, are an argument of their
    own, which transformers 5 calls otherwise.
    """
    usual = {"additional_special_tokens", *tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    tokens = dict(tokenizer.special_tokens_map)
    named = {key: tokens.pop(key) for key in tokens.keys() - usual}
    listed = getattr(tokenizer, "extra_special_tokens", None)
    if isinstance(listed, list):
        return tokens | {"extra_special_tokens": listed, "model_specific_special_tokens": named}
    return tokens | ({"extra_special_tokens": named} if named else {})


WITHOUT_FRAMEWORKS = {"USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0"}
"""Environment that keeps transformers from importing libraries no tokenizer needs: 2.7 s of CPU and
79 MB, not 13.5 s and 1,014 MB.
"""


def _load(name: str, kwargs: dict[str, Any]) -> tuple[Any, str]:
    """Return a tokenizer of transformers, and a sentence on how it was read, or an empty string."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if os.path.isfile(name):
        return PreTrainedTokenizerFast(tokenizer_file=name, **kwargs), ""
    inner = os.path.join(name, str(kwargs.get("subfolder") or ""))
    if inner != name and is_saved_by_five(inner):
        name, kwargs = inner, {key: kwargs[key] for key in kwargs if key != "subfolder"}
    with open_readable_folder(name) as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder.name, **kwargs)
        add_named_templates(tokenizer, Path(inner))
        return tokenizer, folder.note


def _unread(of: type, kwargs: dict[str, Any]) -> list[str]:
    """Keyword arguments that would change nothing: transformers' code for this class does not
    mention their names. Empty for a class whose code came with the tokenizer, since that code may
    read any argument.
    """
    from transformers import AutoTokenizer

    if of.__module__.startswith("transformers_modules."):
        return []
    modules = {inspect.getmodule(each) for each in (AutoTokenizer, *of.__mro__[:-1])}
    code = "".join(inspect.getsource(module) for module in modules if module)
    return [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", code)]


def _added_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that `tokenizer(text)` adds before and behind those of the text. ValueError where
    they differ between texts.
    """
    found = list[Any]()
    for probe in PROBES:
        full, bare = (
            tokenizer(probe, add_special_tokens=own)["input_ids"] for own in (True, False)
        )
        if tokenizer(text_target=probe)["input_ids"] != full:
            raise ValueError(
                "it encodes a text as a target otherwise than as an input, which mdsmix does not know"
            )
        start = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), len(full))
        found.append((full[:start], full[start + len(bare) :]))
    if found != found[:1] * len(found):
        raise ValueError(
            "it adds special tokens to a text other than a fixed head and tail, which mdsmix does not know"
        )
    head, tail = found[0]
    return head, tail


def main() -> None:
    os.environ.update(WITHOUT_FRAMEWORKS)
    question = json.load(sys.stdin)
    if not question["kwargs"].get("trust_remote_code"):
        hide_torch()
    # transformers asks on stdout whether to run a tokenizer's own code.
    with redirect_stdout(sys.stderr):
        answer = try_to_answer(lambda arguments: describe_tokenizer(**arguments), question)
    print(json.dumps(answer))


def hide_torch() -> None:
    """Let transformers 5 take torch for missing: it does not read USE_TORCH any more.

    No tokenizer of its own needs torch. Code that came with a tokenizer may.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
