"""The hash of a tokenizer: equal for two tokenizers that give the same ids for every text.

transformers hands over a tokenizer.json, and each version writes the same tokenizer in another way:
an empty TemplateProcessing for no post-processor, `""` for a missing prefix, other offsets. So not
its bytes are hashed but what it says about ids, in one form (`normalized`).

Manifests of mdsmix 0.1 before transformers 5 have a hash of the bytes (`bytes_hash`). It is
accepted for streams whose published tokenizer has today's hash (`published.adopt_hash`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import xxhash

Json = dict[str, Any]
Ids = Mapping[str, int | None]
"The ids of a tokenizer's special tokens: `bos_id`, `eos_id` and `pad_id`."

_OFFSETS = ("trim_offsets",)
"Settings of a ByteLevel pre-tokenizer that change where a token lies in the text, not its id."
_SAME_AS_NULL = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
'Settings of a model whose empty value (`""`, 0) does what null does.'


def hash_content(tree: Json, ids: Ids) -> str:
    """Return the hash of a tokenizer, 32 hex digits, from its tokenizer.json and special ids."""
    return _hash([normalize_model(tree), dict(ids)])


def hash_bytes(tree: Json, ids: Ids) -> str:
    """Return the hash that earlier versions of mdsmix gave: of the JSON as it was written."""
    return _hash([tree, dict(ids)])


def _hash(tree: Any) -> str:
    return xxhash.xxh128_hexdigest(orjson.dumps(tree, option=orjson.OPT_SORT_KEYS))


def normalize_model(tree: Json) -> Json:
    """Return what a tokenizer.json says about ids, in one form for all that say the same.

    The decoder is left out, as are truncation and padding, which mdsmix switches off.
    """
    return {
        "added_tokens": tree.get("added_tokens") or [],
        "normalizer": _steps(tree.get("normalizer"), "normalizers"),
        "pre_tokenizer": [
            _without(step, _OFFSETS if step["type"] == "ByteLevel" else ())
            for step in _steps(tree.get("pre_tokenizer"), "pretokenizers")
        ],
        "around": _around(_steps(tree.get("post_processor"), "processors")),
        "model": _model(tree["model"]),
    }


def _steps(component: Json | None, key: str) -> list[Json]:
    """Return the steps of a component, without Sequences around them; [] for null."""
    if component is None:
        return []
    if component.get("type") != "Sequence":
        return [component]
    return [step for part in component[key] for step in _steps(part, key)]


def _around(processors: list[Json]) -> list[Any]:
    """Return how each post-processor puts ids around the text: its ids, `None` for the text.

    A ByteLevel post-processor moves offsets only. Pairs of texts are never tokenized together. What
    is not known is kept as it is.
    """
    rules = list[Any]()
    for processor in processors:
        kind = processor.get("type")
        if kind == "ByteLevel":
            continue
        if kind == "TemplateProcessing":
            rule: Any = _template(processor)
        elif kind in ("BertProcessing", "RobertaProcessing"):
            rule = [[processor["cls"][1]], None, [processor["sep"][1]]]
        else:
            rule = processor
        if rule != [None]:
            rules.append(rule)
    return rules


def _template(processor: Json) -> list[Any]:
    """Return the parts of a text's template: `None` for the text, the ids for a special token."""
    parts = list[Any]()
    for piece in processor["single"]:
        special = piece.get("SpecialToken")
        if special is None:
            parts.append(None)
        else:
            parts.append(processor["special_tokens"][special["id"]]["ids"])
    return parts


def _model(model: Json) -> Json:
    """Return the model without settings that do nothing."""
    return _without(model, [key for key in _SAME_AS_NULL if not model.get(key)])


def _without(tree: Json, keys: Any) -> Json:
    return {key: value for key, value in tree.items() if key not in keys}
