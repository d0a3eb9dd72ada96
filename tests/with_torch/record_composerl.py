"""`python -m tests.with_torch.record_composerl PATH` writes composerl_batches.json: batches that
ComposeRL's own dataset and collator make of rows drawn here. PATH is a git checkout of ComposeRL.
test_preferences.py compares them with those of mdsmix.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from streaming import MDSWriter
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.corpus import EOS, train_tokenizer

RECORDED = Path(__file__).with_name("composerl_batches.json")
SOURCE = "compose_rl/data/preference_data.py"
SIDES = ("prompt", "chosen", "rejected")
REWARDS = ("chosen_reward", "rejected_reward")
SIGNS = (4, 6, 7, 8, 9)
"Ids of `!#$%&` in the tests' tokenizer."
DIGITS = (20, 21, 22)
"Ids of `123`: signs and digits in turn are never joined to one token."
EOS_ID = 0
ODD = 23

Row = dict[str, Any]


class Case(NamedTuple):
    """What rows are drawn, and for which length."""

    max_seq_len: int
    rows: int
    has_rewards: bool


CASES = (Case(24, 90, True), Case(22, 90, True), Case(16, 30, False))


def draw_row(draw: random.Random, lengths: tuple[int, int, int]) -> Row:
    """Return a prompt, and two answers that end in EOS, with this many tokens each."""
    row: Row = {}
    for side, length in zip(SIDES, lengths, strict=True):
        row[side] = [draw.choice(DIGITS if place % 2 else SIGNS) for place in range(length)]
    row["chosen"][-1] = EOS_ID
    row["rejected"][-1] = EOS_ID
    return row


def draw_rows(case: Case) -> list[Row]:
    """Return rows of random lengths, then rows whose answers grow token by token past
    max_seq_len.
    """
    draw = random.Random(case.max_seq_len)
    most = case.max_seq_len
    lengths = [
        (draw.randint(1, most // 4), draw.randint(2, most), draw.randint(2, most))
        for _ in range(case.rows)
    ]
    half = most // 2 - 2
    lengths += [(2, half, half + more) for more in range(-3, half)]  # both together
    lengths += [(2, half + more, half) for more in (1, 2)]
    lengths += [(3, most - 3 + more, most // 2) for more in range(-1, 3)]  # one alone
    lengths += [(3, most + more, most + 4) for more in range(3)]  # both alone
    lengths += [(1, 2, most), (most, 4, 5), (most + 1, 4, 5)]  # nothing of an answer is left
    rows = [draw_row(draw, each) for each in lengths]
    if case.has_rewards:
        for row in rows:
            row |= {key: draw.randint(-8, 8) / 4 for key in REWARDS}
    return rows


def write_rows(folder: Path, rows: list[Row], max_seq_len: int) -> None:
    """Write rows as a stream.

    If max_seq_len is not a multiple of 8, ComposeRL's dataset fails on an answer that is longer
    with its prompt: there the rest of it is left out.
    """
    columns = dict.fromkeys(SIDES, "bytes")
    columns |= {key: "float64" for key in REWARDS if key in rows[0]}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for row in rows:
            sample = {key: row[key] for key in columns}
            room = None if max_seq_len % 8 == 0 else max(0, max_seq_len - len(row["prompt"]))
            for side in SIDES:
                ids = row[side] if side == "prompt" else row[side][:room]
                sample[side] = np.array(ids, "<i8").tobytes()
            writer.write(sample)


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    values = tensor.int() if tensor.dtype == torch.bool else tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "values": values.tolist()}


def record_batch(
    theirs: ModuleType, folder: Path, tokenizer: PreTrainedTokenizerBase, max_seq_len: int
) -> dict[str, Any]:
    """Return one batch of all rows of a stream, and the rows on which ComposeRL fails, which it
    leaves out.
    """
    dataset = theirs.PairwisePreferenceStreamingDataset(
        max_seq_len, local=str(folder), batch_size=1
    )
    collate = theirs.pairwise_preference_dataset_collate_fn
    good, failing = list[int](), dict[int, str]()
    for number in range(dataset.num_samples):
        try:
            collate(tokenizer, max_seq_len, [dataset[number]])
        except Exception as error:  # whatever it raises is what is recorded
            failing[number] = type(error).__name__
        else:
            good.append(number)
    batch = collate(tokenizer, max_seq_len, [dataset[number] for number in good])
    ids = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return ids | {"failing": failing, "batch": {key: describe(batch[key]) for key in sorted(batch)}}


def record_odd(theirs: ModuleType, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the class of what an odd max_seq_len raises; None if it raises nothing."""
    raises = None
    try:
        theirs.pairwise_preference_dataset_collate_fn(tokenizer, ODD, [])
    except Exception as error:  # whatever it raises is what is recorded
        raises = type(error).__name__
    return {"max_seq_len": ODD, "raises": raises}


def head_of(checkout: Path, source: str = SOURCE) -> dict[str, str]:
    """Return what made the batches: the checkout's commit and version, the file, and the versions
    of libraries.
    """
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    named = re.search(r'^version = "(.+)"$', (checkout / "pyproject.toml").read_text(), re.M)
    libraries = {"torch": torch.__version__.partition("+")[0]}
    libraries |= {name: version(name) for name in ("mosaicml-streaming", "transformers")}
    made_by = f"ComposeRL {named[1] if named else '?'}"
    return {"made_by": made_by, "commit": commit, "file": source, **libraries}


def load_module(checkout: Path, source: str = SOURCE) -> ModuleType:
    """Import the one file: its package needs far more than it does."""
    name = f"composerl_{Path(source).stem}"
    spec = importlib.util.spec_from_file_location(name, checkout / source)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(checkout / source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(checkout: Path) -> dict[str, Any]:
    theirs = load_module(checkout)
    cases = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained = train_tokenizer(folder / "tokenizer", documents_n=30)
        own = AutoTokenizer.from_pretrained(trained)
        ending = AutoTokenizer.from_pretrained(trained, pad_token=EOS)
        for case in CASES:
            rows = draw_rows(case)
            stream = folder / str(case.max_seq_len)
            write_rows(stream, rows, case.max_seq_len)
            batches = [
                record_batch(theirs, stream, tokenizer, case.max_seq_len)
                for tokenizer in (own, ending)
            ]
            cases.append({"max_seq_len": case.max_seq_len, "rows": rows, "batches": batches})
        odd = record_odd(theirs, own)
    return {"head": head_of(checkout), "odd": odd, "cases": cases}


def write(recorded: dict[str, Any], path: Path = RECORDED) -> None:
    """Write one list of numbers a line, so that a difference shows its row."""
    text = json.dumps(recorded, separators=(",", ":"))
    path.write_text(re.sub(r"(?<=[\]}]),(?=[\[{])", ",\n", text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.with_torch.record_composerl", description=__doc__
    )
    parser.add_argument("checkout", type=Path)
    write(record(parser.parse_args().checkout))


if __name__ == "__main__":
    main()
