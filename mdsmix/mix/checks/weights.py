"""Whether the weights are ones that Streaming accepts, and whether they draw what they seem to draw."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.mix.findings import Hit, check, does, names
from mdsmix.mix.foundry import COUNT_UNITS, in_units
from mdsmix.mix.streams import Mix
from mdsmix.mix.weights import draws_of, is_number, shares_of

SKEW = 2.0
"A share in tokens this many times the share in samples, or the other way round, is worth a note."
OFTEN = 4
"Passes over the same data that still train about as well as new data (arXiv 2305.16264)."


@check("weights-scheme", "error", "Streaming refuses the streams (ValueError).")
def weights_scheme(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for stream in loader.streams:
            if len(stream.weight) > 1:
                given = ", ".join(f"{k}: {v}" for k, v in stream.weight.items())
                yield Hit([stream.name], f"{stream.name} has {given}.", "keep one of them.")
        relative = [s.name for s in loader.streams if "proportion" in s.weight]
        absolute = [s.name for s in loader.streams if "proportion" not in s.weight]
        if relative and absolute:
            yield Hit(
                relative + absolute,
                f"{', '.join(relative)} {does(relative, 'is', 'are')} weighted by proportion and {', '.join(absolute)} {does(absolute, 'is', 'are')} not.",
                "give every stream a proportion, or none.",
            )


@check("weights-number", "error", "Streaming refuses the streams (TypeError or ValueError).")
def weights_number(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        for key, value in stream.weight.items():
            if not is_number(value) or value < 0 or (key == "choose" and value != int(value)):
                yield Hit(
                    [stream.name],
                    f"{key} of {stream.name} is {value!r}.",
                    f"write a {'whole ' if key == 'choose' else ''}number of at least 0, without quotes.",
                )


@check("weights-epoch-size", "error", "Streaming refuses the streams (ValueError).")
def weights_epoch_size(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        given = loader.dataset.get("epoch_size")
        if not given:
            continue
        if (in_units(given, COUNT_UNITS) or -1) < 0:
            yield Hit(
                [],
                f"epoch_size of {{loader}} is {given!r}.",
                "write a number of samples, for example 64M.",
                loader.label,
            )
        absolute = [s for s in loader.streams if {"repeat", "choose"} & set(s.weight)]
        if absolute:
            yield Hit(
                names(absolute),
                f"{loader.label} sets epoch_size: {given}, and {', '.join(names(absolute))} {does(absolute, 'has', 'have')} repeat or choose, which decide it too.",
                "leave epoch_size out, or weight all streams by proportion.",
            )


@check(
    "weights-zero",
    "error",
    "Streaming rounds down without a word: the stream is never used.",
)
def weights_zero(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        for stream, drawn in zip(loader.streams, draws_of(loader) or [], strict=False):
            if not drawn and stream.index.samples and any(stream.weight.values() or [1]):
                yield Hit(
                    [stream.name],
                    f"{stream.name} has {stream.index.samples} samples, and its weight "
                    f"{_spelled(stream.weight)} draws 0 of them an epoch.",
                    "raise its weight, or take the stream out.",
                )


@check("weights-off", "warning", "The stream is in the mix and never used.")
def weights_off(mix: Mix) -> Iterator[Hit]:
    for stream in mix.streams:
        if stream.weight and not any(stream.weight.values()):
            yield Hit(
                [stream.name],
                f"{stream.name} has {_spelled(stream.weight)}.",
                "take the stream out, or give it a weight.",
            )


@check(
    "weights-repeated",
    "note",
    "Samples seen more than about four times teach less each time.",
)
def weights_repeated(mix: Mix) -> Iterator[Hit]:
    for stream, drawn in zip(mix.train.streams, draws_of(mix.train) or [], strict=False):
        if drawn > OFTEN * stream.index.samples > 0:
            yield Hit(
                [stream.name],
                f"an epoch draws {drawn} samples of the {stream.index.samples} of {stream.name}.",
                "lower its weight or epoch_size, unless this is wanted.",
            )


@check(
    "weights-tokens",
    "note",
    "Weights count samples, and training counts tokens.",
)
def weights_tokens(mix: Mix) -> Iterator[Hit]:
    for share in shares_of(mix.train, mix.batch_size):
        part = share.tokens_share
        if part is None or not share.share or not _is_skewed(part / share.share):
            continue
        yield Hit(
            [share.stream],
            f"{share.stream} is {share.share:.1%} of an epoch's samples and {part:.1%} of its tokens.",
            "nothing, if that is wanted; else weight by the share of tokens.",
        )


def _is_skewed(ratio: float) -> bool:
    return not 1 / SKEW <= ratio <= SKEW


def _spelled(weight: dict[str, object]) -> str:
    return ", ".join(f"{k}: {v}" for k, v in weight.items()) or "1"
