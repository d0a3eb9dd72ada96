"""The streams of a loader, as its YAML weights them in an epoch.

The figures are those of `mdsmix check`: samples exactly, tokens and trained positions from the
streams' manifests.
"""

from __future__ import annotations

import logging

from mdsmix.callbacks.stream_figures import PlannedStream
from mdsmix.errors import MdsmixError
from mdsmix.load import MixLoader
from mdsmix.mix.epoch.figures import StreamInEpoch, measure_epoch
from mdsmix.mix.streams.open_streams import open_section_streams
from mdsmix.table import is_known

log = logging.getLogger(__name__)


def list_planned_streams(loader: MixLoader, with_tokens: bool = True) -> list[PlannedStream]:
    """Return the streams of a loader, in the order of their numbers. Tokens are None if a manifest
    cannot be read, which is logged.

    Args:
        with_tokens: whether to read the manifests, for the figures of tokens.
    """
    measured: dict[str, StreamInEpoch] = {}
    try:
        if with_tokens:
            opened = open_section_streams(loader.settings.section)
            measured = {stream.stream: stream for stream in measure_epoch(opened)}
    except MdsmixError as error:
        log.warning("The planned shares of tokens are unknown: %s", error)
    streams = list[PlannedStream]()
    for stream in loader.dataset.lock.streams:
        epoch = measured.get(stream.name)
        tokens = float(epoch.tokens) if epoch and is_known(epoch.tokens) else None
        trained = float(epoch.trained) if epoch and is_known(epoch.trained) else None
        streams.append(
            PlannedStream(
                name=stream.name,
                size=stream.samples,
                samples=stream.drawn,
                tokens=tokens,
                trained=trained,
            )
        )
    return streams
