"""Saves the files of a tokenizer, and proves that they open to the same tokenizer.

These files are published next to the streams, and an encoder opens them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from mdsmix.errors import Unusable
from mdsmix.processor.loaded import read_saved_texts
from mdsmix.tokenizer.bpe_json import parse_bpe_json
from mdsmix.tokenizer.fields import read_fields
from mdsmix.tokenizer.opening import load_tokenizer
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON, make_readable


def write_uncut(tokenizer: Any) -> str:
    """Return the text of a tokenizer's tokenizer.json, after it neither cuts nor pads texts."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    content: str = tokenizer.backend_tokenizer.to_str()
    return content


def follow_live_flags(tokenizer: Any, content: str, path: str | None) -> bool:
    """Give a tokenizer a model that is written as it encodes. Return whether it got another one.

    tokenizer_config.json may give an added token another `normalized` than tokenizer.json does.
    tokenizers 0.22 then writes the new value, and matches the token by the old one. So a saved copy
    would give other ids than the tokenizer that transformers 4 has opened.
    Raises Unusable if no value gives the ids of the opened tokenizer.

    Args:
        tokenizer: the tokenizer; its model may be replaced.
        content: the text that it writes as tokenizer.json.
        path: the original tokenizer.json; None if there is none.
    """
    from tokenizers import Tokenizer as Model

    live_model = tokenizer.backend_tokenizer
    if path is None or live_model.normalizer is None:
        return False
    original = _read_added_tokens(Path(path).read_bytes())
    flags = {token["content"]: token["normalized"] for token in original}
    words = [
        token["content"]
        for token in _read_added_tokens(content.encode())
        if flags.get(token["content"], token["normalized"]) != token["normalized"]
    ]
    if not words:
        return False
    tree = orjson.loads(content)
    for token in tree["added_tokens"]:
        if token["content"] in words:
            token["normalized"] = flags[token["content"]]
    probes = list[str]()
    for word in words:
        for form in (word, word.lower(), word.upper(), live_model.normalizer.normalize_str(word)):
            probes += [form, f"a{form}b", f"a {form} b"]
    live_ids = [live_model.encode(probe).ids for probe in probes]
    for text, is_other in ((content, False), (orjson.dumps(tree).decode(), True)):
        model = Model.from_str(text)
        if [model.encode(probe).ids for probe in probes] == live_ids:
            if is_other:
                tokenizer._tokenizer = model
            return is_other
    raise Unusable(
        "its tokenizer_config.json and its tokenizer.json give an added token another "
        "`normalized`, and a copy that transformers saves would give other ids; make both alike"
    )


def _read_added_tokens(content: bytes) -> list[dict[str, Any]]:
    """Return the added tokens of a tokenizer.json. The vocabulary and merges of a BPE tokenizer are
    not parsed if `parse_bpe_json` can cut them off: 0.5 s for Gemma 3 as `tokenizers` writes it.
    """
    bpe = parse_bpe_json(content)
    tree = bpe.settings if bpe else orjson.loads(content)
    added: list[dict[str, Any]] = tree["added_tokens"]
    return added


def save_files(
    tokenizer: Any, fields: dict[str, Any], content: str, skeleton: str
) -> dict[str, str]:
    """Save the tokenizer with transformers and return {name: text} of the saved files,
    tokenizer.json among them. AutoTokenizer opens the same tokenizer from these files.

    The effect of the recipe's keyword arguments is saved too. Other files of the original folder or
    hub repository are left out. The tokenizer is saved with the class PreTrainedTokenizerFast if
    this class gives the same tokenizer, otherwise with its own class. PreTrainedTokenizerFast only
    follows tokenizer.json, so transformers 4 and 5 give the same ids. A tokenizer's own class may
    change the ids in one version of transformers and not in the other.

    What PreTrainedTokenizerFast does depends on the added tokens and the settings, and not on the
    other tokens. So the skeleton is saved and opened in place of the tokenizer, which saves 2 s of
    3 s for Qwen 3. If it does not open to the same fields, the whole tokenizer is saved and opened.
    Raises Unusable if neither class opens to the same tokenizer.

    Args:
        tokenizer: the loaded tokenizer.
        fields: the result of `read_fields`; the saved tokenizer must have the same fields.
        content: the text of tokenizer.json.
        skeleton: the text of a tokenizer.json with the same settings and added tokens, and few
            other tokens; empty if the model is not BPE.
    """
    # Any error means that an attempt does not work.
    if skeleton:
        with suppress(Exception):
            files = save_skeleton(tokenizer, fields, skeleton)
            if files:
                return files | {TOKENIZER_JSON: content}
    for convert in (_make_plain, lambda unchanged, _: unchanged):
        with suppress(Exception):
            saved = convert(tokenizer, tokenizer.backend_tokenizer)
            files = _save_once(saved, fields, content)
            if files:
                return files
    raise Unusable(
        "mdsmix stores the files that transformers saves, but those of this tokenizer (class "
        f"{type(tokenizer).__name__}) open as another tokenizer; if the rules of its "
        "tokenizer.json alone are right, write the path of that file as `tokenizer:` in the recipe"
    )


