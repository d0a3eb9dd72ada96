"""The plan of an offline mix, made before a sample is read: the samples of each stream, their
columns and the manifest.

The plan is computed from the recipe, the indexes and the manifests. So streams that cannot be mixed
are refused before anything is downloaded. A hash of the plan, its key, shows a second run whether
anything has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import orjson
import xxhash

from mdsmix import __version__
from mdsmix.errors import MixRefused
from mdsmix.foundry_yaml.findings import Finding
from mdsmix.foundry_yaml.rules import RULES
from mdsmix.foundry_yaml.training_yaml import Settings
from mdsmix.frozen import frozen
from mdsmix.kinds import kind_of
from mdsmix.kinds.encodings import find_raised_rules
from mdsmix.messages import plural
from mdsmix.mix.check import run_checks
from mdsmix.mix.epoch.draws import count_loader_draws
from mdsmix.mix.streams.mix import Mix, StreamInMix
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest
from mdsmix.shards.shard_files import ShardLayout
from mdsmix.shards.token_ids import has_images

BUCKET_BYTES = 120 << 20
"""Bytes of samples to shuffle in memory at a time: 120 MiB, which become two shards. A mix's
published bytes depend on it.
"""
BUCKET_ROWS = 1 << 20
"Samples of a bucket at most, about a million: each takes 40 bytes of bookkeeping."
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
"""Keys of Encoding that decide which tokens of turns are trained. All streams with target policies
must have the same values of these keys.
"""
DESCRIPTIVE_KEYS = (
    "layout",
    "add_bos",
    "add_eos",
    "min_tokens",
    "max_tokens",
    "max_gen_len",
    "date_string",
    "where",
    "sample",
    "holdout",
    "id",
)
"Keys of Encoding on how samples were made. A key is null in the mix if its streams differ in it."


@frozen(kw_only=True)
class Source:
    """One stream, and the samples that are drawn from it."""

    stream: StreamInMix
    drawn: int
    "Number of draws. A sample that is drawn twice counts twice."
    weight: Settings
    "The weight that the recipe gives the stream, such as `repeat: 2`."
    drawn_before: int = 0
    "Number of draws of earlier phases. Samples that these did not draw are drawn first."

    @property
    def repeated(self) -> int:
        """How many draws are of samples that earlier phases have drawn."""
        unseen = max(0, self.stream.index.samples - self.drawn_before)
        return max(0, self.drawn - unseen) if self.drawn_before else 0

    @property
    def bytes(self) -> int:
        """Bytes of the drawn samples, estimated by the mean size of the stream's samples."""
        raw = sum(shard.raw_data.bytes for shard in self.stream.shards)
        return raw * self.drawn // max(1, self.stream.index.samples)


