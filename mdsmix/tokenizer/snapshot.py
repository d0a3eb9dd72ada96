"""Makes and reads snapshots of tokenizers and processors. transformers opens each tokenizer or
processor once, in a separate process. The snapshot is the description and the files that this
process returns, kept in the cache.

Making a snapshot takes seconds; later runs only read small files. The snapshot's folder is named by
a hash of the original files, the recipe's arguments and the version of transformers. For a hub name
the commit in the local hub cache is hashed: a change on the hub is only seen once the hub cache has
it, so the same recipe gives the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, Literal, NamedTuple, Protocol, TypeVar

import orjson
import xxhash

from mdsmix import schema
from mdsmix.cache import cache_folder, is_in_cache, keep_in_cache
from mdsmix.errors import UNUSABLE, RecipeError, Unreachable
from mdsmix.interrupts import delay_signals
from mdsmix.messages import Say
from mdsmix.processor import server
from mdsmix.storage import find_store, is_url, locate
from mdsmix.storage.lfs import POINTER_START, describe_pointer
from mdsmix.tokenizer.bpe_json import JOINED, join_merges
from mdsmix.tokenizer.transformers_five import NEW_CLASS, TOKENIZER_JSON

Pretrained = Literal["tokenizer", "processor"]
FORMAT = 16
"Version of the card. It is raised when all snapshots must be made again."
CARD = "card.json"
"The file in a snapshot with the description of the tokenizer or processor."
SIZES = "sizes"
"The key of a card with the name and size of each other file of the snapshot, in bytes."
Card = TypeVar("Card")
WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".mds"),
}
"""Suffixes of files that do not enter the hash of a folder: weights do not change any token, and
take minutes to hash.
"""
NEEDED_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "tokenizer.model", "tekken.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files of which the folder of a tokenizer or processor has at least one. Other folders are refused
before all their files are hashed, which takes a minute for a large /tmp.
"""
FIX: Mapping[Pretrained, str] = {
    "tokenizer": "name a folder with a tokenizer.json, a single tokenizer.json, or a hub name "
    "that this machine can reach",
    "processor": "name a folder with a processor_config.json or preprocessor_config.json and a "
    "tokenizer, or a hub name that this machine can reach; torch and torchvision must be installed",
}
"What the user can do if a tokenizer or processor cannot be loaded; the end of a message."
OTHER_VOCABULARIES = {
    "tekken.json": "transformers 5 with the package mistral-common",
    "tokenizer.model": (
        "transformers with the packages sentencepiece and protobuf, or with tiktoken if the file "
        "is tiktoken's, as Llama 3's"
    ),
}
"File with a vocabulary -> what reads it if the folder has no tokenizer.json."
NO_HUB = "couldn't connect to"
"Part of transformers' error if the hub does not answer, or may not be asked."
FRESH_SECONDS = 5
"A file that was written or copied later than so many seconds ago is read each time."
SIGNS_OF_FIVE = (NEW_CLASS, "Tokenizer class", "'list' object has no attribute 'keys'")
"""Strings in the errors of transformers 4 when it cannot open a folder that transformers 5 saved.
The last string is from the error about the list of special tokens.
"""


class EarlyOpener(Protocol):
    """Opens a tokenizer while transformers describes it."""

    def prepare(self) -> None:
        """Import what `begin` needs. This is called while its file is written."""

    def begin(self, file: str) -> None:
        """Begin to open a file that probably gives the same ids as the snapshot's tokenizer.json.
        The file may be deleted as soon as the tokenizer is described.
        """

    def adopt_word_form(self, digest: str) -> None:
        """Use the word form that was made of the file, since the file does give the same ids. Do
        nothing if none was made.

        Args:
            digest: the hash of the tokenizer.
        """

    def adopt(self, path: str) -> None:
        """Use what was opened for the snapshot's tokenizer.json, since it does give the same ids.

        Args:
            path: that tokenizer.json.
        """


