"""Small conversions for tests: write a recipe, run it in this process or by the command line, and
read its stream back.

Work units are windows of 16 or 96 MiB. `set_window_size` makes them a few KB, so that a few KB of
text are many units.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import orjson
import pytest
import zstandard

from mdsmix import sources
from mdsmix.cli.main import run
from mdsmix.conversion import publish
from mdsmix.conversion.planning import Options
from mdsmix.conversion.run import Outcome, convert
from mdsmix.kinds import open_recipe
from mdsmix.shards import side_files
from mdsmix.shards.index import read_index
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.published import find_current
from mdsmix.shards.shard_samples import read_first_samples
from mdsmix.shards.verification import verify
from mdsmix.storage import locate

Record = Mapping[str, Any]
_PLAN = sources.plan_units
"The real function, since a test may set the window size twice."


@dataclass
class RecordingWatcher:
    """A watcher that records all events."""

    began: list[tuple[str, int]] = field(default_factory=list)
    "Stream and source bytes of each conversion that began."
    sizes: int = 0
    tokens: int = 0
    bad: int = 0
    messages: list[str] = field(default_factory=list)

    def expect(self, sizes: Mapping[str, int]) -> None:
        assert all(size >= 0 for size in sizes.values())

    def begin(self, stream: str, size: int) -> None:
        self.began.append((stream, size))

    def on_progress(self, size: int, tokens: int) -> None:
        self.sizes += size
        self.tokens += tokens

    def on_bad(self, records: int) -> None:
        self.bad += records

    def say(self, sentence: str) -> None:
        self.messages.append(sentence)

    on_step = say


class Answer(NamedTuple):
    """The output and exit code of a command."""

    code: int
    out: str
    err: str


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def write_recipe(folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """Write a recipe into `folder`. It publishes below `folder`/out, has rows of 16 tokens and
    allows any number of bad records, unless `settings` override this; None leaves a key out.
    """
    tree = {
        "tokenizer": {"name": str(tokenizer)},
        "max_seq_len": 16,
        "max_bad": "100%",
        "local": str(folder / "out"),
    } | settings
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({k: v for k, v in tree.items() if v is not None}))
    return path


def documents(path: object, **settings: Any) -> dict[str, Any]:
    """Return the recipe of a pretraining stream."""
    return {"kind": "pretraining", "source": {"path": _spelled(path), "text": "text"}, **settings}


def pairs(path: object, *fields: str, **settings: Any) -> dict[str, Any]:
    """Return the recipe of a finetuning stream whose source has these fields."""
    named = {name: name for name in fields or ("prompt", "response")}
    return {"kind": "finetuning", "source": {"path": _spelled(path), **named}, **settings}


def chats(path: object, **settings: Any) -> dict[str, Any]:
    return pairs(path, "messages", **settings)


def _spelled(path: object) -> Any:
    return [str(p) for p in path] if isinstance(path, list) else str(path)


def run_recipe(recipe: Path, *overrides: str, **settings: Any) -> list[Outcome]:
    """Convert with one worker and a silent watcher, unless `settings` override them."""
    watcher = settings.pop("watcher", None) or RecordingWatcher()
    options = Options(**{"workers": 1} | settings)
    return list(convert(open_recipe(recipe, overrides), options, watcher))


def set_window_size(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make work units of `size` uncompressed bytes."""
    settings = {"window_bytes": size, "line_window": None}
    monkeypatch.setattr(
        sources, "plan_units", lambda files, **arguments: _PLAN(files, **arguments | settings)
    )


def list_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """List more than one source file in parts, of two names on average."""
    monkeypatch.setattr(publish, "MOST_LISTED", 1)
    monkeypatch.setattr(side_files, "FILES_PER_LIST", 2)


