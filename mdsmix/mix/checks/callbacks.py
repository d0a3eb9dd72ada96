"""Checks of callbacks: the callback that logs the figures of each stream needs a loader that tells
it the streams (docs/streams-of-a-run.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER, STREAMS_CALLBACK
from mdsmix.mix.streams.mix import Mix

CHECKS = CheckList()


@CHECKS.mix("error", "The callback ends the run at its start.")
def callback_without_streams(mix: Mix) -> Findings:
    """Find the callback of streams under a loader that does not tell which stream a row is from."""
    callbacks = mix.yaml.value_at("callbacks")
    has_callback = isinstance(callbacks, Mapping) and STREAMS_CALLBACK in callbacks
    if has_callback and not mix.train.is_mdsmix:
        # Only the loader of mdsmix gives a batch the streams of its rows.
        yield Finding(
            f"callbacks has {STREAMS_CALLBACK}, and the {mix.train.name} loader of train_loader "
            "does not tell which stream a row is from.",
            f"set train_loader.name: {MDSMIX_LOADER}, or remove {STREAMS_CALLBACK} (`render-yaml` "
            "adds it only with --callback).",
        )