def save_skeleton(tokenizer: Any, fields: dict[str, Any], skeleton: str) -> dict[str, str]:
    """Save the skeleton of a tokenizer as a PreTrainedTokenizerFast, and return {name: text} of the
    saved files. Return {} if these files open to another tokenizer.

    Args:
        tokenizer: the tokenizer, or its skeleton.
        fields: the result of `read_fields`; the saved tokenizer must have the same fields.
        skeleton: the text of the skeleton.
    """
    from tokenizers import Tokenizer as Model

    with without_output():  # as in `_describe_by_skeleton`
        model = Model.from_str(skeleton)
        return _save_once(_make_plain(tokenizer, model), fields, model.to_str())


@contextmanager
def without_output() -> Iterator[None]:
    """Drop what libraries print on stdout in a `with` block, even if they are not in Python."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _save_once(tokenizer: Any, fields: dict[str, Any], content: str) -> dict[str, str]:
    """Save a tokenizer with transformers, and return {name: text} of the saved files. Return {} if
    these files open to another tokenizer.

    Args:
        tokenizer: the tokenizer that is saved.
        fields: the fields that the tokenizer of the saved files must have, except its class.
        content: the text of tokenizer.json, in place of what transformers saves.
    """
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder, legacy_format=False)
        (Path(folder) / TOKENIZER_JSON).write_text(content)
        make_readable(Path(folder))
        saved, _ = load_tokenizer(folder, {"trust_remote_code": False})
        if saved.backend_tokenizer.to_str() != content:
            return {}
        saved_fields = read_fields(saved, saved.get_vocab())
        if saved_fields | {"class_name": fields["class_name"]} != fields:
            return {}
        return read_saved_texts(folder)


def _make_plain(tokenizer: Any, model: Any) -> Any:
    """Return a tokenizer as a PreTrainedTokenizerFast.

    Args:
        tokenizer: the tokenizer, with all settings but those of `model`.
        model: the `tokenizers.Tokenizer` that the result uses.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        chat_template=tokenizer.chat_template,
        padding_side=tokenizer.padding_side,
        model_max_length=tokenizer.model_max_length,
        **_read_special_tokens(tokenizer),
    )


def _read_special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer's special tokens as arguments of PreTrainedTokenizerFast.

    Tokens with a name that only some models have, such as `image_token`, are passed in a separate
    argument. transformers 5 has another name for that argument than transformers 4.
    """
    # The attribute of an instance also has the names of its own tokens.
    common_names = {"additional_special_tokens", *type(tokenizer).SPECIAL_TOKENS_ATTRIBUTES}
    tokens = dict(tokenizer.special_tokens_map)
    named = {key: tokens.pop(key) for key in tokens.keys() - common_names}
    # In transformers 5 `extra_special_tokens` is the list of tokens without a name. In
    # transformers 4 it is the argument for the named tokens, a dict.
    listed = getattr(tokenizer, "extra_special_tokens", None)
    if isinstance(listed, list):
        return tokens | {"extra_special_tokens": listed, "model_specific_special_tokens": named}
    return tokens | ({"extra_special_tokens": named} if named else {})
