"""The hash of a tokenizer: equal for two tokenizers that give the same ids for every text.

Each version of transformers writes the tokenizer.json of the same tokenizer differently: an empty
TemplateProcessing for no post-processor, `""` for a missing prefix, other offsets. So the hash is
not taken of the file's bytes, but of the settings that decide ids, in one form (`normalize_model`).

Manifests of mdsmix 0.1 before transformers 5 have a hash of the bytes (`hash_bytes`). It is
accepted for streams whose published tokenizer has today's hash (`published.adopt_hash`).
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
    """Return the hash that earlier versions of mdsmix gave: of the JSON as it was written."""
    return _hash([tree, dict(ids)])


def _hash(tree: Any) -> str:
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
    """Return the steps of a component, without Sequences around them; [] for null.

    Args:
        key: that a Sequence lists its steps under.
    """
    if component is None:
        return []
    if component.get("type") != "Sequence":
        return [component]
    return [step for inner in component[key] for step in _list_steps(inner, key)]


def _list_added_ids(processors: list[Json]) -> list[Any]:
    """Return the ids that each post-processor puts around the text, with None for the text: `[[1],
    None, [2]]`.

    A ByteLevel post-processor only changes offsets. Templates for pairs of texts are ignored: they
    are never tokenized together. A post-processor of an unknown type is returned unchanged.
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
        if rule != [None]:
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
    return _without(model, [key for key in _SAME_AS_NULL if not model.get(key)])


def _without(tree: Json, keys: Collection[str]) -> Json:
    return {key: value for key, value in tree.items() if key not in keys}