@frozen(kw_only=True)
class MixPlan:
    """The plan of an offline mix, which is one stream of samples drawn from others."""

    sources: tuple[Source, ...]
    "Sorted by name, so that the order in the recipe does not matter."
    seed: int
    layout: ShardLayout
    manifest: Manifest | None
    """The mix's manifest, without counts for now. None if a stream has no manifest, because the
    contents of the mix are unknown then.
    """

    @property
    def bytes(self) -> int:
        """Bytes of all drawn samples, estimated."""
        return sum(source.bytes for source in self.sources)

    @property
    def buckets(self) -> int:
        """Number of buckets (temporary files of samples), so that each can be sorted in memory."""
        drawn = sum(source.drawn for source in self.sources)
        # A bucket has a limit of bytes and a limit of samples. -(-a // b) is a / b, rounded up.
        by_bytes = -(-self.bytes // BUCKET_BYTES)
        by_samples = -(-drawn // BUCKET_ROWS)
        return max(by_bytes, by_samples)

    @property
    def draw(self) -> str:
        """A text that says how samples are drawn: the streams' weights, the seed and the columns,
        and not the contents of the streams. It is stored with the mix. If a folder's mix has
        another text, it counts as another stream and is not silently replaced.
        """
        weights = {source.stream.name: source.weight for source in self.sources}
        weights_json = orjson.dumps(weights, option=orjson.OPT_SORT_KEYS).decode()
        before = {source.stream.name: source.drawn_before for source in self.sources}
        after = ""
        if any(before.values()):
            after = f", after {orjson.dumps(before, option=orjson.OPT_SORT_KEYS).decode()}"
        columns = ", ".join(sorted(self.layout.encodings))
        return f"{weights_json} (seed {self.seed}, columns {columns}{after})"

    @property
    def key(self) -> str:
        """A hash, 32 hex digits, of everything that the mix and its manifest depend on. If it is
        unchanged, the published mix is up to date.
        """
        streams = list[list[Any]]()
        for source in self.sources:
            stream = source.stream
            entry = [stream.name, stream.index.hash, source.weight, source.drawn]
            if source.drawn_before:
                entry.append(source.drawn_before)
            streams.append(entry)
        manifest = self.manifest
        encoding = None
        if manifest:
            encoding = [manifest.encoding.non_defaults, asdict(manifest.tokenizer)]
        inputs = [FORMAT_VERSION, self.seed, streams, self.layout.settings, encoding]
        return xxhash.xxh128_hexdigest(orjson.dumps(inputs, option=orjson.OPT_SORT_KEYS))


def describe_repeats(plan: MixPlan) -> list[str]:
    """Return a line for each stream of a phase that earlier phases have drawn from. Their numbers
    are right only if all phases are mixed with the same seed.
    """
    return [
        f"{source.stream.name}: {plural(source.drawn, 'sample')} of this phase, "
        f"{source.repeated:,} of them drawn before; earlier phases draw {source.drawn_before:,} of "
        f"{source.stream.index.samples:,}"
        for source in plan.sources
        if source.drawn_before
    ]


def check_streams(mix: Mix) -> list[Finding]:
    """Return errors and warnings on the streams and their weights."""
    return [finding for finding in run_checks(mix) if _is_about_streams(finding)]


def _is_about_streams(finding: Finding) -> bool:
    """Check whether a finding is an error or warning about streams or their weights. Findings about
    a loader's settings or batches do not matter here, since an offline mix is one stream and no
    loader reads it yet.
    """
    if finding.severity == "note" or finding.id.startswith(RUN_CHECK_PREFIXES):
        return False
    return finding.id.startswith("weights-") or finding.id not in LOADER_RULES


def plan_mix(mix: Mix, compression: str | None, seed: int) -> MixPlan:
    """Return the plan of a mix that has passed the checks.

    Raises MixRefused if its streams cannot become one stream.
    """
    # The drawn streams and their weights.
    drawn = count_loader_draws(mix.train)
    assert drawn is not None, "the checks on weights refuse what Streaming refuses"
    sources = []
    for stream, draws in zip(mix.train.streams, drawn, strict=True):
        if draws:
            weight = mix.shares.weight(stream.name) if mix.shares else stream.weight
            before = mix.phase.drawn_before.get(stream.name, 0) if mix.phase else 0
            sources.append(Source(stream=stream, drawn=draws, weight=weight, drawn_before=before))
    if not sources:
        raise MixRefused(
            "the mix would be empty: the weights (proportion, repeat or choose) of its streams "
            "draw no sample of any stream; give a stream a weight above 0."
        )
    sources.sort(key=lambda source: source.stream.name)
    _refuse_different_settings([source.stream for source in sources])

    # The layout and manifest of the one stream.
    columns = sources[0].stream.columns  # the same in all streams, as checked above
    # Images are compressed already.
    layout = ShardLayout(columns, None if has_images(columns) else compression)
    manifests = [source.stream.trusted_manifest for source in sources]
    trusted = [manifest for manifest in manifests if manifest]
    manifest = None
    if len(trusted) == len(sources):
        manifest = _merge_manifests(trusted, layout.compression, seed)
    return MixPlan(sources=tuple(sources), seed=seed, layout=layout, manifest=manifest)


def _refuse_different_settings(streams: Sequence[StreamInMix]) -> None:
    """Raise MixRefused if streams differ in a setting that decides how a sample is stored, trained
    or loaded. Samples of equal columns have one format, so their bytes can be copied.
    """
    # The key of a setting -> the name of the first stream with this key, and its value.
    first_by_key: dict[str, tuple[str, Any]] = {}
    for stream in streams:
        for key, value in _list_shared_settings(stream).items():
            first_name, first_value = first_by_key.setdefault(key, (stream.name, value))
            if value != first_value:
                hint = ""
                if key == "columns":
                    hint = (
                        " To give both streams the same columns, set one of these keys in the "
                        "recipe: columns: compact gives conversations the columns of pairs, "
                        "layout: document gives text the columns of pairs, images: {} gives a "
                        "stream the columns of streams with images, and loss_weights: true gives "
                        "conversations a column of weights."
                    )
                raise MixRefused(
                    f"{first_name} has {key}: {first_value}, but {stream.name} has {key}: {value}, "
                    f"and all samples of a mix must have the same {key}. Convert both streams for "
                    "the same loader with the same settings, or mix them while training (`mdsmix "
                    f"render-yaml`).{hint}"
                )


def _list_shared_settings(stream: StreamInMix) -> dict[str, Any]:
    """Return the settings that all streams of an offline mix must share."""
    settings: dict[str, Any] = {"columns": dict(stream.columns)}
    encoding = stream.encoding
    if encoding:
        settings["loader"] = encoding.loader
        if stream.has_targets:
            settings |= {key: getattr(encoding, key) for key in TARGET_KEYS_OF_ENCODING}
        for key in ("token", "processor"):
            settings[f"images.{key}"] = encoding.images.get(key)
    return settings


def _merge_manifests(manifests: Sequence[Manifest], compression: str | None, seed: int) -> Manifest:
    """Return the manifest of the mix, without counts. Its settings are true of all samples of the
    mix, from whichever stream.

    Args:
        manifests: the manifests of the streams.
        compression: the compression of the mix's shards; None: none.
        seed: the seed that draws and shuffles the samples.
    """
    leading = max(manifests, key=_rank_manifest)
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version=__version__,
        encoding=_merge_encodings(leading.encoding, [m.encoding for m in manifests], compression),
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


def _rank_manifest(manifest: Manifest) -> tuple[bool, bool]:
    """Return a sort key of a stream's manifest: (whether target policies decide which tokens are
    trained, whether a chat template made its text). The mix gets its encoding and tokenizer from
    the manifest with the largest key.

    Conversations have the largest key, (True, True), because their samples depend on the
    tokenizer's chat template.
    """
    kind = kind_of(manifest.encoding)
    return kind.has_targets, kind.has_template


def _merge_encodings(
    leading: Encoding, encodings: Sequence[Encoding], compression: str | None
) -> Encoding:
    """Return the encoding of the mix: its settings are true of the samples of all streams.

    Args:
        leading: the encoding whose value the mix takes for each setting that may differ between
            streams.
        encodings: the encodings of all streams.
    """
    different: dict[str, Any] = {}
    for key in DESCRIPTIVE_KEYS:
        if any(getattr(encoding, key) != getattr(leading, key) for encoding in encodings):
            different[key] = None
    images = {}
    for key, value in leading.images.items():
        if all(encoding.images.get(key) == value for encoding in encodings):
            images[key] = value
    fields = dict[str, str]()
    for encoding in encodings:
        fields |= encoding.fields
    special_tokens = sorted({encoding.special_tokens_in_text for encoding in encodings})
    merged = replace(
        leading,
        **different,
        # Pairs may share columns with compact conversations: the whole mix is then compact.
        compact=any(e.compact for e in encodings if kind_of(e).has_targets),
        max_seq_len=max(encoding.max_seq_len for encoding in encodings),
        special_tokens_in_text=" + ".join(special_tokens),
        images=images,
        duplicates="keep",  # a sample may be drawn any number of times
        fields=fields,
        compression=compression,
    )
    return replace(merged, rules=_find_oldest_rules(merged, encodings))


def _find_oldest_rules(merged: Encoding, encodings: Sequence[Encoding]) -> dict[str, int]:
    """Map each conversion rule that made samples of the mix to the oldest version of the rule that
    was used. Rules of version 1 are left out.

    Args:
        merged: the encoding of the mix.
        encodings: the encodings of its streams.
    """
    oldest = dict[str, int]()
    for encoding in encodings:
        for rule in find_raised_rules(encoding, tokenizer=None):
            version = encoding.rules.get(rule, 1)
            oldest[rule] = min(version, oldest.get(rule, version))
    # Rules that apply only to the merged encoding have their current version.
    rules = find_raised_rules(merged, tokenizer=None) | oldest
    return {rule: version for rule, version in rules.items() if version > 1}
