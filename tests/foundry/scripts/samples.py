"""Every sample of a mix as this environment's StreamingDataset draws it; runs with and without LLM-Foundry beside it."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
import streaming
from streaming import Stream, StreamingDataset


def drawn(streams: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Which Streaming it was, how many samples came in a shuffled epoch, and a hash of them in order."""
    dataset = StreamingDataset(
        streams=[Stream(**stream) for stream in streams.values()],
        batch_size=4,
        shuffle=True,
        shuffle_seed=3,
        num_canonical_nodes=1,
    )
    digest, count = hashlib.sha256(), 0
    for sample in dataset:
        digest.update(json.dumps({k: _plain(sample[k]) for k in sorted(sample)}).encode())
        count += 1
    return {"version": streaming.__version__, "samples": count, "hash": digest.hexdigest()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


if __name__ == "__main__":
    print(json.dumps(drawn(json.loads(sys.argv[1]))))
