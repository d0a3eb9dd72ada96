"""The tokenizer as mdsmix uses it: a snapshot on disk, keyed by everything that shapes it.

The first use of a tokenizer costs one subprocess with transformers (1-3 s); every later one reads two small files. A
hub name is resolved to the commit in the local hub cache, so a tokenizer that moved on the hub is not seen before the
hub cache sees it: the same recipe gives the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson
import xxhash

from mdsmix import typed
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.recipe import TokenizerSpec

SNAPSHOT_FORMAT = 5
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".mds"}
"Files beside a tokenizer that are model weights: they shape no token and take minutes to hash."
NOT_FOUND = (
    "couldn't connect to",
    "is not a valid model identifier",
    "is not a local folder",
    "RepositoryNotFoundError",
    "LocalEntryNotFoundError",
)
"What transformers and huggingface_hub say of a name that they find nowhere."


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
    folder = cache_folder() / "tokenizers" / _key(spec)
    card = folder / "card.json"
    if not card.exists():
        if say:
            say(
                f"looking at the tokenizer {spec.name} with transformers, once: some seconds, more where a hub sends it"
            )
        answer = _ask(spec)
        folder = cache_folder() / "tokenizers" / _key(spec)  # a hub name has a commit now
        card = folder / "card.json"
        _write(folder, spec, answer)
    beside = {"path": str(folder / "tokenizer.json")}  # not in the card: the cache may be moved
    return typed.read(Tokenizer, json.loads(card.read_bytes()) | beside, str(card))


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


def cache_folder() -> Path:
    """Where disposable state lies: MDSMIX_CACHE, else mdsmix in the user's cache folder."""
    if given := os.environ.get("MDSMIX_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdsmix"


def keep_in_cache(path: Path, content: bytes) -> None:
    """Writes a file of the cache by renaming: one that is there is whole. Unreachable where it cannot be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise Unreachable(
            f"cannot write {path} ({error.strerror}), a part of mdsmix's cache of what it knows of tokenizers and "
            "sources: set MDSMIX_CACHE to a folder that can be written."
        ) from None


@cache
def version(package: str) -> str:
    """Of an installed package: 2 ms the first time, since all that is said of the package is parsed for it."""
    return metadata.version(package)


def _key(spec: TokenizerSpec) -> str:
    """Of the files, the keyword arguments and the version of transformers that reads them."""
    digest = xxhash.xxh128()
    settings = [SNAPSHOT_FORMAT, spec.name, spec.kwargs, version("transformers")]
    digest.update(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS))
    for name, content in files_of(spec):
        digest.update(orjson.dumps([name, len(content)]))
        digest.update(content)
    return digest.hexdigest()


def files_of(spec: TokenizerSpec) -> Iterator[tuple[str, bytes]]:
    """What the tokenizer is made of: its folder's files, or the commit that the hub cache holds of it."""
    path = Path(spec.name)
    if path.is_file():
        yield path.name, path.read_bytes()
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix not in WEIGHTS:
                yield str(file.relative_to(path)), file.read_bytes()
    else:
        hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
        hub = Path(os.environ.get("HF_HUB_CACHE") or hub)
        revision = str(spec.kwargs.get("revision", "main"))
        commit = hub / f"models--{spec.name.replace('/', '--')}" / "refs" / revision
        yield revision, commit.read_bytes() if commit.is_file() else b""


def _ask(spec: TokenizerSpec) -> dict[str, Any]:
    """The snapshot as plain data; Unreachable where there is none."""
    if is_lost(spec.name):
        raise Unreachable(
            f"the tokenizer {spec.name} could not be loaded: there is no such folder or file; correct the path (in a recipe it is "
            "relative to the recipe's folder), or give the name of a hub's repository."
        )
    done = _look(json.dumps({"name": spec.name, "kwargs": dict(spec.kwargs)}))
    lines = done.stdout.strip().splitlines()
    answer = json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr}
    is_elsewhere = any(sign in str(answer.get("error")) for sign in NOT_FOUND)
    if is_elsewhere and not os.path.exists(spec.name):
        raise Unreachable(
            f"the tokenizer {spec.name} could not be loaded: there is no folder or file {spec.name}, and no repository of that name "
            "in this machine's hub cache or at a hub that it can reach; correct the name, or fetch it once where the hub can be "
            "reached."
        )
    if "error" in answer:
        reason = " ".join(str(answer["error"]).split()).partition(". ")[0][:300].rstrip(".")
        raise Unreachable(
            f"the tokenizer {spec.name} could not be loaded ({reason}): name a folder with a "
            "tokenizer.json, a lone tokenizer.json, or a hub name that this machine can reach."
        )
    if unread := answer.get("unread"):
        raise RecipeError(
            f"tokenizer.kwargs: {', '.join(unread)} would change nothing, since {answer['class_name']} does not read it: "
            "correct or remove it; a variable of the chat template belongs in tokenizer.template."
        )
    return dict(answer)


def _look(asked: str) -> subprocess.CompletedProcess[str]:
    """The snapshot from a subprocess, since transformers stays imported in whoever imports it."""
    command = [sys.executable, "-m", "mdsmix.encode.snapshot"]
    return subprocess.run(command, input=asked, capture_output=True, text=True)


def is_lost(name: str) -> bool:
    """Whether it is written as a path, which no name of a repository is, and nothing is there."""
    is_path = (
        name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or name.endswith(".json")
    )
    return is_path and not os.path.exists(name)


def _write(folder: Path, spec: TokenizerSpec, answer: dict[str, Any]) -> None:
    """All files, the card last and by renaming: a card that is there is whole."""
    files = {"tokenizer.json": answer.pop("tokenizer_json"), **answer.pop("files")}
    content = files["tokenizer.json"].encode()
    digest = content_hash(content, answer["bos_id"], answer["eos_id"], answer["pad_id"])
    for name, text in files.items():
        keep_in_cache(folder / name, text.encode())
    card = answer | {"name": spec.name, "hash": digest, "files": sorted(files)}
    keep_in_cache(folder / "card.json", json.dumps(card).encode())


def content_hash(content: bytes, bos_id: int | None, eos_id: int | None, pad_id: int | None) -> str:
    """A tokenizer's hash, by the bytes of its tokenizer.json."""
    shaping = [orjson.loads(content), {"bos_id": bos_id, "eos_id": eos_id, "pad_id": pad_id}]
    return xxhash.xxh128_hexdigest(orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS))
