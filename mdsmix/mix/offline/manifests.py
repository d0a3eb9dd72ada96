"""The manifests of several streams -> what one manifest can say of all their samples.

What decides whether a sample can be trained on must be the same for all of them, or the mix is refused: no manifest could
tell later checks both. What only says how samples came about is left out where the streams differ in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdsmix.errors import MixRefused
from mdsmix.kinds import kind_of
from mdsmix.mix.streams import StreamInMix
from mdsmix.shards.manifest import Encoding, Manifest, TokenizerCard

DECISIVE = ("loader", "decoder_only_format", "target_prompts", "target_responses")
"Keys of Encoding; of pretraining samples only the loader matters, for the others speak of turns."
BY_THE_WAY = (
    "layout",
    "add_bos",
    "add_eos",
    "min_tokens",
    "max_tokens",
    "date_string",
    "where",
    "sample",
    "holdout",
    "id",
)
"Keys that are null where streams differ."


def merged(streams: Sequence[StreamInMix]) -> tuple[Encoding, TokenizerCard] | None:
    """What holds for the samples of all streams; None where one of them has no manifest."""
    found = [(stream, stream.trusted_manifest) for stream in streams if stream.trusted_manifest]
    if len(found) < len(streams):
        return None
    targeted = [(s, own) for s, own in found if kind_of(own.encoding).has_targets]
    _refuse_disagreement([(s.name, own.encoding) for s, own in targeted], DECISIVE)
    _refuse_disagreement([(s.name, own.encoding) for s, own in found], DECISIVE[:1])
    encodings = [own.encoding for _, own in found]
    _refuse_other_images([(stream.name, own.encoding.images) for stream, own in found])
    leading = _leading([own for _, own in targeted or found])
    disputed: dict[str, Any] = {k: None for k in BY_THE_WAY if not _agree(encodings, k)}
    rules = sorted({encoding.special_tokens_in_text for encoding in encodings})
    encoding = replace(
        leading.encoding,
        **disputed,
        # Pairs may stand beside conversations in their columns; what holds for those must then hold for all.
        compact=any(own.encoding.compact for _, own in targeted),
        max_seq_len=max(encoding.max_seq_len for encoding in encodings),
        special_tokens_in_text=" + ".join(rules),
        images=_agreed([encoding.images for encoding in encodings]),
        duplicates="keep",  # a sample may be drawn any number of times
        fields={k: v for e in encodings for k, v in e.fields.items()},
    )
    return encoding, leading.tokenizer


def _agreed(images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of images that all streams have."""
    first, *others = images
    return {k: v for k, v in first.items() if all(k in each and each[k] == v for each in others)}


def _refuse_other_images(named: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """MixRefused where the streams' rows are for other models: what stands for an image, and the processor that says which fit."""
    (first, one), *others = named
    for name, images in others:
        for key, what in (("token", "image token"), ("processor", "processor")):
            if one.get(key) != images.get(key):
                said = (f"{str(each.get(key, 'none'))[:20]}" for each in (one, images))
                raise MixRefused(
                    f"{first} and {name} were converted for the {what}s {' and '.join(said)}, and a mix can state only one; convert both for "
                    "the same."
                )


def _leading(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of conversations where there are some: theirs is the chat template that samples depend on."""
    return next((m for m in manifests if kind_of(m.encoding).has_template), manifests[0])


def _agree(encodings: Sequence[Encoding], key: str) -> bool:
    return all(getattr(e, key) == getattr(encodings[0], key) for e in encodings)


def _refuse_disagreement(named: Sequence[tuple[str, Encoding]], keys: Sequence[str]) -> None:
    for key in keys:
        for name, encoding in named[1:]:
            one, other = getattr(named[0][1], key), getattr(encoding, key)
            if one != other:
                raise MixRefused(
                    f"{named[0][0]} was converted under {key}: {one}, and {name} under {key}: {other}, which decides "
                    "what of a sample is trained, and a mix can state only one; convert both under the same."
                )
