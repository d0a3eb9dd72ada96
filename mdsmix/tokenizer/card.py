"""Snapshots of tokenizers and processors: transformers opens each once, in a separate process, and
the answer is kept in the cache.

Opening one takes seconds; later runs read small files. A snapshot's key is a hash of its files,
arguments and version of transformers. A hub name stands for the commit in the local hub cache, so a
change on the hub is not seen before the hub cache has it: the same recipe gives the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson
import xxhash

from mdsmix import schema
from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.messages import Say, suggest_key
from mdsmix.recipe import TokenizerSpec
from mdsmix.storage import is_url, locate
from mdsmix.tokenizer import transformers_process
from mdsmix.tokenizer.transformers_five import MODEL, NEW_CLASS, PLAIN_CLASS

What = Literal["tokenizer", "processor"]
FORMAT = 12
CARD = "card.json"
GENERATION = transformers_process.GENERATION
TOOL_USE = "tool_use"
"The name of the template that transformers takes of several when a conversation has tools."
T = TypeVar("T")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".mds"}
"""Suffixes of files that are left out of a folder's key: weights shape no token and take minutes to
hash.
"""
NEEDED: Mapping[What, str] = {
    "tokenizer": "name a folder with a tokenizer.json, a lone tokenizer.json, or a hub name that this machine can reach",
    "processor": "name a folder with a processor_config.json or preprocessor_config.json and a tokenizer, or a hub name that this machine can reach, where torch and "
    "torchvision are installed",
}


TRAIN_BY_FILE = (
    "to train by the file, name the tokenizer.json itself, or set tokenizer_class in its "
    f"tokenizer_config.json to {PLAIN_CLASS}"
)
"What to do about a class that changes the ids of its tokenizer.json."


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A snapshot of a tokenizer. Ids are those of `AutoTokenizer.from_pretrained(name,
    **kwargs)`.
    """

    name: str
    path: str
    "The snapshot's tokenizer.json."
    hash: str
    """xxh128 of what tokenizer.json says about ids, and of the ids of BOS, EOS and padding. Two
    tokenizers of one hash give the same ids for every text (`tokenizer_hash`).
    """
    class_name: str
    vocab_size: int
    "The largest id plus one, added tokens included."
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    padding_side: str
    prefix_ids: list[int]
    "The ids that `tokenizer(text)` itself adds before those of a text, such as BOS."
    suffix_ids: list[int]
    "The ids that it adds behind."
    special_tokens: list[str]
    "In the order of their ids."
    special_ids: list[int]
    "The id of each special token, ascending."
    chat_template: str | None
    "The template of conversations without tools; of several named templates `default`."
    template_variables: dict[str, Any]
    "bos_token, eos_token, ... as transformers hands them to a chat template."
    named_templates: dict[str, str] = field(default_factory=dict)
    "Name -> chat template of a tokenizer that has several, such as `default` and `tool_use`."
    added_tokens: dict[str, int] = field(default_factory=dict)
    "The tokens that are matched as a whole in any text, special or not -> their ids, ascending."
    stop_ids: list[int] = field(default_factory=list)
    """The ids at which the model stops to generate: those of the recipe's stop_tokens, else the
    eos_token_id of generation_config.json beside the tokenizer. Empty: only EOS is known to stop.
    """
    are_stops_named: bool = False
    "Whether `stop_ids` are the recipe's."
    read_as: str = ""
    "A sentence on how its folder was read, if not by the class that it names."
    class_changes: str = ""
    "A sentence with an example, if its class gives other ids than its tokenizer.json says."
    files: list[str] = field(default_factory=list)
    """Names of the files in the folder of `path` that AutoTokenizer.from_pretrained opens to this
    tokenizer, tokenizer.json among them.
    """

    @property
    def warning(self) -> str:
        """A sentence for the user if its class changes ids; else an empty string."""
        if not self.class_changes:
            return ""
        return (
            f"the tokenizer {self.name}: {self.class_changes}; other programs that read this "
            f"folder may give either: {TRAIN_BY_FILE}"
        )

    @property
    def note(self) -> str:
        """A sentence for the user on how its folder was read; empty if as it says itself."""
        return f"the tokenizer {self.name} was {self.read_as}" if self.read_as else ""

    @property
    def remarks(self) -> list[str]:
        """The warning and the note as lines for the user."""
        remarks = [f"WARNING: {self.warning}"] if self.warning else []
        return [*remarks, self.note] if self.note else remarks

    @property
    def dtype(self) -> str:
        """The smaller of the token dtypes uint16 and int32 that holds every id."""
        return "uint16" if self.vocab_size <= 1 << 16 else "int32"

    @property
    def chat_template_hash(self) -> str | None:
        return _hash_of(self.chat_template) or self.tool_template_hash

    @property
    def tool_template(self) -> str | None:
        """The template of conversations with tools, if the tokenizer has one of its own
        for them.
        """
        return self.named_templates.get(TOOL_USE)

    @property
    def tool_template_hash(self) -> str | None:
        return _hash_of(self.tool_template)


