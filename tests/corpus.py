"""Real text without a download: a corpus and a tokenizer made from the Python standard library.

Module sources and docstrings become documents, "What does X do?" pairs become prompts and
responses, and the functions of a module become chats. The order is shuffled by a fixed seed, so one
Python version always gives the same bytes; two versions give different text, which is why tests
compare runs with each other and never with recorded bytes.

    python -m tests.corpus DIR
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

STDLIB = sysconfig.get_path("stdlib")
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
EOS, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [EOS, PAD, TURN_START, TURN_END]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Record = dict[str, Any]


class Described(NamedTuple):
    """A public function or class of one module that says what it does."""

    name: str
    call: str
    docstring: str


class Module(NamedTuple):
    name: str
    source: str
    docstrings: list[str]
    described: list[Described]


def documents(limit: int | None = None) -> Iterator[Record]:
    """Module sources as `{"text": source}`, about 10 KB each at the median and up to 400 KB."""
    return islice(({"text": module.source} for module in modules()), limit)


def docstrings(limit: int | None = None) -> Iterator[Record]:
    """Docstrings of two lines or more as `{"text": docstring}`, a few hundred bytes, each once."""
    texts = (text for module in modules() for text in module.docstrings if "\n" in text)
    return islice(({"text": text} for text in _once(texts)), limit)


def questions() -> Iterator[Record]:
    """`{"prompt": "What does shutil.move(...) do?", "response": its docstring}`."""
    for about in (about for module in modules() for about in module.described):
        yield {"prompt": f"What does {about.call} do?", "response": about.docstring}


def chats() -> Iterator[Record]:
    """`{"messages": [...]}`: 1-3 exchanges on its functions, a third with a system message."""
    return chain.from_iterable(map(_module_chats, modules()))


def write_corpus(folder: Path, counts: Sequence[int] = (150, 1500, 1500, 600, 100)) -> Path:
    """Writes web.jsonl.zst, docs.jsonl, faq.jsonl, chat.jsonl and heldout.jsonl, of so many
    records.

    heldout.jsonl comes first in `docstrings`, so that it shares no record with docs.jsonl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    web, docs, faq, chat, heldout = counts
    texts = docstrings()
    for name, records, count in (
        *(("heldout.jsonl", texts, heldout), ("docs.jsonl", texts, docs)),
        *(("faq.jsonl", questions(), faq), ("chat.jsonl", chats(), chat)),
        ("web.jsonl.zst", documents(), web),
    ):
        lines = b"".join(orjson.dumps(record) + b"\n" for record in islice(records, count))
        (folder / name).write_bytes(zstandard.compress(lines) if name.endswith("zst") else lines)
    return folder


def train_tokenizer(folder: Path, vocab_size: int = 2000, documents_n: int = 100) -> Path:
    """Trains a byte-level BPE on module sources, saved as a folder that `AutoTokenizer` loads.

    It adds nothing of its own to a text, has an eos and a different pad, no bos and no unk, and a
    ChatML template.
    """
    tokenizer = train_bpe((d["text"] for d in documents(documents_n)), vocab_size, SPECIALS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, SPECIALS, eos_token=EOS, pad_token=PAD, chat_template=CHATML)
    return folder


def train_bpe(texts: Iterable[str], vocab_size: int, specials: list[str], split: Any = None) -> Any:
    """A byte-level BPE, or one of words as `split` gives them, a pair of pre-tokenizer and
    decoder.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made, split_bytes = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer, made.decoder = split or (split_bytes, decoders.ByteLevel())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


@functools.cache
def _paths() -> list[Path]:
    """The library's modules in a fixed shuffled order: the first few are already a fair sample."""
    paths = list[Path]()
    for folder, folders, names in os.walk(STDLIB):
        folders[:] = {*folders} - SKIPPED_FOLDERS
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort()
    random.Random(0).shuffle(paths)
    return paths


def modules() -> Iterator[Module]:
    return filter(None, map(_read_module, _paths()))


@functools.cache
def _read_module(path: Path) -> Module | None:
    """None for what is empty, not UTF-8 or not this Python's syntax."""
    try:
        source = path.read_bytes().decode("utf-8")
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    parts = path.relative_to(STDLIB).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    texts = [_docstring(node) for node in [tree, *nodes]]
    described = [found for node in tree.body if (found := _describe(name, node))]
    return Module(name, source, list(filter(None, texts)), described) if source.strip() else None


def _docstring(node: Any) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "").strip()


def _describe(module: str, node: ast.stmt) -> Described | None:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return None
    arguments = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else "..."
    name, text = f"{module}.{node.name}", _docstring(node)
    return Described(name, f"{name}({arguments})", text) if text else None


def _once(texts: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def _module_chats(module: Module) -> Iterator[Record]:
    rng = random.Random(module.name)
    left = list(module.described)
    while left:
        exchanges = rng.randint(1, 3)
        taken, left = left[:exchanges], left[exchanges:]
        system = f"You explain Python's {module.name} module." if rng.random() < 1 / 3 else None
        yield {"messages": _messages(taken, system, rng)}


def _messages(taken: Iterable[Described], system: str | None, rng: random.Random) -> list[Record]:
    messages = [{"role": "system", "content": system}] if system else []
    for about in taken:
        asks_for_call = rng.random() < 1 / 4
        ask = f"How is {about.name} called?" if asks_for_call else f"What does {about.name} do?"
        answer = about.call if asks_for_call else about.docstring.split("\n\n")[0]
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages


def write_config(folder: Path, specials: Sequence[str], **settings: Any) -> None:
    """What `AutoTokenizer` reads beside tokenizer.json, written without importing transformers.
    `specials`: by their ids, from 0 on; `settings`: the tokens' parts and the template.
    """
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    named |= {"additional_special_tokens": [TURN_START, TURN_END]}
    added = {n: {"content": token, "special": True} for n, token in enumerate(specials)}
    config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(named))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write_corpus(place / "corpus")
    train_tokenizer(place / "tokenizer")
    for path in sorted(place.glob("*/*")):
        print(f"{path}  {path.stat().st_size:,} bytes")
