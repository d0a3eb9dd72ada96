"""Reads a folder's tokenizer.json in a second process, while the first one imports transformers."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from mdsmix.tokenizer.bpe_json import (
    join_pairs,
    keep_their_ids,
    rewrite_bpe_json,
    split_merges,
    write_skeleton,
)
from mdsmix.tokenizer.content_hash import ModelHash, hash_model


class FileFacts(NamedTuple):
    """What is known of a folder's tokenizer.json."""

    file_hash: ModelHash | None = None
    "Its `hash_model`."
    joined: Path | None = None
    "The same file with its merges as strings, to be read in its place; None if they are not pairs."
    vocabulary: Path | None = None
    """Its vocabulary and its merges, as `tokenizers` writes them: two lines of JSON. None if that
    is not sure (`rewrite_bpe_json`).
    """
    skeleton: Path | None = None
    "Its skeleton (`write_skeleton`); None if it has none."


class FileReader:
    """Reads a folder's tokenizer.json in a forked process while this one imports transformers.

    The forked process first writes a skeleton of the file. Then it computes the hash of the file
    and writes its vocabulary. It also writes the file with its merges as strings: for Gemma 3
    transformers needs 180 MB less to read that.
    """

    def __init__(self, path: Path, joined: Path) -> None:
        """Start the process.

        Args:
            path: the tokenizer.json.
            joined: the file with joined merges; written only if the merges of `path` are pairs.
                The other files are next to it.
        """
        self._path = path
        self._joined = joined
        self._skeleton = Path(f"{joined}.skeleton")
        self._vocabulary = Path(f"{joined}.vocabulary")
        self._has_transformers_four = version("transformers").startswith("4.")
        self._facts: FileFacts | None = None
        pipe, writing_end = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                self._write_files(writing_end)
            finally:
                os._exit(0)  # without the exit handlers of its parent
        os.close(writing_end)
        self._answers = os.fdopen(pipe)

    def _write_files(self, pipe: int) -> None:
        """Write the skeleton, the vocabulary and the file with joined merges (forked process).

        Write an empty line into the pipe once the skeleton is written or cannot be made, and the
        hash as JSON once the other files are. At the end print {"file": PATH} for the parent
        process, unless the file cuts or pads text.
        """
        tree = split_merges(orjson.loads(self._path.read_bytes()))
        with suppress(Exception):  # the whole file may be fine
            self._skeleton.write_text(_make_skeleton(tree))
        os.write(pipe, b"\n")
        digest = hash_model(tree)
        with suppress(Exception):
            bpe = rewrite_bpe_json(tree) if self._has_transformers_four else None
            if bpe:
                self._vocabulary.write_bytes(bpe.vocab + b"\n" + bpe.merges)
        file = self._path
        if join_pairs(tree):
            self._joined.write_bytes(orjson.dumps(tree))
            file = self._joined
        os.write(pipe, orjson.dumps([*digest]))
        if not (tree.get("truncation") or tree.get("padding")):
            os.write(1, orjson.dumps({"file": str(file)}) + b"\n")

    def wait_for_skeleton(self) -> Path | None:
        """Return the skeleton once it is written; None if transformers cannot open one in place of
        the file.
        """
        if not self._has_transformers_four:
            return None
        if not self._facts:
            self._answers.readline()
        return self._skeleton if self._skeleton.exists() else None

    def wait(self) -> FileFacts:
        """Return what is known of the file, which is nothing if it is not a tokenizer.json."""
        if self._facts:
            return self._facts
        with self._answers:
            answer = self._answers.read()
        os.waitpid(self._pid, 0)
        self._facts = FileFacts()
        if answer.strip():
            self._facts = FileFacts(
                file_hash=ModelHash(*orjson.loads(answer)),
                joined=self._joined if self._joined.exists() else None,
                vocabulary=self._vocabulary if self._vocabulary.exists() else None,
                skeleton=self._skeleton if self._skeleton.exists() else None,
            )
        return self._facts


def _make_skeleton(tree: dict[str, Any]) -> str:
    """Return the skeleton of a tokenizer.json.

    Raises an error of any class if the file has no BPE model, or gives added tokens other ids.
    """
    added = {token["content"]: token["id"] for token in tree["added_tokens"]}
    vocab = tree["model"]["vocab"]
    if tree["model"]["type"] != "BPE" or not keep_their_ids(tree["added_tokens"], vocab):
        raise ValueError("its skeleton would be another tokenizer")
    # A character that is in no token becomes the tokens of its bytes, or the unknown token.
    of_bytes = (token for token in vocab if token.startswith("<0x"))
    kept_tokens = [*added, *of_bytes, tree["model"].get("unk_token")]
    return write_skeleton(tree, vocab | added, kept_tokens)
