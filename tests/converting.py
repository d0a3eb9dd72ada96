"""Small conversions for tests: a recipe written, run in this process or by the command line, and
its stream read back.

Work units are windows of 16 or 96 MiB; `windows` makes them a few KB, so that a few KB of text are
many units.
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
"As it is outside of tests: one that has set windows may set others."


@dataclass
class Told:
    """A watcher that keeps what it is told."""

    began: list[tuple[str, int]] = field(default_factory=list)
    sizes: int = 0
    tokens: int = 0
    bad: int = 0
    said: list[str] = field(default_factory=list)

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
        self.said.append(sentence)

    on_step = say


class Answer(NamedTuple):
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def write_recipe(folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """A recipe in `folder` that publishes below `folder`/out, reads rows of 16 tokens and allows
    any number of bad records, unless `settings` say otherwise; None leaves a key out.
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
    """A pretraining stream."""
    return {"kind": "pretraining", "source": {"path": _spelled(path), "text": "text"}, **settings}


def pairs(path: object, *fields: str, **settings: Any) -> dict[str, Any]:
    """A finetuning stream, whose source has these fields."""
    named = {name: name for name in fields or ("prompt", "response")}
    return {"kind": "finetuning", "source": {"path": _spelled(path), **named}, **settings}


def chats(path: object, **settings: Any) -> dict[str, Any]:
    return pairs(path, "messages", **settings)


def _spelled(path: object) -> Any:
    return [str(p) for p in path] if isinstance(path, list) else str(path)


def run_recipe(recipe: Path, *overrides: str, **settings: Any) -> list[Outcome]:
    """One worker and a silent watcher unless `settings` say otherwise."""
    watcher = settings.pop("watcher", None) or Told()
    options = Options(**{"workers": 1} | settings)
    return list(convert(open_recipe(recipe, overrides), options, watcher))


