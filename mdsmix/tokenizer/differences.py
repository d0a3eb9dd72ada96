"""Compares a tokenizer that transformers has opened with the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from mdsmix.tokenizer.bpe_json import split_merges
from mdsmix.tokenizer.content_hash import ModelHash, hash_model
from mdsmix.tokenizer.fields import PROBES
from mdsmix.tokenizer.file_reader import FileFacts
from mdsmix.tokenizer.opening import find_file
from mdsmix.tokenizer.transformers_five import TOKENIZER_CONFIG, TOKENIZER_JSON

EMPTY_MODEL: dict[str, Any] = {"type": "BPE", "vocab": {}, "merges": []}
PARTS_OF_MODEL = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"Keys of a tokenizer.json whose value may be null."
BOS_CLASSES = frozenset({"Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX"})
"""The beginnings of the names of the classes that, under transformers 4, add BOS if the folder's
tokenizer_config.json has `add_bos_token: true`.
"""
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
SENTENCEPIECE_MODEL = "tokenizer.model"
SPACED_PROBES = ("x  y", "x for a in b:\n    c = a   +  1\n", "x one.  Two,    three")
"Texts with several spaces. The first token is `▁x`, or `x` with `add_prefix_space: false`."


def is_bos_ignored(name: str, kwargs: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Return whether the folder's tokenizer_config.json asks for a BOS that transformers 4 adds and
    this tokenizer does not: transformers 5 ignores `add_bos_token` if there is a tokenizer.json.

    Args:
        name: the tokenizer's folder, file or hub name.
        kwargs: the recipe's arguments, which may set `add_bos_token`.
        fields: what `read_fields` returned.
    """
    if "add_bos_token" in kwargs or fields["bos_id"] is None:
        return False
    if fields["bos_id"] in fields["prefix_ids"]:
        return False
    path = find_file(name, TOKENIZER_CONFIG, kwargs)
    if path is None:
        return False
    config = orjson.loads(Path(path).read_bytes())
    class_name = str(config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    return config.get("add_bos_token") is True and class_name in BOS_CLASSES


def describe_class_changes(
    name: str, tokenizer: Any, model_hash: ModelHash, facts: FileFacts, *, is_skeleton: bool = False
) -> str:
    """Return a sentence with an example if the tokenizer's class gives other ids than its
    tokenizer.json. Return "" if the ids are the same or the file is missing.

    Raises ValueError if it depends on ids that the skeleton of a tokenizer does not give.

    Args:
        name: the tokenizer's folder, file or hub name.
        tokenizer: the tokenizer that the class makes of the file.
        model_hash: the `hash_model` of that tokenizer.
        facts: what is known of the file. Its hash is another one.
        is_skeleton: whether `tokenizer` is only the skeleton of the tokenizer of `model_hash`.
    """
    path = find_file(name, TOKENIZER_JSON, {})
    if path is None:
        return ""
    file_hash = facts.file_hash
    if file_hash is None:
        # If a file's settings cannot be compared, the ids of probes decide.
        with suppress(ValueError, KeyError, TypeError):
            if hash_model(split_merges(orjson.loads(Path(path).read_bytes()))) == model_hash:
                return ""
    live_model = tokenizer.backend_tokenizer
    if file_hash is not None and file_hash.text_ids == model_hash.text_ids:
        probes = _add_ids_by_both(live_model, path, is_skeleton=is_skeleton)
    else:
        has_same_model = file_hash is not None and file_hash.model == model_hash.model
        skeleton = facts.skeleton if has_same_model else None
        probes = _encode_by_both(live_model, path, skeleton)
    for probe in probes:
        if probe.class_ids != probe.file_ids:
            return (
                f"its class {type(tokenizer).__name__} gives other ids than its tokenizer.json: "
                f"{probe.text!r} is {probe.class_ids[:8]} by the class and {probe.file_ids[:8]} by "
                "the file"
            )
    return ""


class _Probe(NamedTuple):
    """A text that a tokenizer's class and its tokenizer.json have encoded, with special tokens."""

    text: str
    class_ids: list[int]
    file_ids: list[int]


def _encode_by_both(live_model: Any, path: str, skeleton: Path | None) -> Iterator[_Probe]:
    """Yield the ids of each text of PROBES and RARE_PROBES by the class and by the file.

    Args:
        live_model: the `tokenizers.Tokenizer` of the class.
        path: the tokenizer.json.
        skeleton: the skeleton of the file, if the file has the same model (vocabulary, merges and
            switches) as `live_model`. The file's settings are then opened around that model, which
            saves 1.6 s for Gemma 3.
    """
    from tokenizers import Tokenizer as Model

    if skeleton:
        model_of_file = Model.from_file(str(skeleton))
        model_of_file.model = live_model.model
    else:
        model_of_file = Model.from_str(Path(path).read_bytes().decode())
    model_of_file.no_truncation()
    model_of_file.no_padding()
    for text in (*PROBES, *RARE_PROBES):
        yield _Probe(text, live_model.encode(text).ids, model_of_file.encode(text).ids)


def _add_ids_by_both(live_model: Any, path: str, *, is_skeleton: bool) -> Iterator[_Probe]:
    """Yield the same as `_encode_by_both`, if class and file differ at most in the ids that they
    add around texts. Only the file's post-processor is opened: 0.1 s for Gemma 3, not 0.4.

    Raises ValueError if it depends on ids that the skeleton of a tokenizer does not give.

    Args:
        live_model: the `tokenizers.Tokenizer` of the class.
        path: the tokenizer.json.
        is_skeleton: whether `live_model` is only a skeleton.
    """
    from tokenizers import Tokenizer as Model

    post_processor = orjson.loads(Path(path).read_bytes()).get("post_processor")
    settings = dict.fromkeys(PARTS_OF_MODEL) | {"post_processor": post_processor}
    tree = settings | {"model": EMPTY_MODEL, "added_tokens": []}
    model_of_file = Model.from_str(orjson.dumps(tree).decode())
    model_of_file.no_truncation()
    model_of_file.no_padding()
    for text in (*PROBES, *RARE_PROBES):
        class_ids = live_model.encode(text).ids
        bare = live_model.encode(text, add_special_tokens=False)
        if is_skeleton and (len(text) > 1 or len(bare.ids) > 1):
            raise ValueError("the whole tokenizer may merge these tokens")
        yield _Probe(text, class_ids, model_of_file.post_process(bare).ids)


def describe_model_changes(tokenizer: Any) -> str:
    """Return a sentence with an example if a tokenizer that transformers made of a SentencePiece
    model splits texts in another way than the model. Return "" if it does not, or if the tokenizer
    has another source.

    transformers 5 orders the merges by the ids of their tokens and not by their scores. Mistral's
    `▁▁` has a small id and the lowest score, so two spaces are merged before all else, as in code.
    """
    path = Path(getattr(tokenizer, "vocab_file", None) or "")
    if path.name != SENTENCEPIECE_MODEL or path.with_name(TOKENIZER_JSON).exists():
        return ""
    try:
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(path))
    except Exception:  # it is not installed, or the file is tiktoken's, as Llama 3's of this name
        return ""
    for text in SPACED_PROBES:
        pieces = model.encode(text, out_type=str)
        tokens = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens
        if _drop_first_mark(tokens) != _drop_first_mark(pieces):
            return (
                "this version of transformers makes other tokens of a text than the folder's "
                f"{SENTENCEPIECE_MODEL}: {text!r} is {tokens} by transformers and {pieces} by "
                "SentencePiece"
            )
    return ""


def _drop_first_mark(tokens: Sequence[str]) -> list[str]:
    """Return tokens without the mark of a space before a text, which the user's settings decide."""
    return "\0".join(tokens).removeprefix("▁").split("\0")
