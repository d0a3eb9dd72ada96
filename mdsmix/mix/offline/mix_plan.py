"""What a mix will be, settled before a sample is read: how many of which stream, in which columns, under which manifest.

All of it follows from the recipe, the indexes and the manifests. So what cannot be mixed is refused before anything is
downloaded, and a second run knows by one key that nothing changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson
import xxhash

from mdsmix.errors import MixRefused
from mdsmix.kinds import kind_of
from mdsmix.mix.check import findings
from mdsmix.mix.draws import draws_of
from mdsmix.mix.streams import Mix, StreamInMix
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, TokenizerCard
from mdsmix.shards.shard_layout import ShardLayout
from mdsmix.shards.token_ids import has_images
from mdsmix.training.findings import CHECKS, Finding

BUCKET_BYTES = 120 << 20
"120 MiB of samples are shuffled in memory at a time, and become two shards. The bytes of a mix follow from it."
BUCKET_ROWS = 1 << 20
"And at most about a million samples, 40 bytes of bookkeeping each."
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
TRAINED_BY = ("decoder_only_format", "target_prompts", "target_responses")
"Keys of Encoding that decide what is trained of turns: all streams that have targets must agree."
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
"Keys of Encoding that say how samples came about: null where streams differ."


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
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)

    @property
    def buckets(self) -> int:
        drawn = sum(source.drawn for source in self.sources)
        return max(-(-self.bytes // BUCKET_BYTES), -(-drawn // BUCKET_ROWS))

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
    sources = tuple(
        Source(stream=s, drawn=n, weight=mix.shares.weight(s.name) if mix.shares else s.weight)
        for s, n in sorted(
            zip(mix.train.streams, drawn, strict=True), key=lambda each: each[0].name
        )
        if n
    )
    if not sources:
        raise MixRefused("the weights draw no sample of any stream; give one a weight above 0.")
    streams = [source.stream for source in sources]
    layout = _shared_layout(streams, compression)
    encoding, tokenizer = _merged(streams) or (None, None)
    if encoding:
        encoding = replace(encoding, compression=layout.compression)
    return MixPlan(
        sources=sources, seed=seed, layout=layout, encoding=encoding, tokenizer=tokenizer
    )


def _shared_layout(streams: Sequence[StreamInMix], compression: str | None) -> ShardLayout:
    """The layout of all shards; samples of equal columns are equal in their bytes, so they can be copied."""
    first = streams[0]
    for other in streams[1:]:
        if dict(other.columns) != dict(first.columns):
            raise MixRefused(
                f"{first.name} holds {_spelled(first)}, and {other.name} holds {_spelled(other)}: one stream has one set of columns; convert "
                "both for the same loader (columns: compact gives conversations the columns of pairs, layout: document those of text, "
                "images: {} those of streams with images), or mix them while training (`mdsmix render-yaml`)."
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


def _spelled(stream: StreamInMix) -> str:
    return ", ".join(f"{column}: {encoding}" for column, encoding in stream.columns.items())


def _merged(streams: Sequence[StreamInMix]) -> tuple[Encoding, TokenizerCard] | None:
    """What one manifest can say of the samples of all streams; None where one of them has no manifest."""
    found = {s.name: s.trusted_manifest for s in streams}
    manifests = {name: manifest for name, manifest in found.items() if manifest}
    if len(manifests) < len(found):
        return None
    made = {name: manifest.encoding for name, manifest in manifests.items()}
    targeted = {name: e for name, e in made.items() if kind_of(e).has_targets}
    for key in TRAINED_BY:
        _refuse_two({name: (key, getattr(e, key)) for name, e in targeted.items()})
    _refuse_two({name: ("loader", e.loader) for name, e in made.items()})
    for key in ("token", "processor"):
        _refuse_two({n: (f"images.{key}", e.images.get(key)) for n, e in made.items()})
    # Conversations lead: samples depend on their chat template.
    leading = manifests[
        min(made, key=lambda n: (n not in targeted, not kind_of(made[n]).has_template))
    ]
    first, *others = encodings = list(made.values())
    disputed: dict[str, Any] = {
        k: None for k in BY_THE_WAY if any(getattr(e, k) != getattr(first, k) for e in others)
    }
    encoding = replace(
        leading.encoding,
        **disputed,
        # Pairs may share columns with conversations; what holds for those must then hold for all.
        compact=any(e.compact for e in targeted.values()),
        max_seq_len=max(e.max_seq_len for e in encodings),
        special_tokens_in_text=" + ".join(sorted({e.special_tokens_in_text for e in encodings})),
        images={k: v for k, v in first.images.items() if all(e.images.get(k) == v for e in others)},
        duplicates="keep",  # a sample may be drawn any number of times
        fields={k: v for e in encodings for k, v in e.fields.items()},
    )
    return encoding, leading.tokenizer


def _refuse_two(said: Mapping[str, tuple[str, Any]]) -> None:
    """MixRefused where streams were converted under two values of a key that decides how a sample is trained."""
    for name, (key, value) in said.items():
        first, (_, other) = next(iter(said.items()))
        if value != other:
            raise MixRefused(
                f"{first} was converted under {key}: {other}, and {name} under {key}: {value}. Both decide how a sample is trained or "
                "loaded, and a mix can state only one; convert both under the same."
            )
