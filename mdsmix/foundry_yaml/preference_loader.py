"""Makes the same rows and batches as ComposeRL's loader of preferences: the rows of its
PairwisePreferenceStreamingDataset, and the batches of its collator.

A side is an answer with the prompt before it. The dataset truncates each side to max_seq_len. The
collator joins the two sides to one sequence. If they have more than max_seq_len tokens together, it
removes the same number of tokens from the end of each side (`cut_per_answer`).
`tests/with_torch/test_preferences.py` compares batches with batches that ComposeRL made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mdsmix.errors import MixRefused
from mdsmix.foundry_yaml.loader_keys import DATASET_KEYS, BatchRules, ExtraLoader
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.shapes.preference import REWARDS
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import PREFERENCE_COLUMNS, decode_preference


def cut_per_answer(length: Any, max_seq_len: int) -> NDArray[np.int64]:
    """Return how many tokens ComposeRL's collator removes from the end of each answer.

    Args:
        length: the number of tokens of both sides (each answer with its prompt) together, for one
            preference or for an array of preferences.
        max_seq_len: how many tokens a row may have.

    >>> cut_per_answer([96, 97, 98, 99], 96).tolist()
    [0, 2, 2, 3]
    """
    # Half of the tokens beyond max_seq_len, rounded up, and one more.
    beyond = np.asarray(length, np.int64) - max_seq_len
    return np.where(beyond > 0, (beyond + 1) // 2 + 1, 0)


def make_pairwise_row(rules: BatchRules, sample: Sample, number: int) -> dict[str, Any]:
    """Return a stored sample as `make_pairwise_batch` takes it: `{"prompt_len": 2, "answers":
    [chosen, rejected]}`.

    The answers are int64 arrays, each with the prompt before it and truncated as in a batch. If the
    sample has rewards, they are entries of the result too.

    Raises MixRefused if truncation leaves nothing of an answer and its prompt.

    Args:
        rules: their max_seq_len is how many tokens a row may have.
        sample: its decoded columns.
        number: not used; the functions of all loaders have the same arguments.
    """
    max_seq_len = rules.max_seq_len
    prompt, *answers = decode_preference(sample)
    prompt = prompt[:max_seq_len]
    sides = [np.concatenate([prompt, answer])[:max_seq_len] for answer in answers]
    # Each side (the prompt with one answer) loses some more tokens at its end, so that both fit.
    cut = int(cut_per_answer(sum(map(len, sides)), max_seq_len))
    if min(map(len, sides)) <= cut:
        raise MixRefused(
            f"truncation to max_seq_len: {max_seq_len} leaves no token of this preference's prompt "
            "with one of its answers: convert the stream again with max_seq_len: "
            f"{max_seq_len} in the recipe, which leaves such records out."
        )
    rewards = {key: sample[key] for key in REWARDS if key in sample}
    answers = [side[: len(side) - cut] for side in sides]
    return {"prompt_len": len(prompt), **rewards, "answers": answers}


def make_pairwise_batch(
    rules: BatchRules, rows: Sequence[Mapping[str, Any]]
) -> dict[str, NDArray[Any]]:
    """Return the batch of rows as ComposeRL's collator makes it. Each row is the chosen answer,
    then the rejected answer. Both have the prompt before them, and EOS as their last token.

    Raises MixRefused if only some rows have rewards.

    Args:
        rules: their max_seq_len is how many tokens a row has, with padding.
        rows: what `make_pairwise_row` returned for each sample.

    Returns:
        input_ids: int64 [rows, max_seq_len].
        sequence_id: int64 [rows, max_seq_len]: 0 chosen, 1 rejected, -1 padding.
        attention_mask: bool [rows, max_seq_len]: false at every token equal to the padding token.
        prompt_len, chosen_len, rejected_len: int64 [rows].
        chosen_reward, rejected_reward: float32 [rows, 1], if the rows have rewards.
    """
    if any(row.keys() != rows[0].keys() for row in rows):
        raise MixRefused(
            "a batch contains preferences with rewards and preferences without rewards: convert "
            "all streams of the run with rewards, or all streams without rewards."
        )
    input_ids = np.full((len(rows), rules.max_seq_len), rules.fill, np.int64)
    sequence_ids = np.full_like(input_ids, -1)
    lengths = np.zeros((2, len(rows)), int)  # of the chosen and the rejected answer of each row
    for number, row in enumerate(rows):
        lengths[:, number] = [*map(len, row["answers"])]
        ends = lengths[:, number].cumsum()  # where the chosen and the rejected answer end
        input_ids[number, : ends[1]] = np.concatenate(row["answers"])
        input_ids[number, ends - 1] = rules.eos
        sequence_ids[number, : ends[1]] = np.repeat([0, 1], lengths[:, number])
    batch: dict[str, NDArray[Any]] = {
        "input_ids": input_ids,
        "attention_mask": input_ids != rules.fill,
        "chosen_len": lengths[0],
        "rejected_len": lengths[1],
        "sequence_id": sequence_ids,
        "prompt_len": np.array([row["prompt_len"] for row in rows]),
    }
    rewards = rows[0].keys() & {*REWARDS}
    for key in rewards:
        batch[key] = np.array([[row[key]] for row in rows], np.float32)
    return batch


PREFERENCE_LOADER = ExtraLoader(
    name="pairwise_preference",
    whose="ComposeRL",
    keys=DATASET_KEYS,
    columns=dict.fromkeys(PREFERENCE_COLUMNS, "bytes"),
    row=make_pairwise_row,
    batch=make_pairwise_batch,
    multiple=2,
)
