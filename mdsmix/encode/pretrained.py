"""What transformers makes of a tokenizer or of a processor: looked at once, in a process of its own, and kept in the cache.

A look costs seconds; whoever comes later reads small files. A snapshot is keyed by all that shapes it. A hub name is resolved to the
commit in the local hub cache, so what moved on the hub is not seen before the hub cache sees it: the same recipe gives the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson
import xxhash

from mdsmix import typed
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.recipe import TokenizerSpec

What = Literal["tokenizer", "processor"]
FORMAT = 8
CARD, MODEL = "card.json", "tokenizer.json"
T = TypeVar("T")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".mds"}
"Files that are model weights: they shape no token and take minutes to hash."
NEEDED: Mapping[What, str] = {
    "tokenizer": "name a folder with a tokenizer.json, a lone tokenizer.json, or a hub name that this machine can reach",
    "processor": "name a folder with a preprocessor_config.json and a tokenizer, or a hub name that this machine can reach, where torch and "
    "torchvision are installed",
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """What there is to know of one."""

    name: str
    hash: str
    "xxh128 of what shapes its counts and its pixels: class and settings, without the tokenizer."
    class_name: str
    image_token: str
    "What it expands in a text."
    around: list[str]
    "Text that it prints before and after an image, which is tokenized with the text that stands there."
    path: str
    "The folder of the snapshot: the processor as transformers saves it."
    files: list[str]
    "In that folder: what AutoProcessor.from_pretrained opens to this processor."


def open_tokenizer(spec: TokenizerSpec, say: Callable[[str], None] | None = None) -> Tokenizer:
    """The snapshot of a tokenizer, taken now if there is none, and `say` hears of it; Unreachable where it cannot be loaded."""
    folder = _snapshot("tokenizer", spec.name, spec.kwargs, say)
    return _read(Tokenizer, folder, name=spec.name, path=str(folder / MODEL))


@lru_cache(maxsize=8)
def open_processor(name: str, say: Callable[[str], None] | None = None) -> Processor:
    """The processor in a folder, or of a hub's name; looked at now if it never was, which `say` hears. Unreachable where it cannot be."""
    folder = _snapshot("processor", name, {}, say)
    return _read(Processor, folder, name=name, path=str(folder))


def _read(of: type[T], folder: Path, **said: str) -> T:
    """What the card of a snapshot says, and what is said here."""
    return typed.read(of, json.loads((folder / CARD).read_bytes()) | said, str(folder))


def snapshot_of(digest: str) -> Path:
    """A folder of this machine from which the processor of that hash is opened; Unreachable where there is none."""
    if folder := _of_hash(digest, f"processors/*/{CARD}", "fetched/*/*/mdsmix.processor"):
        return folder
    raise Unreachable(
        f"the processor {digest[:8]} is not in this machine's cache: run `mdsmix convert` with its name in the recipe."
    )


def _of_hash(digest: str | None, *patterns: str) -> Path | None:
    """A folder of the cache with a card that says this hash."""
    cards = (card for pattern in patterns for card in cache_folder().glob(pattern))
    found = (card.parent for card in cards if json.loads(card.read_bytes()).get("hash") == digest)
    return next(found, None)


def _snapshot(
    what: What, name: str, kwargs: Mapping[str, Any], say: Callable[[str], None] | None
) -> Path:
    """The folder of the snapshot. Its card is written last and by renaming: a folder with a card is whole."""
    folder = _folder(what, name, kwargs)
    if not (folder / CARD).exists():
        if say:
            say(
                f"looking at the {what} {name} with transformers, once: some seconds, more where a hub sends it"
            )
        answer = ask(what, name, kwargs)
        folder = _folder(what, name, kwargs)  # a hub name has a commit now
        for file, text in answer["files"].items():
            keep_in_cache(folder / file, text.encode())
        keep_in_cache(folder / CARD, json.dumps(answer | {"files": [*answer["files"]]}).encode())
    return folder


def _folder(what: What, name: str, kwargs: Mapping[str, Any]) -> Path:
    """Named by the files, the keyword arguments and the version of transformers that reads them."""
    files = [*_files_of(name, str(kwargs.get("revision", "main")))]
    shaping = [FORMAT, name, dict(kwargs), version("transformers"), files]
    digest = xxhash.xxh128_hexdigest(orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS))
    return cache_folder() / f"{what}s" / digest


def _files_of(name: str, revision: str) -> Iterator[tuple[str, str]]:
    """The hashes of what it is made of: of its folder's files, or of the commit that the hub cache holds of it."""
    path = Path(name)
    if path.exists():
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix not in WEIGHTS:
                yield str(file.relative_to(path)), xxhash.xxh128_hexdigest(file.read_bytes())
        return
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    commit = hub / f"models--{name.replace('/', '--')}" / "refs" / revision
    yield revision, commit.read_text() if commit.is_file() else ""


def ask(what: What, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers says of it as plain data; Unreachable where it cannot be loaded, RecipeError where arguments change nothing."""
    done = _look(json.dumps({"what": what, "name": name, "kwargs": dict(kwargs)}))
    lines = done.stdout.splitlines() or ["{}"]
    answer: dict[str, Any] = json.loads(lines[-1]) if done.returncode == 0 else {}
    if "wrong" in answer:
        raise RecipeError(answer["wrong"])
    if "files" in answer:
        return answer
    error = str(answer.get("error", done.stderr[-300:]))
    why = " ".join(error.split()).partition(". ")[0][:300].rstrip(".")
    lost = "there is no such folder or file (a recipe's paths are relative to its folder), and no such repository: "
    lost = "" if os.path.exists(name) else lost
    raise Unreachable(f"the {what} {name} could not be loaded: {lost}{why}: {NEEDED[what]}.")


def _look(asked: str) -> subprocess.CompletedProcess[str]:
    """The answer of a subprocess, since transformers stays imported in whoever imports it."""
    command = [sys.executable, "-m", "mdsmix.encode.transformers_process"]
    return subprocess.run(command, input=asked, capture_output=True, text=True)


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
    folder = _of_hash(hash, f"tokenizers/*/{CARD}")
    if folder is None:
        return None
    return decoder_of(_read(Tokenizer, folder, name="", path=str(folder / MODEL)))


def decoder_of(tokenizer: Tokenizer) -> Decoder:
    """Of a tokenizer that was opened."""
    return _decoder(tokenizer.path, frozenset(tokenizer.special_ids))


@lru_cache(maxsize=2)
def _decoder(path: str, control: frozenset[int]) -> Decoder:
    """Read once for many streams: a large tokenizer takes half a second. The file is of the cache, named by what is in it."""
    from tokenizers import Tokenizer as Model

    return Decoder(Model.from_file(path), control)