def _hash_of(template: str | None) -> str | None:
    return None if template is None else xxhash.xxh128_hexdigest(template.encode())


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A snapshot of a processor."""

    name: str
    hash: str
    "xxh128 of the class and settings that shape counts and pixels; the tokenizer is not in it."
    class_name: str
    image_token: str
    "The token that the processor expands in a text."
    around: list[str]
    """The text before, and the text behind, that the processor prints around an image. It is
    tokenized together with the text beside it.
    """
    path: str
    "The folder of the snapshot: the processor as transformers saves it."
    files: list[str]
    """Names of the files in that folder, which AutoProcessor.from_pretrained opens to this
    processor.
    """


def open_tokenizer(spec: TokenizerSpec, say: Say | None = None) -> Tokenizer:
    """The snapshot of a tokenizer. Where there is none it is taken now, and `say` is told.
    Unreachable where it cannot be loaded.
    """
    folder = _snapshot("tokenizer", spec.name, spec.kwargs, say)
    tokenizer = _read(Tokenizer, folder, name=spec.name, path=str(folder / MODEL))
    if spec.published_hash:
        tokenizer = replace(tokenizer, hash=spec.published_hash)
    return _with_stops(tokenizer, spec.stop_tokens) if spec.stop_tokens else tokenizer


def _with_stops(tokenizer: Tokenizer, named: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with the stop tokens that the recipe names. RecipeError if it has not
    one of them as a token of its own.
    """
    known = tokenizer.added_tokens
    for token in named:
        if token not in known:
            raise RecipeError(
                f"tokenizer.stop_tokens names {token!r}, and the tokenizer {tokenizer.name} has no such "
                f"token of its own, so no model stops at it: {suggest_key(token, [*known])}"
            )
    ids = [known[token] for token in dict.fromkeys(named)]
    return replace(tokenizer, stop_ids=ids, are_stops_named=True)


@lru_cache(maxsize=8)
def open_processor(name: str, say: Say | None = None) -> Processor:
    """The snapshot of the processor `name`, a folder or hub name. Where there is none it is taken
    now, and `say` is told. Unreachable where it cannot be loaded.
    """
    folder = _snapshot("processor", name, {}, say)
    return _read(Processor, folder, name=name, path=str(folder))


def _read(of: type[T], folder: Path, **said: str) -> T:
    """The card of a snapshot as a Tokenizer or Processor. `said`: fields that replace those of the
    card.
    """
    return schema.parse_mapping(of, json.loads((folder / CARD).read_bytes()) | said, str(folder))


def snapshot_of(digest: str) -> Path:
    """A folder on this machine with the processor of that hash; Unreachable where the cache has
    none.
    """
    if folder := _of_hash(digest, f"processors/*/{CARD}", "fetched/*/*/mdsmix.processor"):
        return folder
    raise Unreachable(
        f"the processor {digest[:8]} is not in this machine's cache: run `mdsmix convert` with its name in the recipe."
    )


def _of_hash(digest: str | None, *patterns: str) -> Path | None:
    """The first folder of the cache whose card has this hash. `patterns`: paths of cards in the
    cache.
    """
    cards = (card for pattern in patterns for card in cache_folder().glob(pattern))
    found = (card.parent for card in cards if json.loads(card.read_bytes()).get("hash") == digest)
    return next(found, None)


def _snapshot(what: What, name: str, kwargs: Mapping[str, Any], say: Say | None) -> Path:
    """The folder of the snapshot, taken now where there is none. Its card is written last: a folder
    with a card is complete.
    """
    # A name such as s3:/bucket/tokenizer is refused, for which a hub would be asked.
    if is_url(name) and name.startswith("s3://"):
        locate(name)
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
    """The snapshot's folder in the cache, named by a hash of the files, the keyword arguments and
    the version of transformers.
    """
    files = [*_files_of(name, str(kwargs.get("revision", "main")))]
    shaping = [FORMAT, name, dict(kwargs), version("transformers"), files]
    digest = xxhash.xxh128_hexdigest(orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS))
    return cache_folder() / f"{what}s" / digest


