"""The weights with which a trainer draws from exported streams, by the shares of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mdsmix.errors import MixRefused
from mdsmix.exporting.stream_rows import ExportedStream
from mdsmix.mix.epoch.figures import measure_epoch
from mdsmix.mix.streams.mix import Mix
from mdsmix.table import is_known


def find_weights(
    mix: Mix, streams: Sequence[ExportedStream], unit: Literal["samples", "tokens"]
) -> dict[str, float]:
    """Return the name of each training stream -> its share of an epoch of the exported training
    streams, as the recipe weighs them. The shares add up to 1.

    Empty if the user names streams and not a recipe, so that nothing weighs them.
    Raises MixRefused if the tokens of a stream are unknown.

    Args:
        mix: the mix of the recipe.
        streams: the streams that are exported.
        unit: whether the shares are of samples or of tokens.
    """
    if mix.is_bare:
        return {}
    exported = {stream.name for stream in streams}
    amounts = dict[str, float]()
    for stream in measure_epoch(mix.train):
        if stream.stream not in exported:
            continue
        amount = stream.delivered if unit == "samples" else stream.tokens
        if not is_known(amount):
            raise MixRefused(
                f"mdsmix export cannot compute the sampling weight of stream {stream.stream} for "
                f"the trainer, because the {unit} that an epoch draws of the stream are unknown: "
                "its manifest does not count them under the settings of this recipe. Run mdsmix "
                "convert on the recipe, or name the stream's folder in place of the recipe, which "
                "exports the stream without a weight."
            )
        amounts[stream.stream] = float(amount)
    total = sum(amounts.values())
    return {name: amount / total for name, amount in amounts.items()} if total else {}
