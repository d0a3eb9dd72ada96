"""Real text without a download: a corpus and a tokenizer made from the Python standard library.

Module sources and docstrings become documents, "What does X do?" pairs become prompts and
responses, and the functions of a module become chats. The order is shuffled by a fixed seed, so one
Python version always gives the same bytes; two versions give different text, which is why tests
compare runs with each other and never with recorded bytes.

    python -m tests.corpus DIR
"""

import argparse
import ast
import functools
import inspect
import mmap
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import zstandard

SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
EOS, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Record = dict[str, Any]
Pool = tuple[bytes | mmap.mmap, np.ndarray]
"Lines as the insides of JSON strings, one behind the other, and where each starts."


class Described(NamedTuple):
    """A public function or class of one module that says what it does."""

    name: str
    call: str
    docstring: str

    @property
    def summary(self) -> str:
        return self.docstring.split("\n\n")[0]


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
    texts = _once(chain.from_iterable(module.docstrings for module in modules()))
    return islice(({"text": text} for text in texts if "\n" in text), limit)


def questions(limit: int | None = None) -> Iterator[Record]:
    """`{"prompt": "What does shutil.move(...) do?", "response": its docstring}`."""
    return islice(map(_question, _described()), limit)


def chats(limit: int | None = None) -> Iterator[Record]:
    """`{"messages": [...]}`: 1-3 exchanges on its functions, a third with a system message."""
    return islice(chain.from_iterable(map(_module_chats, modules())), limit)


def write_corpus(
    folder: Path,
    documents_n: int = 150,
    docstrings_n: int = 1500,
    questions_n: int = 1500,
    chats_n: int = 600,
    heldout_n: int = 100,
) -> Path:
    """Writes web.jsonl.zst, docs.jsonl, faq.jsonl, chat.jsonl and heldout.jsonl.

    heldout.jsonl shares no record with docs.jsonl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = docstrings()
    _write_jsonl(folder / "heldout.jsonl", islice(texts, heldout_n))
    _write_jsonl(folder / "docs.jsonl", islice(texts, docstrings_n))
    _write_jsonl(folder / "faq.jsonl", questions(questions_n))
    _write_jsonl(folder / "chat.jsonl", chats(chats_n))
    _write_jsonl(folder / "web.jsonl.zst", documents(documents_n))
    return folder


def train_tokenizer(folder: Path, vocab_size: int = 2000, documents_n: int = 100) -> Path:
    """Trains a byte-level BPE on module sources, saved as a folder that `AutoTokenizer` loads.

    It adds nothing of its own to a text, has an eos and a different pad, no bos and no unk, and a
    ChatML template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d["text"] for d in documents(documents_n)), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder)
    return folder


def big_documents(
    path: Path,
    size: int,
    seed: int = 0,
    pool: Pool | None = None,
    lines: tuple[int, int] = (4, 80),
    opens: float = 1 / 3,
) -> Path:
    """Writes at least `size` bytes of JSONL documents at several hundred MB/s, for benchmarks. `lines`: of a passage; `opens`: the share
    of passages that begin a document.

    Each document joins passages cut at random lines of the pool, or of the library's text, so that hardly one in a
    thousand is there twice. The library's words do repeat: a tokenizer's word cache is flattered by it.
    """
    text, starts = pool or _library()
    rng = np.random.default_rng(seed)
    with path.open("wb", buffering=1 << 20) as out:
        while out.tell() < size:
            out.write(b"".join(_passages(text, starts, rng, lines, opens)))
    return path


def _library() -> Pool:
    lines = _escaped_lines()
    return b"".join(lines), np.cumsum([0, *map(len, lines)])


def _passages(
    text: bytes | mmap.mmap,
    starts: np.ndarray,
    rng: np.random.Generator,
    lines: tuple[int, int],
    share: float,
) -> Iterator[bytes]:
    """The documents of 3,000 passages."""
    first = rng.integers(0, len(starts) - lines[1], 3000)
    last = first + rng.integers(*lines, 3000)
    opens = rng.random(3000) < share
    opens[0] = False
    yield b'{"text":"'
    for begin, end, new in zip(
        starts[first].tolist(), starts[last].tolist(), opens.tolist(), strict=True
    ):
        if new:
            yield b'"}\n{"text":"'
        yield text[begin:end]
    yield b'"}\n'


def _escaped_lines() -> list[bytes]:
    """Every line of the library as the inside of a JSON string, its end of line included."""
    return [
        orjson.dumps(line)[1:-1]
        for module in modules()
        for line in module.source.splitlines(keepends=True)
    ]


@functools.cache
def _paths() -> list[Path]:
    """The library's modules in a fixed shuffled order: the first few are already a fair sample."""
    paths = list[Path]()
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = {*folders} - SKIPPED_FOLDERS
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort()
    random.Random(0).shuffle(paths)
    return paths


def modules() -> Iterator[Module]:
    return (module for module in map(_read_module, _paths()) if module)


@functools.cache
def _read_module(path: Path) -> Module | None:
    """None for what is empty, not UTF-8 or not this Python's syntax."""
    try:
        source = path.read_bytes().decode("utf-8")
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    name = _module_name(path)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    texts = [_docstring(node) for node in [tree, *nodes]]
    described = [found for node in tree.body if (found := _describe(name, node))]
    return Module(name, source, list(filter(None, texts)), described) if source.strip() else None


def _module_name(path: Path) -> str:
    relative = path.relative_to(sysconfig.get_path("stdlib")).with_suffix("")
    return ".".join(part for part in relative.parts if part != "__init__")


def _docstring(node: ast.AST) -> str:
    text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
    return inspect.cleandoc(text or "").strip()


_DOCUMENTED = (ast.Module, ast.FunctionDef, ast.ClassDef)


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


def _described() -> Iterator[Described]:
    return chain.from_iterable(module.described for module in modules())


def _question(about: Described) -> Record:
    return {"prompt": f"What does {about.call} do?", "response": about.docstring}


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
        answer = about.call if asks_for_call else about.summary
        messages.append({"role": "user", "content": ask})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Zstandard when the name ends in .zst."""
    lines = b"".join(orjson.dumps(record) + b"\n" for record in records)
    path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else lines)


def _write_tokenizer_config(folder: Path) -> None:
    """What `AutoTokenizer` reads beside tokenizer.json, written without importing transformers."""
    special = {
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [TURN_START, TURN_END],
    }
    added = {str(i): _added(token) for i, token in enumerate([EOS, PAD, TURN_START, TURN_END])}
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    (folder / "special_tokens_map.json").write_bytes(
        orjson.dumps(special, option=orjson.OPT_INDENT_2)
    )


def _added(token: str) -> Record:
    return {
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    write_corpus(folder / "corpus")
    train_tokenizer(folder / "tokenizer")
    for path in sorted(folder.glob("*/*")):
        print(f"{path}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
