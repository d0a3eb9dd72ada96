"""Whether the weights are ones that Streaming accepts."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.training.findings import Finding, rule
from mdsmix.training.keys import COUNT_UNITS, in_units, is_number
from mdsmix.training.sections import LoaderSection
from mdsmix.words import does


@rule("error", "Streaming refuses the streams (ValueError).")
def weights_scheme(loader: LoaderSection) -> Iterator[Finding]:
    streams = loader.stream_sections
    for stream in streams:
        if len(stream.weight) > 1:
            given = ", ".join(f"{k}: {v}" for k, v in stream.weight.items())
            yield Finding(f"{stream.name} has {given}.", "keep one of them.", [stream.name])
    relative = [s.name for s in streams if "proportion" in s.weight]
    absolute = [s.name for s in streams if "proportion" not in s.weight]
    if relative and absolute:
        yield Finding(
            f"{', '.join(relative)} {does(relative, 'is', 'are')} weighted by proportion and {', '.join(absolute)} "
            f"{does(absolute, 'is', 'are')} not.",
            "give every stream a proportion, or none.",
            relative + absolute,
        )


@rule("error", "Streaming refuses the streams (TypeError or ValueError).")
def weights_number(loader: LoaderSection) -> Iterator[Finding]:
    for stream in loader.stream_sections:
        for key, value in stream.weight.items():
            if not is_number(value) or value < 0 or (key == "choose" and value != int(value)):
                yield Finding(
                    f"{key} of {stream.name} is {value!r}.",
                    f"write a {'whole ' if key == 'choose' else ''}number of at least 0, without quotes.",
                    [stream.name],
                )


@rule("error", "Streaming refuses the streams (ValueError).")
def weights_epoch_size(loader: LoaderSection) -> Iterator[Finding]:
    given = loader.dataset.get("epoch_size")
    if not given:
        return
    if (in_units(given, COUNT_UNITS) or -1) < 0:
        yield Finding(
            f"epoch_size of {{loader}} is {given!r}.",
            "write a number of samples, for example 64M.",
        )
    absolute = [s.name for s in loader.stream_sections if {"repeat", "choose"} & set(s.weight)]
    if absolute:
        yield Finding(
            f"{{loader}} sets epoch_size: {given}, and {', '.join(absolute)} {does(absolute, 'has', 'have')} repeat or "
            "choose, which decide it too.",
            "leave epoch_size out, or weight all streams by proportion.",
            absolute,
        )
