"""Makes the same rows and batches as ComposeRL's loader of prompts: the rows of its
PromptStreamingDataset, and the batches of its collator.

The dataset cuts off the end of a prompt that leaves less than `max_gen_len` tokens of max_seq_len
for the answer, and with it the words that ask the model to answer. Here such a prompt is an error.
`tests/with_torch/test_prompts.py` compares batches with batches that ComposeRL made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mdsmix.errors import MixRefused
from mdsmix.foundry_yaml.loader_keys import AT_LEAST_ONE, DATASET_KEYS, BatchRules, ExtraLoader
from mdsmix.lazy_numpy import np
from mdsmix.messages import join_names
from mdsmix.shapes.prompt import ANSWER
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import PROMPT_COLUMNS, decode_prompt

VALUE = "vstar"
"""The column with the expected reward of a prompt, a number. ComposeRL's A*PO reads it, and streams
of mdsmix do not have it.
"""
MAX_GEN_LEN = "max_gen_len"
"The key of `dataset` with the tokens that the model may write after a prompt."


def make_prompt_row(rules: BatchRules, sample: Sample, number: int) -> dict[str, Any]:
    """Return a stored sample as `make_prompt_batch` takes it: `{"prompt_id": 7, "prompt": ids}`
    and, if the sample has them, its `verified_answer` and `vstar`.

    Raises MixRefused if the prompt leaves less than max_gen_len tokens for the answer.

    Args:
        rules: their max_seq_len is how many tokens a prompt and its answer may have.
        sample: its decoded columns.
        number: the number of the sample in the dataset.
    """
    prompt = decode_prompt(sample)
    room = rules.max_seq_len - rules.max_gen_len
    if len(prompt) > room:
        raise MixRefused(
            f"the prompt of this sample has {len(prompt):,} tokens, but max_seq_len: "
            f"{rules.max_seq_len} and max_gen_len: {rules.max_gen_len} leave {room:,} for it, and "
            "ComposeRL would cut off its end: convert the stream again for these two lengths, "
            "which leaves such prompts out."
        )
    row = {"prompt_id": number, "prompt": prompt}
    if sample.get(ANSWER):  # ComposeRL treats an empty answer as none
        row[ANSWER] = sample[ANSWER]
    if VALUE in sample:
        row[VALUE] = sample[VALUE]
    return row


def make_prompt_batch(rules: BatchRules, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the batch of rows as ComposeRL's collator makes it.

    Raises MixRefused if only some rows have a verified answer, or a `vstar`.

    Args:
        rules: prompts are padded with their padding token, on their side.
        rows: what `make_prompt_row` returned for each sample.

    Returns:
        prompt_id: int64 [rows], the number of each sample in the dataset.
        prompt: int64 [rows, tokens of the longest prompt].
        prompt_len: int64 [rows].
        verified_answer: a list of strings, if the rows have answers.
        vstar: float32 [rows], if the rows have it.
        prompt_attention_mask: bool, as `prompt`: false at every token equal to the padding token.
    """
    unequal = [name for name in (ANSWER, VALUE) if len({name in row for row in rows}) > 1]
    if unequal:
        raise MixRefused(
            f"a batch contains prompts with {join_names(unequal)} and prompts without it, and "
            "ComposeRL needs a column in all prompts of a batch or in none: give all streams of "
            f"the run the same columns (source.{ANSWER} in the recipe makes {ANSWER})."
        )
    lengths = np.array([len(row["prompt"]) for row in rows], np.int64)
    longest = int(lengths.max())
    prompts = np.full((len(rows), longest), rules.fill, np.int64)
    for line, row, length in zip(prompts, rows, lengths.tolist(), strict=True):
        start = longest - length if rules.is_left else 0
        line[start : start + length] = row["prompt"]
    batch: dict[str, Any] = {
        "prompt_id": np.array([row["prompt_id"] for row in rows], np.int64),
        "prompt": prompts,
        "prompt_len": lengths,
        "prompt_attention_mask": prompts != rules.fill,
    }
    if ANSWER in rows[0]:
        batch[ANSWER] = [row[ANSWER] for row in rows]
    if VALUE in rows[0]:
        batch[VALUE] = np.array([row[VALUE] for row in rows], np.float32)
    return batch


PROMPT_LOADER = ExtraLoader(
    name="prompt",
    whose="ComposeRL",
    keys=DATASET_KEYS | {MAX_GEN_LEN: AT_LEAST_ONE},
    needs={MAX_GEN_LEN: lambda max_seq_len: max(1, max_seq_len // 2)},
    pads_left=True,
    pads_to_longest=True,
    columns=dict.fromkeys(PROMPT_COLUMNS, "bytes"),
    row=make_prompt_row,
    batch=make_prompt_batch,
)
