"""The plan of a mix, settled before a sample is read: the samples of each stream, their columns,
their manifest.

The plan follows from the recipe, the indexes and the manifests. So streams that cannot be mixed are
refused before anything is downloaded, and a second run knows by one key that nothing changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson
import xxhash

from mdsmix import __version__
from mdsmix.errors import MixRefused
from mdsmix.foundry_yaml.findings import Finding
from mdsmix.foundry_yaml.rules import RULES
from mdsmix.foundry_yaml.training_yaml import Settings
from mdsmix.kinds import kind_of
from mdsmix.kinds.encodings import find_raised_rules
from mdsmix.mix.check import run_checks
from mdsmix.mix.epoch.draws import count_loader_draws
from mdsmix.mix.streams.mix import Mix, StreamInMix
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest
from mdsmix.shards.shard_files import ShardLayout
from mdsmix.shards.token_ids import has_images

BUCKET_BYTES = 120 << 20
"""Bytes of samples that are shuffled in memory at a time: 120 MiB, which become two shards. The
bytes of a mix depend on it.
"""
BUCKET_ROWS = 1 << 20
"The most samples of a bucket, about a million: each takes 40 bytes of bookkeeping."
RUN_CHECK_PREFIXES = (
    "images-",
    "shuffle-",
    "epoch-",
    "canonical-",
    "batching-",
    "length-",
    "model-",
    "eval-",
)
"Checks that judge a loader's batches or the model: a mixed stream has neither."
LOADER_RULES = frozenset(rule.id for rule in RULES if rule.subject == "loader section")
TARGET_KEYS_OF_ENCODING = ("decoder_only_format", "target_prompts", "target_responses")
"""Keys of Encoding that decide which tokens of turns are trained. All streams with targets must
agree on them.
"""
DESCRIPTIVE_KEYS = (
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
"Keys of Encoding on how samples were made; null in the mix where streams differ."


@dataclass(frozen=True, kw_only=True)
class Source:
    """One stream, and the samples that are drawn from it."""

    stream: StreamInMix
    drawn: int
    "Samples that are drawn; a sample drawn twice counts twice."
    weight: Settings
    "The weight that the recipe gives the stream, such as `repeat: 2`."

    @property
    def bytes(self) -> int:
        """Bytes of the drawn samples, estimated by the mean size of the stream's samples."""
        raw = sum(shard.raw_data.bytes for shard in self.stream.shards)
        return raw * self.drawn // max(1, self.stream.index.samples)


