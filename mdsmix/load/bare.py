"""A bare StreamingDataset of the same section: what reading alone takes, so that the rest can be told from it."""

from __future__ import annotations

from typing import Any

from streaming import Stream, StreamingDataLoader, StreamingDataset

from mdsmix.load.config import read_settings
from mdsmix.load.loader import torch_keys
from mdsmix.load.stream import BEST_HASH
from mdsmix.training.read import Config


def bare_loader(config: Config, batch_size: int) -> StreamingDataLoader:
    """Iterating gives lists of decoded samples, unchecked and not made into batches; streams, order and workers are the config's."""
    settings = read_settings(config)
    streams = [Stream(**_own(keys)) for keys in settings.streams.values()]
    dataset = StreamingDataset(streams=streams, batch_size=batch_size, **settings.streaming)
    return StreamingDataLoader(
        dataset, batch_size=batch_size, collate_fn=list, **torch_keys(settings.loader)
    )


def _own(keys: Any) -> dict[str, Any]:
    """Without the hash that nobody asked for."""
    return {k: v for k, v in keys.items() if (k, v) != ("validate_hash", BEST_HASH)}