def open_snapshot(
    pretrained: Pretrained,
    name: str,
    kwargs: Mapping[str, Any],
    say: Say | None,
    opener: EarlyOpener | None = None,
) -> Path:
    """Return the folder of a snapshot: a copy of a tokenizer or processor in the cache, with its
    files and a description of it, card.json. A snapshot that is missing is made now.

    The description is written last, so a folder with a card.json is complete.
    Raises Unreachable if transformers cannot load `name`, or if its folder changes meanwhile.
    Raises RecipeError if an argument of `kwargs` would have no effect.

    Args:
        pretrained: whether `name` is a tokenizer or a processor.
        name: its folder, file or hub name.
        kwargs: the recipe's arguments for transformers.
        say: called with a note for the user before a snapshot is made; None: no note.
        opener: opens the tokenizer while its snapshot is made; None: it is not opened.
    """
    # Raise an error for a malformed URL before transformers asks a hub for it: `is_url` refuses
    # `s3:/bucket`, and `locate` a URL without a bucket.
    if is_url(name) and find_store(name):
        locate(name)
    folder_before = _snapshot_folder(pretrained, name, kwargs)
    if _is_complete(folder_before):
        return folder_before
    if say:
        is_damaged = (folder_before / CARD).exists()
        why = "again, since its copy in the cache is damaged" if is_damaged else "once"
        say(
            f"reading the {pretrained} {name} with transformers, {why}: a few seconds, longer if "
            "it is downloaded"
        )
    begun = _begun.pop(folder_before, None)
    description = ask_transformers(pretrained, name, kwargs, opener, begun)
    is_as_file = description.pop("is_as_file", False)
    # transformers may have downloaded the files of a hub name, so their commit is known now.
    folder = _snapshot_folder(pretrained, name, kwargs)
    if os.path.exists(name) and folder != folder_before:
        raise Unreachable(
            f"the {pretrained} {name} was changed while transformers read it: run the same command "
            "again."
        )
    digest = description["hash"]
    _write_snapshot(folder, description)
    del description  # the texts of its files take 70 MB for Gemma 3
    if opener and is_as_file:
        # A large word form is opened while the conversion is prepared.
        opener.adopt_word_form(digest)
        opener.adopt(str(folder / TOKENIZER_JSON))
    return folder


def _write_snapshot(folder: Path, description: Mapping[str, Any]) -> None:
    """Write the files of a snapshot, its card last: a snapshot with a card is complete.

    Args:
        folder: the snapshot's folder.
        description: what transformers says, with the texts of its files under `files`.
    """
    contents = {file: text.encode() for file, text in description["files"].items()}
    joined = join_merges(contents.get(TOKENIZER_JSON, b""))
    if joined:
        contents[JOINED] = joined
    for file, content in contents.items():
        keep_in_cache(folder / file, content)
    sizes = {file: len(content) for file, content in contents.items()}
    card = {**description, "files": [*description["files"]], SIZES: sizes}
    keep_in_cache(folder / CARD, json.dumps(card).encode())


def begin_description(name: str, kwargs: Mapping[str, Any]) -> None:
    """Start the process that describes a tokenizer, if its snapshot must be made first.
    `open_snapshot` then asks this process, unless the tokenizer's files have changed meanwhile.
    `forget_descriptions` must be called later.

    Nothing is started for a hub name: the process may download it, and a run that finds another
    error downloads nothing.
    Raises OSError if the process cannot be started.

    Args:
        name: the tokenizer's folder, file or hub name.
        kwargs: the recipe's arguments for transformers.
    """
    if not os.path.exists(name):
        return
    folder = _snapshot_folder("tokenizer", name, kwargs)
    if folder in _begun or _is_complete(folder):
        return
    with delay_signals():
        _begun[folder] = _start_describe(_make_question(name, kwargs))


def forget_descriptions() -> None:
    """End the processes that `begin_description` has started and `open_snapshot` has not asked."""
    with delay_signals():
        while _begun:
            _, (process, errors) = _begun.popitem()
            with process, errors:
                process.kill()


def find_cached_snapshot(
    pretrained: Pretrained, name: str, kwargs: Mapping[str, Any]
) -> Path | None:
    """Return the folder of a snapshot, as `open_snapshot` does; None if it must be made first.

    Args:
        pretrained: whether `name` is a tokenizer or a processor.
        name: its folder, file or hub name.
        kwargs: the recipe's arguments for transformers.
    """
    folder = _snapshot_folder(pretrained, name, kwargs)
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    """Return whether the folder of a snapshot has its description, which is written last, and all
    files with the sizes that the description names.
    """
    if not is_in_cache(folder / CARD):
        return False
    card = _read_card(folder / CARD)
    return card is not None and SIZES in card and _has_whole_files(folder, card)