def windows(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Work units of `size` uncompressed bytes."""
    own = {"window_bytes": size, "line_window": None}
    monkeypatch.setattr(sources, "plan_units", lambda files, **given: _PLAN(files, **given | own))


def list_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one source is listed in parts, of two names on average."""
    monkeypatch.setattr(publish, "MOST_LISTED", 1)
    monkeypatch.setattr(side_files, "FILES_PER_LIST", 2)


def mdsmix(*arguments: object, together: bool = False) -> Answer:
    """The console script, in this process; `together`: stderr within stdout, as a terminal shows
    them.
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


def done(*arguments: object) -> Answer:
    """The same of a command that does what it is asked for."""
    answer = mdsmix(*arguments)
    assert answer.code == 0, answer.err
    return answer


def refused(answer: Answer, code: int, *words: str) -> None:
    """One sentence on stderr that starts with `error:`, nothing on stdout, no traceback."""
    assert (answer.code, answer.out) == (code, ""), answer
    said = answer.err.splitlines()
    (line,) = [line for line in said if not line.startswith("reading the tokenizer ")]
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


def manifest_of(url: object) -> Manifest:
    manifest = read_manifest(locate(str(url)))
    assert manifest is not None
    return manifest


def samples(url: object) -> list[dict[str, Any]]:
    """Every sample of the stream in this folder, by the shards that its index names, in order."""
    folder = locate(str(url))
    rows = []
    for shard in read_index(folder).shards:
        head = read_first_samples(folder, shard, shard.samples)
        assert len(head) == shard.samples, "the tests' shards are to be below what a head may hold"
        rows += head
    return rows


def tokens(sample: Mapping[str, Any]) -> list[int]:
    """All ids of a sample, in order, in whatever columns."""
    if "turns" in sample:
        return [t for turn in sample["turns"] for t in (*turn["input_ids"], *turn["labels"])]
    names = [name for name in ("tokens", "input_ids", "labels") if name in sample]
    return [int(t) for name in names for t in np.asarray(sample[name])]


def token_rows(url: object) -> list[list[int]]:
    return [tokens(sample) for sample in samples(url)]


def files(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file below."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def lying_at(place: object) -> dict[str, bytes]:
    """The same of a folder or a bucket."""
    folder = locate(str(place))
    return {name: (folder / name).read() for name, _ in folder.list(recursive=True)}


def public(folder: Path) -> dict[str, bytes]:
    """All that a reader may see: not the files of units."""
    return {name: data for name, data in files(folder).items() if ".mdsmix/" not in name}


def times(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def quarantined(folder: Path) -> list[dict[str, Any]]:
    """All records of the stream's quarantine."""
    unpack = zstandard.ZstdDecompressor
    packed = sorted((folder / "quarantine").glob("*.jsonl.zst"))
    texts = (unpack().decompressobj().decompress(path.read_bytes()) for path in packed)
    return [orjson.loads(line) for text in texts for line in text.splitlines()]


def encoder(tokenizer: Path) -> Any:
    """text -> ids, straight from Hugging Face tokenizers: what every stream is compared with."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    model.encode_special_tokens = True
    return lambda text: model.encode(text, add_special_tokens=False).ids


class Web:
    """A recipe with the stream `web` in a folder of its own: its source is written, it is run, and
    what it publishes is read.
    """

    replaced = 0
    "Shards that a second conversion replaced, where a test counts them."

    def __init__(
        self, folder: Path, tokenizer: Path, patch: pytest.MonkeyPatch, out: str = "out"
    ) -> None:
        self.folder, self.tokenizer, self.patch = folder, tokenizer, patch
        self.recipe, self.out = folder / "recipe.yaml", folder / out
        self.train = self.out / "web" / "train"

    def says(self, stream: Mapping[str, Any] | None = None, **settings: Any) -> Web:
        """Writes the recipe. The source is every `*.jsonl` of the folder unless the stream says
        otherwise.
        """
        streams = {"web": stream or documents("*.jsonl")}
        write_recipe(self.folder, self.tokenizer, **{"streams": streams} | settings)
        return self

    def holds(self, records: Iterable[Any], name: str = "a.jsonl") -> Path:
        """Writes a source; a string is a record with this text."""
        return write_jsonl(
            self.folder / name, [{"text": r} if isinstance(r, str) else r for r in records]
        )

    def runs(self, *overrides: str, **options: Any) -> dict[str, Outcome]:
        """What becomes of each stream of the recipe."""
        return {each.stream: each for each in run_recipe(self.recipe, *overrides, **options)}

    def run(self, *overrides: str, **options: Any) -> Outcome:
        return self.runs(*overrides, **options)["web"]

    def convert(self, *arguments: object) -> Answer:
        return mdsmix("convert", self.recipe, *arguments)

    def done(self, *arguments: object) -> Answer:
        return done("convert", self.recipe, *arguments)

    def anew(self, *overrides: str, name: str = "anew") -> Web:
        """The same recipe, published into another folder."""
        other = Web(self.folder, self.tokenizer, self.patch, name)
        run_recipe(self.recipe, *overrides, f"local={other.out}")
        return other

    def windows(self, size: int) -> None:
        windows(self.patch, size)

    def elsewhere(self, name: str) -> Path:
        """From now on as on another machine, which knows the tokenizers and no source: its
        cache.
        """
        known, cache = Path(os.environ["MDSMIX_CACHE"]) / "tokenizers", self.folder / name
        if known.exists():
            shutil.copytree(known, cache / "tokenizers")
        self.patch.setenv("MDSMIX_CACHE", str(cache))
        return cache

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.train)

    @property
    def keys(self) -> list[str]:
        """Of the published units."""
        return [part.key for part in self.manifest.parts]

    @property
    def rows(self) -> list[list[int]]:
        return token_rows(self.train)

    @property
    def bad(self) -> list[dict[str, Any]]:
        return quarantined(self.train)

    @property
    def files(self) -> dict[str, bytes]:
        return files(self.train)

    @property
    def shards(self) -> list[Path]:
        """In the order of the index, of the version that is published."""
        place = find_current(locate(self.train))
        assert place is not None
        return [Path(place.url) / s.stored.basename for s in read_index(place).shards]


def flip(path: Path, at: int = -1) -> None:
    """Damages a file at equal size. A shard of a version shares its bytes on disk with no other
    name then.
    """
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.unlink()
    path.write_bytes(data)


def age(folder: Path, days: float, names: Iterable[str] | None = None) -> None:
    """Makes files as old as if they had been written so long ago."""
    then = time.time() - days * 86_400
    for name in names or files(folder):
        os.utime(folder / name, (then, then))


def is_whole(folder: Path) -> bool:
    """Whether every shard, index and manifest is what it is said to be."""
    return not verify(locate(folder), Told()).faults
