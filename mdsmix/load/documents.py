"""Where the documents of a batch's rows end, for models that read `sequence_id` in another form.

MPT of LLM-Foundry takes sequence_id as it is (`attn_uses_sequence_id: true`). Models of transformers take `position_ids`, which some
kernels find borders by, or a mask of four dimensions, which all of them heed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def positions(sequence_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [batch, n]: the place of each token in its document, a run of one sequence_id."""
    columns = np.arange(sequence_id.shape[1])
    begins = np.ones(sequence_id.shape, bool)
    begins[:, 1:] = sequence_id[:, 1:] != sequence_id[:, :-1]
    return np.asarray(columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1))


def document_mask(sequence_id: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The attention mask of a causal model in which no document sees another.

    Args:
        sequence_id: int64 [batch, n], -1 for padding, as batches have it.
        dtype: of the model's activations.

    Returns:
        dtype [batch, 1, n, n], to be added to the scores: 0 where token i may look at token j, else the least number of `dtype`.
        It takes n * n numbers a row, so prefer a kernel that reads position_ids where the model has one.

    >>> from mdsmix.load import document_mask
    >>> (document_mask(torch.tensor([[0, 0, 1]])) == 0).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    n = sequence_id.shape[1]
    sees = sequence_id[:, :, None] == sequence_id[:, None, :]
    sees &= torch.ones(n, n, dtype=torch.bool, device=sequence_id.device).tril()
    mask = torch.zeros(sees.shape, dtype=dtype, device=sequence_id.device)
    return mask.masked_fill(~sees, torch.finfo(dtype).min)[:, None]
