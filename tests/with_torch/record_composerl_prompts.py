"""`python -m tests.with_torch.record_composerl_prompts PATH` writes composerl_prompts.json: batches
that ComposeRL's own dataset and collator make of prompts drawn here. PATH is a git checkout of
ComposeRL. test_prompts.py compares them with those of mdsmix.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from streaming import MDSWriter
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.corpus import EOS, train_tokenizer
from tests.with_torch.record_composerl import (
    DIGITS,
    SIGNS,
    describe,
    head_of,
    load_module,
    write,
)

RECORDED = Path(__file__).with_name("composerl_prompts.json")
SOURCE = "compose_rl/data/prompt_data.py"
UTILS = "compose_rl.utils"
MAX_SEQ_LEN = 24
MAX_GEN_LEN = 10
ANSWER = "verified_answer"
VALUE = "vstar"
EOS_ID = 0

Row = dict[str, Any]


class Case(NamedTuple):
    """What rows are drawn, and how the tokenizer pads."""

    has_answers: bool
    padding_side: str
    pads_with_eos: bool
    has_values: bool = False
    "Whether rows have a `vstar`, a number that ComposeRL's A*PO reads. mdsmix does not write it."


CASES = (
    Case(True, "left", False),
    Case(True, "left", True),
    Case(False, "left", False),
    Case(True, "right", False),
    Case(True, "left", False, has_values=True),
)


def draw_rows(case: Case) -> list[Row]:
    """Return prompts of all lengths up to one that ComposeRL would cut, and random ones. Some have
    EOS in their middle.
    """
    draw = random.Random(3)
    most = MAX_SEQ_LEN - MAX_GEN_LEN
    lengths = [*range(1, most + 1), *(draw.randint(1, most) for _ in range(40)), most + 1, 30]
    rows: list[Row] = []
    for number, length in enumerate(lengths):
        ids = [draw.choice(DIGITS if place % 2 else SIGNS) for place in range(length)]
        if length > 4 and not number % 3:
            ids[length // 2] = EOS_ID
        row: Row = {"prompt": ids}
        if case.has_answers:
            row[ANSWER] = draw.choice(["42", "x²", "a, b", " -1"])
        if case.has_values:
            row[VALUE] = draw.random()
        rows.append(row)
    return rows


def write_rows(folder: Path, rows: list[Row]) -> None:
    columns = {"prompt": "bytes"}
    if ANSWER in rows[0]:
        columns[ANSWER] = "str"
    if VALUE in rows[0]:
        columns[VALUE] = "float64"
    # Several shards, so that the number of a sample is not its place in a shard.
    with MDSWriter(out=str(folder), columns=columns, size_limit=1500) as writer:
        for row in rows:
            writer.write(row | {"prompt": np.array(row["prompt"], "<i8").tobytes()})


def record_batches(
    theirs: ModuleType, folder: Path, tokenizer: PreTrainedTokenizerBase, size: int
) -> dict[str, Any]:
    """Return the batches of a stream in its order, and the numbers of the prompts that ComposeRL's
    dataset cuts, which are in no batch.
    """
    dataset = theirs.PromptStreamingDataset(
        max_gen_len=MAX_GEN_LEN, max_seq_len=MAX_SEQ_LEN, local=str(folder), batch_size=1
    )
    items = [dataset[number] for number in range(dataset.num_samples)]
    whole = [
        number
        for number in range(dataset.num_samples)
        if len(items[number]["prompt"]) * 8 == len(dataset.get_item(number)["prompt"])
    ]
    batches = []
    for start in range(0, len(whole), size):
        rows = [items[number] for number in whole[start : start + size]]
        batch = theirs.prompt_dataset_collate_fn(tokenizer, MAX_SEQ_LEN, rows)
        batches.append(
            {
                key: describe(value) if isinstance(value, torch.Tensor) else value
                for key, value in sorted(batch.items())
            }
        )
    cut = sorted({*range(dataset.num_samples)} - {*whole})
    return {"cut": cut, "batches": batches}


def load_prompt_module(checkout: Path) -> ModuleType:
    """Import the one file. Of its package's utilities it needs one function, which is compiled from
    its source: the others need vLLM.
    """
    tree = ast.parse((checkout / "compose_rl/utils/utils.py").read_text())
    (function,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "flatten"
    ]
    utilities = ModuleType(UTILS)
    future = "from __future__ import annotations\nfrom collections.abc import Iterable\n"
    exec(compile(future + ast.unparse(function), UTILS, "exec"), utilities.__dict__)
    package = ModuleType("compose_rl")
    package.utils = utilities  # type: ignore[attr-defined]
    sys.modules |= {"compose_rl": package, UTILS: utilities}
    return load_module(checkout, SOURCE)


def record(checkout: Path) -> dict[str, Any]:
    theirs = load_prompt_module(checkout)
    cases = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained = train_tokenizer(folder / "tokenizer", documents_n=30)
        for number, case in enumerate(CASES):
            pad = {"pad_token": EOS} if case.pads_with_eos else {}
            tokenizer = AutoTokenizer.from_pretrained(
                trained, padding_side=case.padding_side, **pad
            )
            rows = draw_rows(case)
            stream = folder / str(number)
            write_rows(stream, rows)
            recorded = record_batches(theirs, stream, tokenizer, 8)
            cases.append({**case._asdict(), "rows": rows, **recorded})
    lengths = {"max_seq_len": MAX_SEQ_LEN, "max_gen_len": MAX_GEN_LEN}
    return {"head": head_of(checkout, SOURCE), **lengths, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.with_torch.record_composerl_prompts", description=__doc__
    )
    parser.add_argument("checkout", type=Path)
    write(record(parser.parse_args().checkout), RECORDED)


if __name__ == "__main__":
    main()
