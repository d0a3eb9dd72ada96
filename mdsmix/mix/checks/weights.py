"""Whether the weights draw what they seem to draw. (Whether Streaming accepts them is a rule of the training YAML.)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mdsmix.mix.draws import draws_of
from mdsmix.mix.epoch import epoch_of, share_of
from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.training.findings import Finding, check, check_loaders, check_streams

SKEW = 2.0
"A share in tokens this many times the share in samples, or the other way round, is worth a note."
OFTEN = 4
"Passes over the same data that still train about as well as new data (arXiv 2305.16264)."


@check_loaders("error", "Streaming rounds down without a word: the stream is never used.")
def weights_zero(mix: Mix, loader: Loader) -> Iterator[Finding]:
    for stream, drawn in zip(loader.streams, draws_of(loader) or [], strict=False):
        if not drawn and stream.index.samples and any(stream.weight.values() or [1]):
            yield Finding(
                f"{stream.name} has {stream.index.samples} samples, and its weight "
                f"{_spelled(stream.weight)} draws 0 of them an epoch.",
                "raise its weight, or take the stream out.",
                [stream.name],
            )


@check_streams("warning", "The stream is in the mix and never used.")
def weights_off(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    is_meant = mix.shares is not None  # `share: 0` leaves a stream out
    if stream.weight and not any(stream.weight.values()) and not is_meant:
        yield Finding(
            f"{stream.name} has {_spelled(stream.weight)}.",
            "take the stream out, or give it a weight.",
        )


@check("note", "Samples seen more than about four times teach less each time.")
def weights_repeated(mix: Mix) -> Iterator[Finding]:
    for stream, drawn in zip(mix.train.streams, draws_of(mix.train) or [], strict=False):
        if drawn > OFTEN * stream.index.samples > 0:
            yield Finding(
                f"an epoch draws {drawn} samples of the {stream.index.samples} of {stream.name}.",
                "lower its weight or epoch_size, unless this is wanted.",
                [stream.name],
            )


@check("note", "Weights count samples, and training counts tokens.")
def weights_tokens(mix: Mix) -> Iterator[Finding]:
    epoch = epoch_of(mix.train, mix.yaml.batch_size) if mix.shares is None else []
    samples, tokens = sum(s.delivered for s in epoch), sum(s.tokens for s in epoch)
    for each in epoch:
        share, part = each.delivered / max(1, samples), share_of(each.tokens, tokens)
        if part is not None and share and not 1 / SKEW <= part / share <= SKEW:
            yield Finding(
                f"{each.stream} is {share:.1%} of an epoch's samples and {part:.1%} of its tokens.",
                "nothing, if that is wanted; else weight by share in a recipe, which counts tokens.",
                [each.stream],
            )


def _spelled(weight: Mapping[str, object]) -> str:
    return ", ".join(f"{k}: {v}" for k, v in weight.items()) or "1"