@dataclass(frozen=True, kw_only=True)
class MixPlan:
    """The plan of a whole mix."""

    sources: tuple[Source, ...]
    "Sorted by name, so that the order in a recipe shapes no byte."
    seed: int
    layout: ShardLayout
    manifest: Manifest | None
    """The mix's manifest, still without counts; None where a stream has no manifest, since its
    contents are not known.
    """

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)

    @property
    def buckets(self) -> int:
        drawn = sum(source.drawn for source in self.sources)
        return max(-(-self.bytes // BUCKET_BYTES), -(-drawn // BUCKET_ROWS))

    @property
    def draw(self) -> str:
        """The draw in words: weights, seed and columns, but not the contents of streams. Another
        draw makes another stream.
        """
        weights = {source.stream.name: source.weight for source in self.sources}
        said = orjson.dumps(weights, option=orjson.OPT_SORT_KEYS).decode()
        return f"{said} (seed {self.seed}, columns {', '.join(sorted(self.layout.encodings))})"

    @property
    def key(self) -> str:
        """A hash of everything that shapes the mix or its manifest, 32 hex digits."""
        streams = [[s.stream.name, s.stream.index.hash, s.weight, s.drawn] for s in self.sources]
        manifest = self.manifest
        identity = manifest and [manifest.encoding.non_defaults, asdict(manifest.tokenizer)]
        shaping = [FORMAT_VERSION, self.seed, streams, self.layout.settings, identity]
        return xxhash.xxh128_hexdigest(orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS))


def check_streams(mix: Mix) -> list[Finding]:
    """Return errors and warnings on the streams themselves and their weights."""
    return [finding for finding in run_checks(mix) if _is_about_streams(finding)]


def _is_about_streams(finding: Finding) -> bool:
    """Check whether a finding is more than a note, and not about a loader that nobody uses here."""
    if finding.severity == "note" or finding.id.startswith(RUN_CHECK_PREFIXES):
        return False
    return finding.id.startswith("weights-") or finding.id not in LOADER_RULES


def plan_mix(mix: Mix, compression: str | None, seed: int) -> MixPlan:
    """The plan of a mix that has passed the checks; MixRefused where its streams cannot become one
    stream.
    """
    drawn = count_loader_draws(mix.train)
    assert drawn is not None, "the checks on weights refuse what Streaming refuses"
    sources = [
        Source(stream=s, drawn=n, weight=mix.shares.weight(s.name) if mix.shares else s.weight)
        for s, n in zip(mix.train.streams, drawn, strict=True)
        if n
    ]
    if not sources:
        raise MixRefused("the weights draw no sample of any stream; give one a weight above 0.")
    sources.sort(key=lambda source: source.stream.name)
    _refuse_unlike({source.stream.name: source.stream for source in sources})
    columns = sources[0].stream.columns
    layout = ShardLayout(columns, None if has_images(columns) else compression)
    manifests = [source.stream.trusted_manifest for source in sources]
    known = [manifest for manifest in manifests if manifest]
    return MixPlan(
        sources=tuple(sources),
        seed=seed,
        layout=layout,
        manifest=_merged(known, layout.compression, seed) if len(known) == len(sources) else None,
    )


def _refuse_unlike(streams: Mapping[str, StreamInMix]) -> None:
    """MixRefused where streams differ in a setting that decides how a sample is stored, trained or
    loaded. Samples of equal columns have one format, so their bytes can be copied.
    """
    known: dict[str, tuple[str, Any]] = {}
    for name, stream in streams.items():
        settings: dict[str, Any] = {"columns": dict(stream.columns)}
        if encoding := stream.encoding:
            keys = ("loader", *(TARGET_KEYS_OF_ENCODING if stream.has_targets else ()))
            settings |= {key: getattr(encoding, key) for key in keys}
            settings |= {f"images.{k}": encoding.images.get(k) for k in ("token", "processor")}
        for key, value in settings.items():
            first, other = known.setdefault(key, (name, value))
            if value != other:
                raise MixRefused(
                    f"{first} has {key}: {other}, and {name} {key}: {value}, and one stream can have only one: convert both for the same loader under "
                    "the same settings (columns: compact gives conversations the columns of pairs, layout: document those of text, images: {} "
                    "those of streams with images), or mix them while training (`mdsmix render-yaml`)."
                )


def _merged(manifests: Sequence[Manifest], compression: str | None, seed: int) -> Manifest:
    """The manifest of the mix, without counts: settings that hold for the samples of all
    streams.
    """
    leading = max(manifests, key=_leads)
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version=__version__,
        encoding=_encoding(leading.encoding, [m.encoding for m in manifests], compression),
        tokenizer=leading.tokenizer,
        backend=", ".join(sorted({manifest.backend for manifest in manifests})),
        totals=Totals(),
        records=Records(),
        sources=[],
        parts=[],
        index_hash="",
        complete=True,
        seed=seed,
    )


def _leads(manifest: Manifest) -> tuple[bool, bool]:
    """The rank of a manifest. Conversations lead, since their samples depend on the tokenizer's
    chat template.
    """
    kind = kind_of(manifest.encoding)
    return kind.has_targets, kind.has_template


def _encoding(
    leading: Encoding, encodings: Sequence[Encoding], compression: str | None
) -> Encoding:
    """The encoding that holds for the samples of all streams."""
    disputed: dict[str, Any] = {
        k: None
        for k in DESCRIPTIVE_KEYS
        if any(getattr(e, k) != getattr(leading, k) for e in encodings)
    }
    images = leading.images.items()
    joined = replace(
        leading,
        **disputed,
        # Pairs may share columns with compact conversations: the whole mix is then compact.
        compact=any(e.compact for e in encodings if kind_of(e).has_targets),
        max_seq_len=max(e.max_seq_len for e in encodings),
        special_tokens_in_text=" + ".join(sorted({e.special_tokens_in_text for e in encodings})),
        images={k: v for k, v in images if all(e.images.get(k) == v for e in encodings)},
        duplicates="keep",  # a sample may be drawn any number of times
        fields={k: v for e in encodings for k, v in e.fields.items()},
        compression=compression,
    )
    return replace(joined, rules=_oldest_rules(joined, encodings))


def _oldest_rules(joined: Encoding, encodings: Sequence[Encoding]) -> dict[str, int]:
    """Return the rules of a drawn stream: name -> the oldest version that shaped any of its
    samples.
    """
    versions = dict[str, int]()
    for encoding in encodings:
        for rule in find_raised_rules(encoding, None):
            made = encoding.rules.get(rule, 1)
            versions[rule] = min(made, versions.get(rule, made))
    found = find_raised_rules(joined, None) | versions
    return {rule: version for rule, version in found.items() if version > 1}
