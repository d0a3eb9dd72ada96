"""Writes the folder of `mdsmix example`: two data files, a tokenizer with a chat template, a
recipe, and the training YAML of a model that a CPU trains in seconds.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.example.library_texts import Record, make_chats, make_documents, read_modules
from mdsmix.frozen import frozen
from mdsmix.kinds.recipe_schema import SCHEMA_FILE, write_schema
from mdsmix.messages import join_names

MODULES = 150
"Modules of the standard library that the texts come from; reading them takes 1.5 s."
VOCABULARY = 2000
BROKEN_LINE = 121
"The line of articles.jsonl that is cut off, counted from 1, to show how a bad record is reported."
BROKEN_LINE_BYTES = 40
EOS = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (EOS, PAD, TURN_START, TURN_END)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RECIPE = "recipe.yaml"
TRAINING_YAML = "foundry.yaml"


@frozen
class WrittenExample:
    """The files of an example."""

    folder: str
    "The folder as the user named it."
    documents: int
    "Lines of articles.jsonl. One of them is broken."
    chats: int
    "Lines of chats.jsonl."

    @property
    def files(self) -> list[str]:
        """The files, each with a phrase on its content."""
        return [
            f"articles.jsonl: {self.documents:,} documents, of which line {BROKEN_LINE} is broken "
            "on purpose",
            f"chats.jsonl: {self.chats:,} conversations",
            f"tokenizer/: {VOCABULARY:,} tokens and a chat template, trained on these files",
            f"{RECIPE}: how the two files become streams, and how they are mixed",
            f"{SCHEMA_FILE}: lets editors check and complete the recipe",
            f"{TRAINING_YAML}: LLM-Foundry's YAML of a model with 2 layers, for a CPU",
        ]

    @property
    def next_commands(self) -> list[str]:
        """The commands that lead from the files to a trained model."""
        recipe = shlex.quote(os.path.join(self.folder, RECIPE))
        training_yaml = shlex.quote(os.path.join(self.folder, TRAINING_YAML))
        return [
            f"mdsmix convert {recipe}",
            f"mdsmix check {recipe}",
            f"mdsmix render-yaml {recipe} --into {training_yaml}",
            f"llmfoundry train {training_yaml}",
        ]


def write_example(folder: str) -> WrittenExample:
    """Write the example into a folder, which is made if it does not exist.

    The text is that of the running Python's standard library, so the same Python version always
    writes the same files.

    Raises:
        RecipeError: the folder is not local, or is not empty.
        Unreachable: the folder cannot be written.
    """
    _require_empty_folder(folder)
    # Collect the texts.
    modules = list(islice(read_modules(), MODULES))
    documents = list(make_documents(modules))
    chats = list(make_chats(modules))
    if len(documents) < BROKEN_LINE or not chats:
        raise Unreachable(
            "the example is made from the docstrings of Python's standard library, and this Python "
            f"has only {len(documents)} of them, because it is installed without its .py files: "
            "use another Python, or begin with `mdsmix init` and files of your own."
        )
    article_lines = _dump_lines(documents)
    article_lines[BROKEN_LINE - 1] = article_lines[BROKEN_LINE - 1][:BROKEN_LINE_BYTES]
    tokenizer = _train_tokenizer(_list_texts(documents, chats))
    # Write the files. If one cannot be written, such as on a full disk, all are deleted, so that
    # the same command can be run again.
    root = Path(folder)
    new_folders = [path for path in (root, *root.parents) if not path.exists()]
    try:
        (root / "tokenizer").mkdir(parents=True)
        (root / "articles.jsonl").write_bytes(b"\n".join([*article_lines, b""]))
        (root / "chats.jsonl").write_bytes(b"\n".join([*_dump_lines(chats), b""]))
        for name, text in _tokenizer_files(tokenizer).items():
            (root / "tokenizer" / name).write_text(text, "utf-8")
        for name in (RECIPE, TRAINING_YAML):
            (root / name).write_bytes(Path(__file__).with_name(name).read_bytes())
        (root / SCHEMA_FILE).write_text(write_schema(), "utf-8")
    except OSError as error:
        _delete_example(root, new_folders)
        raise Unreachable(
            f"cannot write the example into {folder}: {error.strerror or error}; name a folder on "
            "a disk that can be written."
        ) from None
    return WrittenExample(folder, len(documents), len(chats))


def _delete_example(root: Path, new_folders: Iterable[Path]) -> None:
    """Delete what was written of an example.

    Args:
        root: the folder of the example, which was empty or did not exist.
        new_folders: the folders that did not exist, from the innermost on: `root` and its parents.
    """
    with suppress(OSError):
        for path in root.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        for path in new_folders:
            path.rmdir()


def _require_empty_folder(folder: str) -> None:
    """Raise RecipeError if the folder is not local, is a file, or contains anything."""
    path = Path(folder)
    reason = ""
    if "://" in folder:
        reason = "is not a local folder"
    elif path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        if names:
            reason = f"is not empty ({join_names(names)})"
    elif os.path.lexists(path):
        reason = "is a file"
    if reason:
        name = folder or "the working directory"
        raise RecipeError(
            f"{name} {reason}, and the example never overwrites anything: name a local folder that "
            "is empty or does not exist yet."
        )


def _dump_lines(records: Iterable[Record]) -> list[bytes]:
    return [orjson.dumps(record) for record in records]


def _list_texts(documents: Sequence[Record], chats: Sequence[Record]) -> list[str]:
    """Return all texts of the data, for training the tokenizer."""
    texts = [document["text"] for document in documents]
    for chat in chats:
        texts += [message["content"] for message in chat["messages"]]
    return texts


def _train_tokenizer(texts: Iterable[str]) -> Any:
    """Return a byte-level BPE `tokenizers.Tokenizer`, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _tokenizer_files(tokenizer: Any) -> dict[str, str]:
    """Return the files of the tokenizer's folder, by name, as transformers saves them."""
    special = {
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [TURN_START, TURN_END],
    }
    added = {n: {"content": token, "special": True} for n, token in enumerate(SPECIAL_TOKENS)}
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHATML,
    }
    # The tokens that end an answer, so that `check` can see whether they are trained.
    ends = [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(TURN_END)]
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2),
        "special_tokens_map.json": json.dumps(special, indent=2),
        "generation_config.json": json.dumps({"eos_token_id": ends}, indent=2),
    }
