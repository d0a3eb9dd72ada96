"""Whether samples can be trained on: documents that a separator keeps apart, and something to train on in each.

The manifest answers where there is one. Otherwise the first samples of the first shard do, which can show that a stream is wrong but
not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mdsmix.encode.labels import USABLE, VERDICTS
from mdsmix.kinds import kind_of
from mdsmix.kinds.finetuning import targets_of
from mdsmix.mix.checks.columns import shape
from mdsmix.mix.first_samples import (
    labels,
    token_samples,
)
from mdsmix.mix.streams import Loader, Mix, StreamInMix
from mdsmix.training.findings import Finding, check_streams
from mdsmix.training.keys import OWN


@check_streams(
    "error",
    "sequence_id is worked out from this token; where no sample holds it, all documents of a row attend to each other.",
)
def separator_absent(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    is_marked = loader.is_text or (loader.is_own and shape(stream, OWN) == "tokens")
    for word in ("eos", "bos") if is_marked else ():
        token = loader.dataset.get(f"{word}_token_id")
        if isinstance(token, int) and _lacks(stream, loader, word, token):
            yield Finding(
                f"{{loader}} sets {word}_token_id: {token}, and {stream.name} was written without that token.",
                f"convert the stream again with add_{word}: true, or leave {word}_token_id out.",
            )


def _lacks(stream: StreamInMix, loader: Loader, word: str, token: int) -> bool:
    manifest = stream.trusted_manifest
    if manifest and getattr(manifest.encoding, f"add_{word}") is not False:
        return False
    is_seen = any((s.ids == token).any() for s in token_samples(stream, loader))
    return not is_seen and bool(manifest or stream.head.samples)


@check_streams(
    "error",
    "The collator fails on such a sample when it comes up, in mid-training (IndexError or ValueError).",
)
def sample_unusable(mix: Mix, loader: Loader, stream: StreamInMix) -> Iterator[Finding]:
    if loader.is_text or _was_judged(stream, loader):
        return
    if reasons := {*_text_reasons(stream), *_token_reasons(stream, loader)}:
        yield Finding(
            f"the first samples of {stream.name} hold some that cannot be trained on under max_seq_len "
            f"{loader.max_seq_len} and {'/'.join(loader.targets)}: {', '.join(sorted(reasons))}.",
            "convert the stream again with `mdsmix convert`, which leaves such records out and counts them.",
        )


def _was_judged(stream: StreamInMix, loader: Loader) -> bool:
    """Whether every sample was judged by this loader's rule when it was encoded: its shard need not be looked at."""
    if stream.trusted_manifest is None:
        return False
    encoding, limit = stream.trusted_manifest.encoding, loader.max_seq_len or 0
    if not kind_of(encoding).has_targets:
        return limit >= 2  # a prompt of one token, and something behind it
    made, wanted = targets_of(encoding), loader.target_policies
    is_alike = wanted is not None and replace(wanted, max_seq_len=made.max_seq_len) == made
    return is_alike and made.max_seq_len <= limit


def _text_reasons(stream: StreamInMix) -> Iterator[str]:
    for sample in stream.head.samples:
        for column in ("prompt", "response", "completion"):
            if sample.get(column) == "":
                yield f"empty_{column}"


def _token_reasons(stream: StreamInMix, loader: Loader) -> Iterator[str]:
    """The verdicts on token samples, by the rule that the encoder itself uses."""
    found, targets = token_samples(stream, loader), loader.target_policies
    if targets and found and shape(stream, "finetuning") in ("turns", "input_ids"):
        for verdict in labels(found, targets).verdicts():
            if verdict != USABLE:
                yield VERDICTS[int(verdict)]
