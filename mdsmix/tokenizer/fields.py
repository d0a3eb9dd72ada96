"""Reads the fields of a tokenizer's description from a tokenizer that transformers has opened."""

from __future__ import annotations

from typing import Any, NamedTuple

from mdsmix.errors import Unusable

PROBES = ("a", "Hello, world!", "one two  three\n", "déjà vu, 東京", "12345")
"Texts that show which tokens a tokenizer adds by itself."


def read_ids(tokenizer: Any, tree: dict[str, Any]) -> dict[str, int]:
    """Return the vocabulary of a tokenizer, with added tokens: token -> id.

    Args:
        tokenizer: the tokenizer.
        tree: the JSON of its tokenizer.json.
    """
    vocabulary = tree["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # that of a Unigram model is a list
        ids: dict[str, int] = tokenizer.get_vocab()
        return ids
    # To get it from the tokenizer takes 0.2 s more for Gemma 3.
    return vocabulary | {token["content"]: token["id"] for token in tree["added_tokens"]}


def read_fields(tokenizer: Any, ids: dict[str, int]) -> dict[str, Any]:
    """Return the fields of `card.Tokenizer` that can be read from a loaded tokenizer.

    Args:
        tokenizer: the tokenizer.
        ids: its vocabulary, with added tokens: token -> id. To get it takes 0.1 s and 50 MB for
            Gemma 3, and so does `len(tokenizer)`.
    """
    added = _find_added_ids(tokenizer)
    largest_id = max(ids.values(), default=-1)
    added_tokens = sorted(tokenizer.added_tokens_decoder.items())
    special = {id: token.content for id, token in added_tokens if token.special}
    template = tokenizer.chat_template
    named_templates = dict(template) if isinstance(template, dict) else {}
    return {
        "class_name": type(tokenizer).__name__,
        # Ids may have gaps, so the largest id may be larger than the number of tokens.
        "vocab_size": max(len(ids), largest_id + 1),
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "pad_id": tokenizer.pad_token_id,
        "padding_side": tokenizer.padding_side,
        "prefix_ids": added.prefix,
        "suffix_ids": added.suffix,
        "special_tokens": list(special.values()),
        "special_ids": list(special),
        "added_tokens": {token.content: id for id, token in added_tokens},
        "chat_template": named_templates.get("default") if named_templates else template,
        "named_templates": named_templates,
        "template_variables": _read_template_variables(tokenizer),
    }


def _read_template_variables(tokenizer: Any) -> dict[str, Any]:
    """Return name -> special token for all special tokens that a chat template may print. The names
    are those of transformers 4, such as bos_token.

    transformers 5 keeps the list `additional_special_tokens` separately, as `extra_special_tokens`.
    """
    variables = dict(tokenizer.special_tokens_map)
    listed = getattr(tokenizer, "extra_special_tokens", None)
    if isinstance(listed, list) and listed:
        variables.setdefault("additional_special_tokens", [str(token) for token in listed])
    return variables


class AddedIds(NamedTuple):
    """The ids that `tokenizer(text)` adds before (prefix) and after (suffix) the ids of the
    text.
    """

    prefix: list[int]
    suffix: list[int]


def _find_added_ids(tokenizer: Any) -> AddedIds:
    """Return the ids that the tokenizer adds before and after each text.

    Raises Unusable if it does not add the same ids to all PROBES, or if it encodes a text
    differently when it is passed as `text_target`.
    """
    added_of_probes = list[AddedIds]()
    for probe in PROBES:
        full = tokenizer(probe, add_special_tokens=True)["input_ids"]
        bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
        if tokenizer(text_target=probe)["input_ids"] != full:
            raise Unusable(
                "it encodes a target text (text_target) differently from an input text, and mdsmix "
                "needs a tokenizer that encodes both alike; name one that does"
            )
        # Find where the text's own ids begin within the ids with special tokens.
        start = 0
        while start < len(full) and full[start : start + len(bare)] != bare:
            start += 1
        added_of_probes.append(AddedIds(full[:start], full[start + len(bare) :]))
    first = added_of_probes[0]
    if any(added != first for added in added_of_probes):
        raise Unusable(
            "the special tokens that it adds before and after a text depend on the text, and "
            "mdsmix needs a tokenizer that adds the same ones to every text; name one that does"
        )
    return first