def _has_whole_files(folder: Path, card: dict[str, Any]) -> bool:
    """Return whether all files of a snapshot have the sizes that its card names. Cards of earlier
    versions name none.
    """
    sizes: dict[str, int] = card.get(SIZES, {})
    return all(_has_size(folder / file, size) for file, size in sizes.items())


def _has_size(file: Path, size: int) -> bool:
    """Return whether `file` is a regular file of this size that can be read."""
    return file.is_file() and file.stat().st_size == size and os.access(file, os.R_OK)


def _read_card(file: Path) -> dict[str, Any] | None:
    """Return the JSON object of a card; None if it is damaged or cannot be read."""
    with suppress(OSError, ValueError):
        card = json.loads(file.read_bytes())
        return card if isinstance(card, dict) else None
    return None


def load_card(type_of_card: type[Card], folder: Path, **fields: str) -> Card:
    """Read the card.json of a snapshot (a folder in the cache), which describes a tokenizer or
    processor, and return it as a Tokenizer or Processor.

    Args:
        type_of_card: Tokenizer or Processor.
        folder: the folder of the snapshot.
        fields: values that are added to the stored card or replace its values, such as `path`.
    """
    card = json.loads((folder / CARD).read_bytes()) | fields
    card.pop(SIZES, None)  # cards of earlier versions, and of fetched folders, lack it
    return schema.parse_mapping(type_of_card, card, str(folder))


def find_snapshot(digest: str | None, *patterns: str) -> Path | None:
    """Return the folder in the cache of a tokenizer or processor with this hash: the first whose
    card (the JSON that describes it) has the hash. None if no card has it. Damaged ones are left
    out.

    Args:
        digest: the hash of the tokenizer or processor.
        patterns: glob patterns of cards in the cache, such as `tokenizers/*/card.json`.
    """
    for pattern in patterns:
        for card in cache_folder().glob(pattern):
            content = _read_card(card)
            if content is None or content.get("hash") != digest:
                continue
            if _has_whole_files(card.parent, content):
                return card.parent
    return None


