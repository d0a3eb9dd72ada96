"""The hash of a tokenizer. Two tokenizers with the same hash give the same ids for every text.

Versions of transformers write the tokenizer.json of the same tokenizer differently: a missing
post-processor as an empty TemplateProcessing, a missing prefix as `""`, or with other settings of
offsets. So the hash is not computed from the file's bytes. It is computed from the settings that
decide ids, which `normalize_model` brings into one form.

Before transformers 5, mdsmix 0.1 wrote another hash into manifests, of the JSON as it is
(`hash_bytes`). Such a hash is accepted if the tokenizer that was published with the stream has the
right hash by today's rule (`published.adopt_hash`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import orjson
import xxhash

Json = dict[str, Any]
Ids = Mapping[str, int | None]
"The ids of a tokenizer's special tokens: `bos_id`, `eos_id` and `pad_id`."

_OFFSETS = ("trim_offsets",)
"""Settings of a ByteLevel pre-tokenizer that change the offsets of tokens in a text, but not
the ids.
"""
_SAME_AS_NULL = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
'Settings of a model whose empty value (`""`, 0) has the same effect as null.'


def hash_content(tree: Json, ids: Ids) -> str:
    """Return the hash of a tokenizer, 32 hex digits.

    Args:
        tree: the JSON of its tokenizer.json.
        ids: the ids of its special tokens.
    """
    return _hash([normalize_model(tree), dict(ids)])


def hash_bytes(tree: Json, ids: Ids) -> str:
    """Return the hash of a tokenizer as earlier versions of mdsmix computed it: from the JSON of
    its tokenizer.json as it is, and the ids of its special tokens.
    """
    return _hash([tree, dict(ids)])


class ModelHash(NamedTuple):
    """Hashes of the settings of a tokenizer.json that decide ids, 32 hex digits each."""

    text_ids: str
    "The hash of the settings that decide the ids of a text itself."
    added_ids: str
    "The hash of the settings that add ids before and after a text."
    model: str
    "The hash of the model: its vocabulary, merges and switches. It is a part of `text_ids`."


def hash_model(tree: Json) -> ModelHash:
    """Return the hashes of the settings of a tokenizer.json that decide ids. They are compared with
    those of another file, and are not stored.
    """
    settings = normalize_model(tree)
    added_ids = settings.pop("around")
    # Without switches that are off, such as `ignore_merges`: older files lack them. `hash_content`
    # keeps them, since manifests contain its hash.
    model = settings["model"]
    model_hash = _hash({key: value for key, value in model.items() if value is not False})
    settings["model"] = model_hash
    return ModelHash(_hash(settings), _hash(added_ids), model_hash)


def _hash(tree: Any) -> str:
    """Return the xxh128 of a value's JSON with sorted keys, as 32 hex digits."""
    return xxhash.xxh128_hexdigest(orjson.dumps(tree, option=orjson.OPT_SORT_KEYS))


def normalize_model(tree: Json) -> Json:
    """Return the settings of a tokenizer.json that decide ids. Files with the same effect give the
    same result.

    The decoder is left out. Truncation and padding are left out too, since mdsmix switches them
    off.
    """
    return {
        "added_tokens": tree.get("added_tokens") or [],
        "normalizer": _list_steps(tree.get("normalizer"), "normalizers"),
        # Without the settings that change no ids: of offsets, and empty settings that mean null.
        "pre_tokenizer": [
            _without(step, _OFFSETS if step["type"] == "ByteLevel" else ())
            for step in _list_steps(tree.get("pre_tokenizer"), "pretokenizers")
        ],
        "around": _list_added_ids(_list_steps(tree.get("post_processor"), "processors")),
        "model": _without_idle_settings(tree["model"]),
    }


def _list_steps(component: Json | None, key: str) -> list[Json]:
    """Return the steps of a component in one list, including the steps of nested Sequences. Return
    [] if the component is None.

    Args:
        component: a normalizer, pre-tokenizer or post-processor, or a Sequence of several.
        key: the key of a Sequence with its list of steps, such as `normalizers`.
    """
    if component is None:
        return []
    if component.get("type") != "Sequence":
        return [component]
    return [step for inner in component[key] for step in _list_steps(inner, key)]


def _list_added_ids(processors: list[Json]) -> list[Any]:
    """Return what each post-processor adds around a text. If it adds the id 1 before the text and
    the id 2 after it, this is `[[1], None, [2]]`, where None is the text.

    A ByteLevel post-processor is left out, since it only changes offsets. Templates for pairs of
    texts are ignored, since mdsmix never tokenizes a pair. A post-processor of an unknown type is
    returned unchanged.
    """
    rules = list[Any]()
    for processor in processors:
        kind = processor.get("type")
        if kind == "ByteLevel":
            continue
        if kind == "TemplateProcessing":
            rule: Any = _read_template(processor)
        elif kind in ("BertProcessing", "RobertaProcessing"):
            # Both settings are pairs of a token and its id.
            _, cls_id = processor["cls"]
            _, sep_id = processor["sep"]
            rule = [[cls_id], None, [sep_id]]
        else:
            rule = processor
        if rule != [None]:  # otherwise it adds nothing to a text
            rules.append(rule)
    return rules


def _read_template(processor: Json) -> list[Any]:
    """Return a template for one text as a list: None for the text, a list of ids for each special
    token. For BOS with the id 1 in front of the text this is `[[1], None]`.
    """
    pieces = list[Any]()
    for piece in processor["single"]:
        special = piece.get("SpecialToken")
        if special is None:
            pieces.append(None)
        else:
            pieces.append(processor["special_tokens"][special["id"]]["ids"])
    return pieces


def _without_idle_settings(model: Json) -> Json:
    """Return a model's settings without empty settings that have the same effect as null."""
    return _without(model, [key for key in _SAME_AS_NULL if not model.get(key)])


def _without(tree: Json, keys: Collection[str]) -> Json:
    """Return a copy of an object without these keys."""
    return {key: value for key, value in tree.items() if key not in keys}
