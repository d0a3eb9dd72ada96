"""What a mix will be, settled before a sample is read: how many of which stream, in which columns, under which manifest.

All of it follows from the recipe, the indexes and the manifests. So what cannot be mixed is refused before anything is
downloaded, and a second run knows by one key that nothing changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import xxhash

from mdsmix.errors import MixRefused
from mdsmix.mix.check import findings
from mdsmix.mix.draws import draws_of
from mdsmix.mix.offline.manifests import merged
from mdsmix.mix.streams import Mix, StreamInMix
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, TokenizerCard
from mdsmix.shards.shard_layout import ShardLayout
from mdsmix.shards.token_ids import has_images
from mdsmix.training.findings import CHECKS, Finding

BUCKET_BYTES = 120 << 20
"120 MiB of samples are shuffled in memory at a time, and become two shards. The bytes of a mix follow from it."
BUCKET_ROWS = 1 << 20
"And at most about a million samples, 40 bytes of bookkeeping each."
PAIR = ("input_ids", "labels")
OF_THE_RUN = (
    "images-",
    "shuffle-",
    "epoch-",
    "canonical-",
    "batching-",
    "length-",
    "model-",
    "eval-",
)
"Checks that judge how a loader draws batches, or for which model: a mixed stream has neither."


@dataclass(frozen=True, kw_only=True)
class Source:
    """One stream and what is drawn of it."""

    stream: StreamInMix
    drawn: int
    "Samples, each as often as it is drawn."
    weight: Mapping[str, Any]
    "As the recipe gave it."

    @property
    def bytes(self) -> int:
        """What the drawn samples come to, taken for as large as the mean."""
        index = self.stream.index
        raw = sum(shard.raw_data.bytes for shard in index.shards)
        return raw * self.drawn // max(1, index.samples)


@dataclass(frozen=True, kw_only=True)
class MixPlan:
    """A whole mix."""

    sources: tuple[Source, ...]
    "By name, so that the order in a recipe shapes no byte."
    seed: int
    layout: ShardLayout
    encoding: Encoding | None
    "None, as the tokenizer, where a stream has no manifest."
    tokenizer: TokenizerCard | None

    @property
    def drawn(self) -> int:
        return sum(source.drawn for source in self.sources)

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)

    @property
    def buckets(self) -> int:
        return max(-(-self.bytes // BUCKET_BYTES), -(-self.drawn // BUCKET_ROWS))

    @property
    def key(self) -> str:
        """Of everything that shapes the mix or its manifest, 32 hex digits."""
        streams = [[s.stream.name, s.stream.index.hash, s.weight, s.drawn] for s in self.sources]
        identity = [
            self.encoding and self.encoding.stated,
            self.tokenizer and asdict(self.tokenizer),
        ]
        shaping = [FORMAT_VERSION, self.seed, streams, self.layout.settings, identity]
        return xxhash.xxh128_hexdigest(orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS))


def findings_on_streams(mix: Mix) -> list[Finding]:
    """Errors and warnings on the streams themselves and their weights."""
    return [f for f in findings(mix) if f.severity != "note" and _is_of_streams(f.id)]


def _is_of_streams(check: str) -> bool:
    is_of_run = CHECKS[check].of == "section" or check.startswith(OF_THE_RUN)
    return check.startswith("weights-") or not is_of_run


def make_plan(mix: Mix, compression: str | None, seed: int) -> MixPlan:
    """The plan of a mix that the checks let pass; MixRefused where its streams cannot become one."""
    drawn = draws_of(mix.train)
    assert drawn is not None, "the checks on weights refuse what Streaming refuses"
    pairs = zip(mix.train.streams, drawn, strict=True)
    sources = sorted(
        (
            Source(
                stream=stream,
                drawn=n,
                weight=mix.shares.weight(stream.name) if mix.shares else stream.weight,
            )
            for stream, n in pairs
            if n
        ),
        key=lambda source: source.stream.name,
    )
    if not sources:
        raise MixRefused("the weights draw no sample of any stream; give one a weight above 0.")
    streams = [source.stream for source in sources]
    layout = _shared_layout(streams, compression)
    encoding, tokenizer = merged(streams) or (None, None)
    if encoding:
        encoding = dataclasses.replace(encoding, compression=layout.compression)
    return MixPlan(
        sources=tuple(sources),
        seed=seed,
        layout=layout,
        encoding=encoding,
        tokenizer=tokenizer,
    )


def _shared_layout(streams: Sequence[StreamInMix], compression: str | None) -> ShardLayout:
    """The layout of all shards; samples of equal columns are equal in their bytes, so they can be copied."""
    first = streams[0]
    for other in streams[1:]:
        if dict(other.columns) != dict(first.columns):
            raise MixRefused(
                f"{first.name} holds {_spelled(first)}, and {other.name} holds {_spelled(other)}: one stream has one "
                f"set of columns; {_way(first, other)}, or mix them while training (`mdsmix render-yaml`)."
            )
    layout = ShardLayout(first.columns, None if has_images(first.columns) else compression)
    for stream in streams:
        for shard in stream.shards:
            if shard.column_sizes != layout.settings["column_sizes"]:
                raise MixRefused(
                    f"the shard {shard.stored.basename} of {stream.name} says that its columns have the sizes "
                    f"{shard.column_sizes}, which do not follow from {_spelled(stream)}; convert the stream again."
                )
    return layout


def _way(first: StreamInMix, other: StreamInMix) -> str:
    """How two streams come to hold the same columns, if they can."""
    turns = [stream.name for stream in (first, other) if "turns" in stream.columns]
    blind = [stream.name for stream in (first, other) if not has_images(stream.columns)]
    if len(blind) == 1:
        return (
            f"convert {blind[0]} with images: {{}}, which holds conversations of text alone as well"
        )
    if len(turns) == 1:
        return (
            f"convert {turns[0]} with columns: compact, the columns of pairs (they hold what target_prompts: none and "
            "target_responses: last train; under other targets the two never become one stream)"
        )
    if {frozenset(stream.columns) for stream in (first, other)} == {frozenset(PAIR)}:
        fixed = [
            s.name for s in (first, other) if any(e.count(":") > 1 for e in s.columns.values())
        ]
        if len(fixed) == 1:
            return f"convert {fixed[0]} with layout: document, which has the columns of pairs"
    return "convert both for the same loader and layout, by one tokenizer"


def _spelled(stream: StreamInMix) -> str:
    return ", ".join(f"{column}: {encoding}" for column, encoding in stream.columns.items())
