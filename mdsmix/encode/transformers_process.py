"""The process in which transformers opens a tokenizer or a processor, and describes it as plain data, so that no later run imports it.

Run as `python -m mdsmix.encode.transformers_process` with {"what", "name", "kwargs"} on stdin; prints one JSON object. The reference is
`AutoTokenizer.from_pretrained(name, **kwargs)`, as in LLM-Foundry, because a tokenizer's class may rewrite what its
tokenizer.json says (Llama's adds a BOS post-processor). For a tokenizer transformers is imported without torch: a second or two, and 80 MB.
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
import xxhash

from mdsmix.errors import RecipeError

PROBES = ("a", "Hello, world!", "one two  three\n", "déjà vu, 東京", "12345")
"Texts that show which tokens a tokenizer adds by itself."
SAVED = (".json", ".jinja", ".txt")
"""Suffixes of the files that are kept of those that transformers saves. A SentencePiece model is left out, since tokenizer.json says the
same, and so is code."""


def take(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer as plain data. RecipeError where an argument changes nothing; ValueError says why mdsmix cannot use the tokenizer."""
    tokenizer = _load(name, kwargs)
    if unread := _unread(type(tokenizer), kwargs):
        raise RecipeError(
            f"tokenizer.kwargs: {', '.join(unread)} would change nothing, since {type(tokenizer).__name__} does not read it: "
            "correct or remove it; a variable of the chat template belongs in tokenizer.template."
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"its class {type(tokenizer).__name__} has no fast form (tokenizer.json), which mdsmix needs; "
            "convert it once with transformers.convert_slow_tokenizer and save it"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    taken = _read_off(tokenizer)
    content = tokenizer.backend_tokenizer.to_str()
    ids = {key: taken[key] for key in ("bos_id", "eos_id", "pad_id")}
    return taken | {"hash": content_hash(content, ids), "files": _files(tokenizer, taken, content)}


def content_hash(content: str, ids: dict[str, int | None]) -> str:
    """A tokenizer's hash, by its tokenizer.json and the ids of its BOS, EOS and padding."""
    shaping = orjson.dumps([orjson.loads(content), ids], option=orjson.OPT_SORT_KEYS)
    return xxhash.xxh128_hexdigest(shaping)


def _read_off(tokenizer: Any) -> dict[str, Any]:
    prefix, suffix = _added_around(tokenizer)
    special = {i: t.content for i, t in sorted(tokenizer.added_tokens_decoder.items()) if t.special}
    template = tokenizer.chat_template
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
        # of several named templates, apply_chat_template takes this one when none is named
        "chat_template": template.get("default") if isinstance(template, dict) else template,
        "template_variables": dict(tokenizer.special_tokens_map),
    }


def _files(tokenizer: Any, taken: dict[str, Any], content: str) -> dict[str, str]:
    """Name -> text of the files that AutoTokenizer opens to this same tokenizer, tokenizer.json among them.

    transformers saves them, so the keyword arguments are in them, and no other file of the original folder or hub is. A class whose code
    came with the tokenizer cannot be opened from them: PreTrainedTokenizerFast, which follows tokenizer.json alone, is saved in its place.
    ValueError where neither opens to the same tokenizer.
    """
    for candidate in (tokenizer, _plain(tokenizer)):
        with TemporaryDirectory() as folder, suppress(Exception):
            candidate.save_pretrained(folder, legacy_format=False)
            (Path(folder) / "tokenizer.json").write_text(content)
            opened = _load(folder, {"trust_remote_code": False})
            is_same = opened.backend_tokenizer.to_str() == content
            if is_same and _read_off(opened) | {"class_name": taken["class_name"]} == taken:
                return texts_in(folder)
    raise ValueError("what transformers saves of it does not open to the same tokenizer again")


def processor_card(seeing: Any) -> dict[str, Any]:
    """The fields of `mdsmix.encode.pretrained.Processor` for a LoadedProcessor, with its files as name -> text."""
    with TemporaryDirectory() as folder:
        seeing.processor.save_pretrained(folder)
        files = texts_in(folder)
    return {
        "hash": seeing.digest,
        "class_name": type(seeing.processor).__name__,
        "image_token": seeing.token,
        "around": seeing.around,
        "files": files,
    }


def texts_in(folder: str) -> dict[str, str]:
    """Name -> text of the files that transformers saved in a folder."""
    saved = (file for file in Path(folder).rglob("*") if file.suffix in SAVED)
    return {str(file.relative_to(folder)): file.read_text() for file in saved}


def _plain(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        padding_side=tokenizer.padding_side,
        model_max_length=tokenizer.model_max_length,
        **tokenizer.special_tokens_map,
    )


WITHOUT = {"USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0"}
"Environment that keeps transformers from importing libraries no tokenizer needs: 2.7 s of CPU and 79 MB, not 13.5 s and 1,014 MB."


def _load(name: str, kwargs: dict[str, Any]) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if os.path.isfile(name):
        return PreTrainedTokenizerFast(tokenizer_file=name, **kwargs)
    return AutoTokenizer.from_pretrained(name, **kwargs)


def _unread(of: type, kwargs: dict[str, Any]) -> list[str]:
    """Keyword arguments that would change nothing: transformers' code for this class does not mention their names. Empty for a class whose
    code came with the tokenizer, since that code may read any argument."""
    from transformers import AutoTokenizer

    if of.__module__.startswith("transformers_modules."):
        return []
    modules = {inspect.getmodule(each) for each in (AutoTokenizer, *of.__mro__[:-1])}
    code = "".join(inspect.getsource(module) for module in modules if module)
    return [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", code)]


def _added_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that `tokenizer(text)` adds before and behind those of the text. ValueError where they differ between texts."""
    found = list[Any]()
    for probe in PROBES:
        full, bare = (
            tokenizer(probe, add_special_tokens=own)["input_ids"] for own in (True, False)
        )
        if tokenizer(text_target=probe)["input_ids"] != full:
            raise ValueError(
                "it encodes a text as a target otherwise than as an input, which mdsmix does not know"
            )
        starts = (n for n in range(len(full)) if full[n : n + len(bare)] == bare)
        start = next(starts, len(full))
        found.append((full[:start], full[start + len(bare) :]))
    if found != found[:1] * len(found):
        raise ValueError(
            "it adds special tokens to a text other than a fixed head and tail, which mdsmix does not know"
        )
    head, tail = found[0]
    return head, tail


def main() -> None:
    asked = json.load(sys.stdin)
    if not (is_processor := asked.pop("what") == "processor"):
        os.environ.update(WITHOUT)
    try:
        # transformers asks on stdout whether to run a tokenizer's own code.
        with redirect_stdout(sys.stderr):
            if is_processor:
                from mdsmix.encode.loaded_processor import LoadedProcessor

                answer = processor_card(LoadedProcessor(asked["name"]))
            else:
                answer = take(**asked)
    except RecipeError as error:
        answer = {"wrong": str(error)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}" if str(error) else repr(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