def _files_of(name: str, revision: str) -> Iterator[tuple[str, str]]:
    """Names and hashes of the files in the folder `name`; for a hub name its revision, and the
    commit that the hub cache has of it.
    """
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
    """A tokenizer or processor as plain data, as transformers describes it. Unreachable where
    transformers cannot load `name`; RecipeError where an argument of `kwargs` would change nothing.
    """
    answer: dict[str, Any]
    if what == "processor":
        answer, error = transformers_process.answered(name, {})
    else:
        done = _look(json.dumps({"name": name, "kwargs": dict(kwargs)}))
        answer, error = {}, done.stderr[-300:]
        if not done.returncode:
            answer, error = json.loads(done.stdout.splitlines()[-1])
    if "wrong" in answer:
        raise RecipeError(answer["wrong"])
    if answer:
        return answer
    why = " ".join(error.split()).partition(". ")[0][:300].rstrip(".")
    if why.startswith("HFValidationError"):
        why = "a hub's names are written NAME or OWNER/NAME"
    lost, cure = "", NEEDED[what]
    # The last is what transformers 4 makes of the list of special tokens that transformers 5 saves.
    signs = (NEW_CLASS, "Tokenizer class", "'list' object has no attribute 'keys'")
    if any(sign in error for sign in signs) and not os.path.exists(name):
        # mdsmix reads such a folder, but does not ask the hub for its files.
        cure = (
            f"this transformers cannot open it from a hub: download it (`hf download {name} --local-dir "
            "FOLDER`) and name that folder, which can be read"
        )
    elif not os.path.exists(name):
        lost = "there is no such folder or file (a recipe's paths are relative to its folder), and no such repository: "
    raise Unreachable(f"the {what} {name} could not be loaded: {lost}{why}: {cure}.")


def _look(asked: str) -> subprocess.CompletedProcess[str]:
    """Runs `transformers_process` in a subprocess, so that this process does not import
    transformers. `asked`: its JSON input.
    """
    command = [sys.executable, "-m", "mdsmix.tokenizer.transformers_process"]
    return subprocess.run(command, input=asked, capture_output=True, text=True)


@cache
def version(package: str) -> str:
    """The version of an installed package. The first call takes 2 ms: it parses the package's
    metadata.
    """
    return metadata.version(package)


@dataclass(frozen=True)
class Decoder:
    """Ids -> text, and the ids of control tokens, which ordinary tokens with the same characters
    are told apart by.
    """

    model: Any
    control: frozenset[int]
    "The ids of the tokenizer's special tokens."

    def text(self, ids: Sequence[int], before: int | None = None) -> str:
        """The text of the ids. `before`: the id in front of them, since many decoders drop the
        space that a text begins with.
        """
        if before is not None:
            head, whole = self._decode([before]), self._decode([before, *ids])
            if whole.startswith(head):
                return whole[len(head) :]
        return self._decode(list(ids))

    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids; an id outside the vocabulary is shown as a number, `[id
        -100]`.
        """
        texts = list[str]()
        for is_known, run in groupby(ids, self._is_known):
            if is_known:
                texts.append(str(self.model.decode([*run], skip_special_tokens=False)))
            else:
                texts += [f"[id {number}]" for number in run]
        return "".join(texts)

    def _is_known(self, number: int) -> bool:
        # The library raises OverflowError for an id that no 32 bits hold, and drops other unknown
        # ids.
        return 0 <= number < 1 << 32 and self.model.id_to_token(number) is not None


def find_decoder(name: str | None, hash: str | None) -> Decoder | None:
    """The decoder of the tokenizer `name`; without a name, that of the cached snapshot with this
    hash, None where there is none.
    """
    if name:
        return decoder_of(open_tokenizer(TokenizerSpec(name=name)))
    folder = _of_hash(hash, f"tokenizers/*/{CARD}")
    if folder is None:
        return None
    return decoder_of(_read(Tokenizer, folder, name="", path=str(folder / MODEL)))


def decoder_of(tokenizer: Tokenizer) -> Decoder:
    """The decoder of an opened tokenizer."""
    return Decoder(_model(tokenizer.path), frozenset(tokenizer.special_ids))


@lru_cache(maxsize=2)
def _model(path: str) -> Any:
    """A tokenizer.json, read once for many streams: a large one takes half a second. A path of the
    cache never changes its content.
    """
    from tokenizers import Tokenizer as Model

    return Model.from_file(path)


Size = tuple[int, int]
"Height and width, after the turn that EXIF asks for."


COUNTS_VERSION = 2
"""Of the rule that counts an image's tokens. 2: an odd image is counted in a batch with another one
too.
"""
_known: dict[str, dict[Size, int | str]] = {}
"Hash of a processor -> what `image_tokens` gave for each size."


def image_tokens(processor: str, sizes: Iterable[Size]) -> dict[Size, int | str]:
    """How many tokens an image of each size becomes by the processor of this hash, or why that
    refuses an image of it. Counts of earlier runs on this machine are read from the cache.
    """
    known, wanted = _known.get(processor, {}), set(sizes)
    path = cache_folder() / "processors" / f"{processor}-{COUNTS_VERSION}.counts"
    if not wanted <= known.keys():
        with suppress(OSError, ValueError):
            known = known | {(h, w): n for h, w, n in orjson.loads(path.read_bytes())}
    if missing := sorted(wanted - known.keys()):
        answers = transformers_process.ask(snapshot_of(processor), {"sizes": missing})
        known = known | dict(zip(missing, answers, strict=True))
        counts = [[*size, n] for size, n in known.items() if isinstance(n, int)]
        with suppress(Unreachable):  # without the file the next run only asks again
            keep_in_cache(path, orjson.dumps(counts))
    _known[processor] = known  # never changed in place, since threads read it
    return {size: known[size] for size in wanted}