def _snapshot_folder(pretrained: Pretrained, name: str, kwargs: Mapping[str, Any]) -> Path:
    """Return the snapshot's folder in the cache, which need not exist. Its name is a hash of the
    original files, the recipe's arguments and the version of transformers.

    Raises RecipeError if JSON cannot contain the arguments.
    Raises Unreachable if a file cannot be read, or if the folder is not that of a tokenizer or
    processor.

    Args:
        pretrained: whether `name` is a tokenizer or a processor.
        name: its folder, file or hub name.
        kwargs: the recipe's arguments for transformers.
    """
    if os.path.isdir(name):
        _refuse_other_folders(pretrained, name, kwargs)
    try:
        files = [*_hash_files(name, str(kwargs.get("revision", "main")))]
    except OSError as error:
        remedy = (
            "give this user the permission to read its files."
            if isinstance(error, PermissionError)
            else "if its files are changed by another program, run the same command again later."
        )
        raise Unreachable(
            f"the {pretrained} {name} could not be read ({error.filename}: {error.strerror}): "
            f"{remedy}"
        ) from None
    key = [FORMAT, name, dict(kwargs), package_version("transformers"), files]
    try:
        content = orjson.dumps(key, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise RecipeError(
            f"{pretrained}.kwargs cannot be written as JSON ({error}): write texts as keys, and "
            "texts, numbers, true, false, null, lists or keys and values as values."
        ) from None
    digest = xxhash.xxh128_hexdigest(content)
    return cache_folder() / f"{pretrained}s" / digest


def _refuse_other_folders(pretrained: Pretrained, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise Unreachable if a folder has no file that a tokenizer or processor needs.

    Args:
        pretrained: whether `name` should be a tokenizer or a processor.
        name: the folder.
        kwargs: the recipe's arguments for transformers. They may name a subfolder, or another file
            (`gguf_file`).
    """
    folders = (Path(name), Path(name, str(kwargs.get("subfolder") or "")))
    has_file = any((folder / file).is_file() for folder in folders for file in NEEDED_FILES)
    if not has_file and "gguf_file" not in kwargs:
        error = f"the folder has neither a {pretrained}_config.json nor a tokenizer.json"
        raise Unreachable(_load_error(pretrained, name, error))


def _hash_files(name: str, revision: str) -> Iterator[tuple[str, str]]:
    """Yield (name, hash) of each file in a folder, or of a single file. For a hub name, yield one
    pair: (revision, its commit in the hub cache or "" if the cache does not have it).

    Args:
        name: the folder, file or hub name of a tokenizer or processor.
        revision: the recipe's revision, for a hub name.
    """
    path = Path(name)
    if os.path.exists(name):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES:
                yield str(file.relative_to(path)), _hash_file(file)
        return
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    commit = hub / f"models--{name.replace('/', '--')}" / "refs" / revision
    yield revision, commit.read_text() if os.path.isfile(commit) else ""


def _hash_file(file: Path) -> str:
    """Return the hash of a file's content. A command opens its tokenizer three times or more, and
    reads each file once: the tokenizer.json of Gemma 3, of 33 MB, takes 40 ms.
    """
    stat = file.stat()
    # A file of the last seconds may be written again without another time.
    if time.time() - max(stat.st_mtime, stat.st_ctime) < FRESH_SECONDS:
        return xxhash.xxh128_hexdigest(file.read_bytes())
    return _hash_unchanged_file(file, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=256)
def _hash_unchanged_file(file: Path, *stat: int) -> str:
    """Return the hash of a file's content. A file with another `stat` is another argument."""
    return xxhash.xxh128_hexdigest(file.read_bytes())


def ask_transformers(
    pretrained: Pretrained,
    name: str,
    kwargs: Mapping[str, Any],
    opener: EarlyOpener | None,
    begun: _Describing | None = None,
) -> dict[str, Any]:
    """Load a tokenizer or processor with transformers in another process. Return its description:
    the fields of its card, except that `files` is {name: text}. That of a tokenizer also has
    `is_as_file`: whether its folder's tokenizer.json is known to give the same ids.

    Raises Unreachable if transformers cannot load `name`.
    Raises RecipeError if an argument of `kwargs` would have no effect.

    Args:
        pretrained: whether `name` is a tokenizer or a processor.
        name: its folder, file or hub name.
        kwargs: the recipe's arguments for transformers.
        opener: opens the tokenizer meanwhile; None: it is not opened.
        begun: a process that describes the tokenizer already; None: start one.
    """
    description: dict[str, Any]
    if pretrained == "processor":
        description, error = server.try_to_ask(name, {})
    else:
        done = run_describe(_make_question(name, kwargs), opener, begun)
        if done.returncode == 0:
            # The answer is the last line.
            description, error = json.loads(done.stdout.splitlines()[-1])
        else:
            description, error = {}, done.stderr[-300:]
    if "wrong" in description:
        raise RecipeError(description["wrong"])
    if not description:
        raise Unreachable(_load_error(pretrained, name, error))
    return description


def _make_question(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the JSON that `describe.py` reads on stdin."""
    return json.dumps({"name": name, "kwargs": dict(kwargs)})


class _Describing(NamedTuple):
    """A process that runs `describe.py`, and has got its question."""

    process: subprocess.Popen[str]
    errors: IO[str]
    "Its stderr. It is a file, since nobody reads it while the process runs."


_begun: dict[Path, _Describing] = {}
"Folder of a missing snapshot -> the process of `begin_description`, until it is asked."


def _list_command() -> list[str]:
    """Return the command that runs `describe.py`."""
    return [sys.executable, "-m", "mdsmix.tokenizer.describe"]


def run_describe(
    question: str, opener: EarlyOpener | None, begun: _Describing | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `describe.py` in a subprocess, so that this process does not import transformers. Begin
    to open the file that its first line names, if that is not the answer.

    Args:
        question: the JSON for its stdin: {"name": ..., "kwargs": ...}.
        opener: opens the tokenizer meanwhile; None: it is not opened.
        begun: a process that has got this question already; None: start one.
    """
    if begun is None:
        try:
            begun = _start_describe(question)
        except OSError:  # no folder can be written: the process reports it
            return subprocess.run(_list_command(), input=question, capture_output=True, text=True)
    errors = begun.errors
    with begun.process as process, errors:
        try:
            assert process.stdout, "it is a pipe"
            if opener:
                opener.prepare()
            first_line = process.stdout.readline()
            if opener and first_line.startswith("{"):
                with suppress(OSError):  # it is deleted if the description is ready already
                    opener.begin(json.loads(first_line)["file"])
            output = first_line + process.stdout.read()
        except BaseException:  # such as Ctrl-C
            process.kill()
            raise
        process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors.read())


def _start_describe(question: str) -> _Describing:
    """Start `describe.py` in a subprocess, and give it the question.

    Raises OSError if no folder for temporary files can be written.
    """
    from tempfile import TemporaryFile  # 10 ms, and few commands describe a tokenizer

    errors = TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(_list_command(), stdin=PIPE, stdout=PIPE, stderr=errors, text=True)
    assert process.stdin, "it is a pipe"
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(question)
    return _Describing(process, errors)


def _load_error(pretrained: Pretrained, name: str, error: str) -> str:
    """Return the message for a tokenizer or processor that transformers could not load, or that
    mdsmix cannot use.

    Args:
        pretrained: whether `name` is a tokenizer or a processor.
        name: its folder, file or hub name.
        error: the error of transformers, or an Unusable, with its class.
    """
    if error.startswith(UNUSABLE):
        reason = error.removeprefix(UNUSABLE)
        return f"the {pretrained} {name} cannot be used: {reason}."
    first_sentence, _, _ = " ".join(error.split()).partition(". ")
    reason = first_sentence[:300].rstrip(".")
    if reason.startswith("HFValidationError"):
        reason = "a hub name is written NAME or OWNER/NAME"
    fix = FIX[pretrained]
    needs_reader = False
    if pretrained == "tokenizer" and not os.path.exists(os.path.join(name, TOKENIZER_JSON)):
        for file, reader in OTHER_VOCABULARIES.items():
            if os.path.exists(os.path.join(name, file)):
                needs_reader = True
                fix = f"its {file} is read by {reader}; install these, or {fix}"
    if error.startswith("ImportError") and not needs_reader:
        return (
            f"the {pretrained} {name} could not be loaded, because transformers does not run with "
            f"the installed packages ({reason}): install the package or version that it requires."
        )
    if os.path.exists(name):
        for path in filter(Path.is_file, [Path(name), *Path(name).glob("*")]):
            with path.open("rb") as stored:
                pointer = describe_pointer(stored.read(len(POINTER_START)))
            if pointer:
                return f"the {pretrained} {name} could not be loaded: {path.name} {pointer}."
        return f"the {pretrained} {name} could not be loaded ({reason}): {fix}."
    if any(sign in error for sign in SIGNS_OF_FIVE):
        # mdsmix reads such a folder, but does not ask the hub for its files.
        return (
            f"the {pretrained} {name} could not be loaded: this version of transformers cannot "
            f"open it from a hub ({reason}), but mdsmix can read it from a folder; download it "
            f"(`hf download {name} --local-dir FOLDER`) and name that folder in the recipe."
        )
    hub = f"and no repository on a hub ({reason})"
    fix = "To correct the recipe,"
    if NO_HUB in error:
        obstacle, remedy = _find_hub_obstacle()
        hub = f"it is not in this machine's cache of the hub, and {obstacle}"
        fix = f"{remedy}, or"
    return (
        f"the {pretrained} {name} was not found: there is no folder or file of this name (paths in "
        f"a recipe are relative to the recipe's folder), {hub}. {fix} {FIX[pretrained]}."
    )


def _find_hub_obstacle() -> tuple[str, str]:
    """Return why transformers got no answer from the hub, and what the user can do."""
    from huggingface_hub import constants

    from mdsmix.storage.hub_errors import show_hub_endpoint

    if constants.HF_HUB_OFFLINE:
        variables = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
        return f"the hub is not asked since {variables} is set", "Unset it"
    return f"the hub ({show_hub_endpoint()}) does not answer", "Check the network and HF_ENDPOINT"


@cache
def package_version(package: str) -> str:
    """Return the version of an installed package.

    The name of its folder NAME-VERSION.dist-info has the version. importlib.metadata takes 12 ms to
    import and 2 ms to parse the package's metadata.
    """
    for folder in map(Path, sys.path):
        for info in folder.glob(f"{package}-*.dist-info"):
            return info.name.removesuffix(".dist-info").removeprefix(f"{package}-")
    from importlib import metadata

    return metadata.version(package)