def mdsmix(*arguments: object, together: bool = False) -> Answer:
    """Run the console script in this process.

    Args:
        together: write stderr into stdout, as a terminal shows them.
    """
    out, code = io.StringIO(), None
    err = out if together else io.StringIO()
    argv = mock.patch.object(sys, "argv", ["mdsmix", *map(str, arguments)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run()
        except SystemExit as end:
            code = end.code
    return Answer(int(code or 0), out.getvalue(), "" if together else err.getvalue())


def run_ok(*arguments: object) -> Answer:
    """Run the console script, and assert that it succeeds."""
    answer = mdsmix(*arguments)
    assert answer.code == 0, answer.err
    return answer


def assert_refused(answer: Answer, code: int, *words: str) -> None:
    """Assert one sentence with these words on stderr that starts with `error:`, nothing on stdout,
    and no traceback.
    """
    assert (answer.code, answer.out) == (code, ""), answer
    lines = answer.err.splitlines()
    (line,) = [line for line in lines if not line.startswith("reading the tokenizer ")]
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


def manifest_of(url: object) -> Manifest:
    manifest = read_manifest(locate(str(url)))
    assert manifest is not None
    return manifest


def read_samples(url: object) -> list[dict[str, Any]]:
    """Return all samples of the stream in this folder, from the shards of its index, in order."""
    folder = locate(str(url))
    rows = []
    for shard in read_index(folder).shards:
        head = read_first_samples(folder, shard, shard.samples)
        assert len(head) == shard.samples, "a shard of a test must fit into a head"
        rows += head
    return rows


def tokens(sample: Mapping[str, Any]) -> list[int]:
    """Return all ids of a sample in order, whatever its columns are."""
    if "turns" in sample:
        return [t for turn in sample["turns"] for t in (*turn["input_ids"], *turn["labels"])]
    names = [name for name in ("tokens", "input_ids", "labels") if name in sample]
    return [int(t) for name in names for t in np.asarray(sample[name])]


def read_token_rows(url: object) -> list[list[int]]:
    return [tokens(sample) for sample in read_samples(url)]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return relative path -> content of every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def read_location(url: object) -> dict[str, bytes]:
    """Return relative path -> content of every file below a folder or in a bucket."""
    folder = locate(str(url))
    return {name: (folder / name).read() for name, _ in folder.list(recursive=True)}


def read_public_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a stream that a reader may use: all but those of units."""
    return {name: data for name, data in read_files(folder).items() if ".mdsmix/" not in name}


def read_times(folder: Path) -> dict[str, int]:
    """Return path -> modification time in ns of every file below a folder."""
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def read_quarantined(folder: Path) -> list[dict[str, Any]]:
    """Return all records of the stream's quarantine."""
    records = list[dict[str, Any]]()
    for path in sorted((folder / "quarantine").glob("*.jsonl.zst")):
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        lines = decompressor.decompress(path.read_bytes()).splitlines()
        records += [orjson.loads(line) for line in lines]
    return records


def make_encoder(tokenizer: Path) -> Any:
    """Return a function from a text to its ids, by Hugging Face tokenizers alone. Every stream is
    compared with it.
    """
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    model.encode_special_tokens = True
    return lambda text: model.encode(text, add_special_tokens=False).ids


class Project:
    """A folder with a recipe that has the stream `web`: write its source, convert it, and read the
    published stream.
    """

    replaced = 0
    "Shards that a second conversion replaced, if a test counts them."

    def __init__(
        self, folder: Path, tokenizer: Path, patch: pytest.MonkeyPatch, out: str = "out"
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.patch = patch
        self.recipe = folder / "recipe.yaml"
        self.out = folder / out
        self.train = self.out / "web" / "train"

    def configure(self, stream: Mapping[str, Any] | None = None, **settings: Any) -> Project:
        """Write the recipe. Its source is every `*.jsonl` of the folder, unless the stream has
        another one.
        """
        streams = {"web": stream or documents("*.jsonl")}
        write_recipe(self.folder, self.tokenizer, **{"streams": streams} | settings)
        return self

    def write_source(self, records: Iterable[Any], name: str = "a.jsonl") -> Path:
        """Write a source file. A string is a record with this text."""
        objects = [{"text": item} if isinstance(item, str) else item for item in records]
        return write_jsonl(self.folder / name, objects)

    def run_all(self, *overrides: str, **options: Any) -> dict[str, Outcome]:
        """Convert in this process, and return the outcome of each stream of the recipe."""
        outcomes = run_recipe(self.recipe, *overrides, **options)
        return {outcome.stream: outcome for outcome in outcomes}

    def run(self, *overrides: str, **options: Any) -> Outcome:
        """Convert in this process, and return the outcome of the stream `web`."""
        return self.run_all(*overrides, **options)["web"]

    def convert(self, *arguments: object) -> Answer:
        """Run `mdsmix convert`."""
        return mdsmix("convert", self.recipe, *arguments)

    def convert_ok(self, *arguments: object) -> Answer:
        """Run `mdsmix convert`, and assert that it succeeds."""
        return run_ok("convert", self.recipe, *arguments)

    def convert_into(self, *overrides: str, name: str = "anew") -> Project:
        """Convert the same recipe into another folder, and return the project of that folder."""
        other = Project(self.folder, self.tokenizer, self.patch, name)
        run_recipe(self.recipe, *overrides, f"local={other.out}")
        return other

    def set_window_size(self, size: int) -> None:
        set_window_size(self.patch, size)

    def switch_machine(self, name: str) -> Path:
        """From now on, run as on another machine: with a cache of its own, which has the tokenizers
        but no source. Return the cache folder.
        """
        tokenizers = Path(os.environ["MDSMIX_CACHE"]) / "tokenizers"
        cache = self.folder / name
        if tokenizers.exists():
            shutil.copytree(tokenizers, cache / "tokenizers")
        self.patch.setenv("MDSMIX_CACHE", str(cache))
        return cache

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.train)

    @property
    def keys(self) -> list[str]:
        """The keys of the published units."""
        return [part.key for part in self.manifest.parts]

    @property
    def rows(self) -> list[list[int]]:
        return read_token_rows(self.train)

    @property
    def bad(self) -> list[dict[str, Any]]:
        """The records of the quarantine."""
        return read_quarantined(self.train)

    @property
    def files(self) -> dict[str, bytes]:
        return read_files(self.train)

    @property
    def shards(self) -> list[Path]:
        """The shards of the published version, in the order of its index."""
        folder = find_current(locate(self.train))
        assert folder is not None
        return [Path(folder.url) / shard.stored.basename for shard in read_index(folder).shards]


def flip_byte(path: Path, offset: int = -1) -> None:
    """Damage a file without changing its size. It is written to a new file, since a shard of a
    version is a hard link: the other name keeps the whole bytes.
    """
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x55
    path.unlink()
    path.write_bytes(data)


def set_age(folder: Path, days: float, names: Iterable[str] | None = None) -> None:
    """Set the modification times of files to so many days ago."""
    seconds = time.time() - days * 86_400
    for name in names or read_files(folder):
        os.utime(folder / name, (seconds, seconds))


def is_intact(folder: Path) -> bool:
    """Return whether `verify` finds no fault in a stream."""
    return not verify(locate(folder), RecordingWatcher()).faults
