"""The tokenizer as mdsmix uses it: a snapshot on disk, keyed by everything that shapes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson
import xxhash

from mdsmix import typed
from mdsmix.encode.pretrained import cache_folder, snapshot
from mdsmix.errors import RecipeError
from mdsmix.recipe import TokenizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """One snapshot. Ids are those of `AutoTokenizer.from_pretrained(name, **kwargs)`."""

    name: str
    path: str
    "The snapshot's tokenizer.json."
    hash: str
    "xxh128 of all that shapes ids: two tokenizers of one hash give the same ids for every text."
    class_name: str
    vocab_size: int
    "The largest id plus one, added tokens included."
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    padding_side: str
    prefix_ids: list[int]
    "What `tokenizer(text)` itself puts before the ids of a text."
    suffix_ids: list[int]
    "What it puts behind."
    special_tokens: list[str]
    special_ids: list[int]
    "Their ids, ascending, in the order of the tokens."
    chat_template: str | None
    template_variables: dict[str, Any]
    "bos_token, eos_token, ... as transformers hands them to a chat template."
    files: list[str] = field(default_factory=list)
    "In the folder of `path`: what AutoTokenizer.from_pretrained opens to this tokenizer, tokenizer.json among them."

    @property
    def dtype(self) -> str:
        """The smallest of the two token dtypes that holds every id."""
        return "uint16" if self.vocab_size <= 1 << 16 else "int32"

    @property
    def chat_template_hash(self) -> str | None:
        template = self.chat_template
        return None if template is None else xxhash.xxh128_hexdigest(template.encode())


def open_tokenizer(spec: TokenizerSpec, say: Callable[[str], None] | None = None) -> Tokenizer:
    """The snapshot of a tokenizer, taken now if there is none, and `say` hears of it; Unreachable where it cannot be loaded."""
    folder, said = snapshot("tokenizer", spec.name, spec.kwargs, say, _card)
    beside = {"name": spec.name, "path": str(folder / "tokenizer.json")}
    return typed.read(Tokenizer, said | beside, str(folder))


def _card(answer: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an answer; RecipeError where arguments would change nothing."""
    if unread := answer.get("unread"):
        raise RecipeError(
            f"tokenizer.kwargs: {', '.join(unread)} would change nothing, since {answer['class_name']} does not read it: "
            "correct or remove it; a variable of the chat template belongs in tokenizer.template."
        )
    content = answer.pop("tokenizer_json")
    ids = (answer["bos_id"], answer["eos_id"], answer["pad_id"])
    files = answer["files"] | {"tokenizer.json": content}
    return answer | {"hash": content_hash(content.encode(), *ids), "files": files}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Ids -> text, and which ids are control tokens: text may spell the same characters in ordinary tokens."""

    model: Any
    control: frozenset[int]
    "The ids of the tokenizer's special tokens."

    def text(self, ids: Sequence[int], before: int | None = None) -> str:
        """The text of the ids. `before`: the id in front of them, since many decoders drop the space that a text begins with."""
        if before is not None:
            head, whole = self._decode([before]), self._decode([before, *ids])
            if whole.startswith(head):
                return whole[len(head) :]
        return self._decode(list(ids))

    def _decode(self, ids: list[int]) -> str:
        return str(self.model.decode(ids, skip_special_tokens=False))


def find_decoder(name: str | None, hash: str | None) -> Decoder | None:
    """By the tokenizer named, or by the snapshot of that hash; None where this machine has neither."""
    if name:
        return decoder_of(open_tokenizer(TokenizerSpec(name=name)))
    for card in (cache_folder() / "tokenizers").glob("*/card.json"):
        said = json.loads(card.read_bytes())
        if said["hash"] == hash:
            return _decoder(str(card.with_name("tokenizer.json")), frozenset(said["special_ids"]))
    return None


def decoder_of(tokenizer: Tokenizer) -> Decoder:
    """Of a tokenizer that was opened."""
    return _decoder(tokenizer.path, frozenset(tokenizer.special_ids))


@lru_cache(maxsize=2)
def _decoder(path: str, control: frozenset[int]) -> Decoder:
    """Read once for many streams: a large tokenizer takes half a second. The file is of the cache, named by what is in it."""
    from tokenizers import Tokenizer as Model

    return Decoder(Model.from_file(path), control)


def content_hash(content: bytes, bos_id: int | None, eos_id: int | None, pad_id: int | None) -> str:
    """A tokenizer's hash, by the bytes of its tokenizer.json."""
    shaping = [orjson.loads(content), {"bos_id": bos_id, "eos_id": eos_id, "pad_id": pad_id}]
    return xxhash.xxh128_hexdigest(orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS))
