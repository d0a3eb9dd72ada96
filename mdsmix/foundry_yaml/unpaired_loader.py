"""Makes rows and batches of unpaired preferences: the batches that TRL's KTOTrainer makes of the
same rows.

KTO estimates how far the model has moved from its reference on answers that do not belong to their
prompts. TRL takes them from the same batch: each prompt gets the completion of the row before it.
So a batch needs two rows; only a last batch of one row has the same completion twice, as in TRL.
`tests/exporting/test_peers.py` compares batches with those of TRL's collator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mdsmix.errors import MixRefused
from mdsmix.foundry_yaml.loader_keys import DATASET_KEYS, BatchRules, ExtraLoader
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.shapes.unpaired_preference import LABEL
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import UNPAIRED_COLUMNS, Ids, decode_ids

DTYPE = "int32"
"The dtype of stored ids, as in TRL's data sets of token ids."


class UnpairedRow(NamedTuple):
    """A prompt and its completion, together at most max_seq_len tokens."""

    prompt: Ids
    completion: Ids
    is_desirable: bool


def make_unpaired_row(rules: BatchRules, sample: Sample, number: int) -> UnpairedRow:
    """Return a stored sample as a row. The end of a completion that does not fit is cut off.

    Raises MixRefused if nothing of the completion fits.

    Args:
        rules: their max_seq_len is how many tokens a row may have.
        sample: its decoded columns.
        number: not used; the functions of all loaders have the same arguments.
    """
    prompt, completion = (decode_ids(sample[name], DTYPE) for name in UNPAIRED_COLUMNS)
    if len(prompt) >= rules.max_seq_len:
        raise MixRefused(
            f"the prompt of this sample has {len(prompt):,} tokens, so max_seq_len: "
            f"{rules.max_seq_len} leaves nothing of its completion: convert the stream again with "
            "this max_seq_len, which leaves such records out."
        )
    return UnpairedRow(prompt, completion[: rules.max_seq_len - len(prompt)], bool(sample[LABEL]))


def make_unpaired_batch(rules: BatchRules, rows: Sequence[UnpairedRow]) -> dict[str, Any]:
    """Return the batch of rows as TRL makes it. Rows are padded on the right.

    Args:
        rules: their max_seq_len is the most tokens of a row, and `fill` is the padding token.
        rows: the rows, in their order.

    Returns:
        input_ids: int64 [rows, tokens of the longest row]: each prompt with its completion.
        attention_mask: int64, as `input_ids`: 0 for padding.
        completion_mask: int64, as `input_ids`: 1 for the tokens of completions.
        KL_input_ids, KL_attention_mask, KL_completion_mask: the same for each prompt with the
            completion of the row before it. The first row gets that of the last row.
        label: bool [rows], whether each completion is desirable.
    """
    completions = [row.completion for row in rows]
    previous_completions = [completions[-1], *completions[:-1]]
    prompts = [row.prompt for row in rows]
    batch = _join_sides(rules, prompts, completions)
    for name, values in _join_sides(rules, prompts, previous_completions).items():
        batch[f"KL_{name}"] = values
    batch[LABEL] = np.array([row.is_desirable for row in rows])
    return batch


def _join_sides(
    rules: BatchRules, prompts: Sequence[Ids], completions: Sequence[Ids]
) -> dict[str, NDArray[Any]]:
    """Return prompts, each with a completion after it, as padded arrays with their masks.

    Args:
        rules: as for `make_unpaired_batch`.
        prompts: the ids of each row's prompt.
        completions: the ids of each row's completion, which may be that of another prompt.
    """
    wholes = [
        np.concatenate([prompt, completion])[: rules.max_seq_len]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    shape = (len(wholes), max(map(len, wholes)))
    input_ids = np.full(shape, rules.fill, np.int64)
    attention_mask = np.zeros(shape, np.int64)
    completion_mask = np.zeros(shape, np.int64)
    for number, (whole, prompt) in enumerate(zip(wholes, prompts, strict=True)):
        input_ids[number, : len(whole)] = whole
        attention_mask[number, : len(whole)] = 1
        completion_mask[number, len(prompt) : len(whole)] = 1
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "completion_mask": completion_mask,
    }


UNPAIRED_LOADER = ExtraLoader(
    name="unpaired_preference",
    whose="mdsmix",
    keys=DATASET_KEYS,
    columns={**dict.fromkeys(UNPAIRED_COLUMNS, f"ndarray:{DTYPE}"), LABEL: "int8"},
    row=make_unpaired_row,
    batch=make_unpaired_batch,
    pads_to_longest=True,
    least_batch=2,
)
