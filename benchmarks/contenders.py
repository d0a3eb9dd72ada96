"""The contenders: the command of every tool, and the function that counts its output.

The fast tools get a corpus large enough that start-up is below 5 % of their time. The slow ones
would need hours for it. They get a smaller corpus, and their start-up, measured on a few records,
is subtracted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import corpus, outputs

ROW = 2048
EOS = "<|endoftext|>"
HERE = Path(__file__).parent
STREAMS = {
    "documents": "{kind: pretraining, source: {path: PATH, text: text}}",
    "words": "{kind: pretraining, source: {path: PATH, text: text}}",
    "parquet": "{kind: pretraining, source: {path: PATH, text: text}}",
    "short": "{kind: pretraining, source: {path: PATH, text: text}}",
    "long": "{kind: pretraining, source: {path: PATH, text: text}}",
    "pairs": "{kind: finetuning, source: {path: PATH, prompt: prompt, response: response}}",
    "chats": "{kind: finetuning, source: {path: PATH, messages: messages}}",
    "compact": "{kind: finetuning, source: {path: PATH, messages: messages}, columns: compact}",
}
Command = Callable[["Setup", Path, Path], Sequence[str | Path]]
"(setup, the source's folder, the output's folder) -> argv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The paths of a benchmark on this machine."""

    work: Path
    foundry: Path
    "The environment with llm-foundry."
    peers: Path
    "The environment with datatrove, litdata and gigatoken."

    @property
    def tokenizer(self) -> Path:
        return self.work / "tokenizer"

    @property
    def mdsmix(self) -> Path:
        return Path(sys.executable).with_name("mdsmix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A tool with one set of options."""

    name: str
    kind: str
    "The corpus, a key of STREAMS. Only contenders with the same corpus are compared."
    command: Command
    count: Callable[[Path], int]
    "Counts the tokens in its output."
    is_fast: bool = False
    enlarged: int = 1
    "The factor of a slow tool's corpus: start-up must not take most of its time."
    may_lose: int = 0
    "The number of tokens that may be missing: less than a row for each of its writers."
    holds: str = "equal"
    "The contents of its output, compared with ours."
    reads: Callable[[Path, Path], Path] = corpus.as_they_are
    "(work folder, folder of JSONL) -> the folder of the files that it reads."
    environment: str = ""
    "The field of Setup with its environment; empty: that of mdsmix."

    def is_here(self, setup: Setup) -> bool:
        return not self.environment or (getattr(setup, self.environment) / "bin/python").exists()


def contenders() -> list[Contender]:
    return [
        _mdsmix("documents", 1),
        _mdsmix("documents", 2),
        _ceiling("documents"),
        _script(
            "gigatoken", outputs.ids_of_two_bytes, "gigatoken, whole file in memory", fast=True
        ),
        _tokenizers(),
        _script("datatrove", outputs.ids_of_two_bytes, "datatrove, 2 workers", "2"),
        # In 11 s on 29 MB of documents, 9 s were start-up.
        replace(
            _script("litdata", outputs.litdata, "litdata optimize, 2 workers", "2", str(ROW)),
            enlarged=4,
        ),
        _foundry_json(),
        _foundry_text(),
        _mdsmix("words", 1),
        _mdsmix("words", 2),
        replace(_mdsmix("parquet", 2), kind="words", reads=corpus.parquet),
        _ceiling("words"),
        # A goal depends on it. On 27 MB the start-up is 10 of 24 s, on 102 MB a sixth.
        replace(_foundry_json(), kind="words", enlarged=4),
        _mdsmix("short", 2),
        _ceiling("short"),
        replace(_foundry_json(), kind="short"),
        _mdsmix("long", 2),
        _ceiling("long"),
        replace(_foundry_json(), kind="long"),
        _mdsmix("pairs", 1),
        _mdsmix("pairs", 2),
        _foundry_finetuning("pairs"),
        _mdsmix("chats", 1),
        _mdsmix("chats", 2),
        _mdsmix("compact", 2),
        _foundry_finetuning("chats"),
    ]


def _mdsmix(stream: str, workers: int) -> Contender:
    def command(setup: Setup, source: Path, output: Path) -> Sequence[str | Path]:
        recipe = write_recipe(setup, {stream: source}, output)
        return [setup.mdsmix, "convert", recipe, "--workers", str(workers)]

    how = {"compact": "compact columns, ", "parquet": "parquet, "}.get(stream, "")
    processes = "1 process" if workers == 1 else f"{workers} processes"
    return Contender(
        name=f"mdsmix, {how}{processes}",
        kind="chats" if stream == "compact" else stream,
        command=command,
        count=outputs.mdsmix,
        is_fast=True,
    )


def write_recipe(setup: Setup, sources: Mapping[str, Path | str], output: Path) -> Path:
    """Write a recipe with a stream for each entry, next to the output's folder. Return its path."""
    files = {n: f"{p}/*.{'parquet' if n == 'parquet' else 'jsonl'}" for n, p in sources.items()}
    streams = [f"  {n}: {STREAMS[n].replace('PATH', path)}" for n, path in files.items()]
    settings = [
        f"tokenizer: {setup.tokenizer}",
        f"max_seq_len: {ROW}",
        f"local: {output}",
        "streams:",
    ]
    recipe = output.with_suffix(".yaml")
    recipe.write_text("\n".join([*settings, *streams]) + "\n")
    return recipe


def _ceiling(kind: str) -> Contender:
    return Contender(
        name="the ceiling, tokenizer on 2 threads",
        kind=kind,
        command=lambda setup, source, output: [
            *(sys.executable, HERE / "ceiling.py", source / "0.jsonl"),
            *(setup.tokenizer / "tokenizer.json", output, str(ROW)),
        ],
        count=outputs.mds_rows,
        is_fast=True,
        may_lose=ROW,
    )


def _tokenizers() -> Contender:
    return Contender(
        name="tokenizers.encode_batch_fast, 2 threads",
        kind="documents",
        command=lambda setup, source, output: [
            *(sys.executable, HERE / "others/run_tokenizers.py", source, setup.tokenizer, output)
        ],
        count=lambda output: int((output / "tokens").read_text()),
        holds="nothing is written",
    )


def _script(
    tool: str, count: Callable[[Path], int], name: str, *arguments: str, fast: bool = False
) -> Contender:
    def command(setup: Setup, source: Path, output: Path) -> Sequence[str | Path]:
        python = setup.peers / "bin/python"
        script = HERE / f"others/run_{tool}.py"
        return [python, script, source, setup.tokenizer, output, *arguments]

    return Contender(
        name=name,
        kind="documents",
        command=command,
        count=count,
        is_fast=fast,
        holds="flat files, not MDS",
        environment="peers",
    )


def _foundry_json() -> Contender:
    return _foundry(
        "convert_dataset_json",
        lambda setup, source, output: [
            *("--path", source, "--out-root", output, "--tokenizer", setup.tokenizer),
            *("--concat-tokens", str(ROW), "--eos-text", EOS, "--compression", ""),
        ],
    )


def _foundry_text() -> Contender:
    return _foundry(
        "convert_text_to_mds",
        lambda setup, source, output: [
            *("--input-folder", source, "--output-folder", output, "--tokenizer", setup.tokenizer),
            *("--concat-tokens", str(ROW), "--eos-text", EOS, "--compression", ""),
            *("--processes", "2"),
        ],
        writers=2,
    )


def _foundry(tool: str, arguments: Command, writers: int = 1) -> Contender:
    def command(setup: Setup, source: Path, output: Path) -> Sequence[str | Path]:
        return [*_data_prep(setup, tool), *arguments(setup, source, output)]

    return Contender(
        name=f"Foundry {tool}" + (f", {writers} processes" if writers > 1 else ""),
        kind="documents",
        command=command,
        count=outputs.mds_rows,
        may_lose=ROW * writers,
        reads=corpus.texts if tool == "convert_text_to_mds" else corpus.as_they_are,
        environment="foundry",
    )


def _foundry_finetuning(kind: str) -> Contender:
    def command(setup: Setup, source: Path, output: Path) -> Sequence[str | Path]:
        return [
            *_data_prep(setup, "convert_finetuning_dataset"),
            *("--dataset", "json", "--splits", "train", "--data-files", source / "0.jsonl"),
            *("--skip-preprocessing", "--out-root", output, "--tokenizer", setup.tokenizer),
            *("--max-seq-len", str(ROW)),
        ]

    return Contender(
        name="Foundry convert_finetuning_dataset",
        kind=kind,
        command=command,
        count=outputs.mds_turns,
        environment="foundry",
    )


def _data_prep(setup: Setup, tool: str) -> list[str | Path]:
    return [setup.foundry / "bin/llmfoundry", "data_prep", tool]
