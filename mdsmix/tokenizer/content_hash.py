"""The hash of a tokenizer. Two tokenizers with the same hash give the same ids for every text.

Each version of transformers writes the tokenizer.json of the same tokenizer differently: an empty
TemplateProcessing for no post-processor, `""` for a missing prefix, other offsets. So the hash is
not computed from the file's bytes, but from the settings that decide ids, in one form
(`normalize_model`).

Before transformers 5, mdsmix 0.1 wrote a hash of the bytes into manifests (`hash_bytes`). It is
accepted if the tokenizer that was published with the stream has the same hash by today's rule
(`published.adopt_hash`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import orjson
import xxhash

Json = dict[str, Any]
Ids = Mapping[str, int | None]
"The ids of a tokenizer's special tokens: `bos_id`, `eos_id` and `pad_id`."

_OFFSETS = ("trim_offsets",)
"Settings of a ByteLevel pre-tokenizer that change a token's offset in the text, not its id."
_SAME_AS_NULL = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
'Settings of a model whose empty value (`""`, 0) has the same effect as null.'


def hash_content(tree: Json, ids: Ids) -> str:
    """Return the hash of a tokenizer, 32 hex digits, from its tokenizer.json and special ids."""
    return _hash([normalize_model(tree), dict(ids)])


def hash_bytes(tree: Json, ids: Ids) -> str:
    """Return the hash of earlier versions of mdsmix, which was computed from the JSON as it is."""
    return _hash([tree, dict(ids)])


def _hash(tree: Any) -> str:
    """Return the xxh128 of a value's JSON with sorted keys, as 32 hex digits."""
    return xxhash.xxh128_hexdigest(orjson.dumps(tree, option=orjson.OPT_SORT_KEYS))


def normalize_model(tree: Json) -> Json:
    """Return the settings of a tokenizer.json that decide ids, in one form for all files with the
    same effect.

    The decoder is left out, and so are truncation and padding, which mdsmix switches off.
    """
    return {
        "added_tokens": tree.get("added_tokens") or [],
        "normalizer": _list_steps(tree.get("normalizer"), "normalizers"),
        "pre_tokenizer": [
            _without(step, _OFFSETS if step["type"] == "ByteLevel" else ())
            for step in _list_steps(tree.get("pre_tokenizer"), "pretokenizers")
        ],
        "around": _list_added_ids(_list_steps(tree.get("post_processor"), "processors")),
        "model": _without_idle_settings(tree["model"]),
    }


def _list_steps(component: Json | None, key: str) -> list[Json]:
    """Return the steps of a component, with the steps of nested Sequences in one list; [] for null.

    Args:
        component: a normalizer, pre-tokenizer or post-processor; it may be a Sequence of them.
        key: the key of a Sequence with its list of steps, such as `normalizers`.
    """
    if component is None:
        return []
    if component.get("type") != "Sequence":
        return [component]
    return [step for inner in component[key] for step in _list_steps(inner, key)]


def _list_added_ids(processors: list[Json]) -> list[Any]:
    """Return the ids that each post-processor adds around a text. For one that adds 1 before and 2
    after the text: `[[1], None, [2]]`, where None is the text.

    A ByteLevel post-processor adds none: it only changes offsets. Templates for pairs of texts are
    ignored, since mdsmix never tokenizes a pair. A post-processor of an unknown type is returned
    unchanged.
    """
    rules = list[Any]()
    for processor in processors:
        kind = processor.get("type")
        if kind == "ByteLevel":
            continue
        if kind == "TemplateProcessing":
            rule: Any = _read_template(processor)
        elif kind in ("BertProcessing", "RobertaProcessing"):
            rule = [[processor["cls"][1]], None, [processor["sep"][1]]]
        else:
            rule = processor
        if rule != [None]:  # otherwise it adds nothing to a text
            rules.append(rule)
    return rules


def _read_template(processor: Json) -> list[Any]:
    """Return the pieces of a template for one text: None for the text, ids for a special token."""
    pieces = list[Any]()
    for piece in processor["single"]:
        special = piece.get("SpecialToken")
        if special is None:
            pieces.append(None)
        else:
            pieces.append(processor["special_tokens"][special["id"]]["ids"])
    return pieces


def _without_idle_settings(model: Json) -> Json:
    """Return a model's settings without the empty ones that have the same effect as null."""
    return _without(model, [key for key in _SAME_AS_NULL if not model.get(key)])


def _without(tree: Json, keys: Collection[str]) -> Json:
    """Return a copy of an object without these keys."""
    return {key: value for key, value in tree.items() if key not in keys}
