"""The sections of a recipe, one frozen dataclass each. The sections of a stream are in
`stream_spec`.

Nothing here reads a file or checks a combination of keys; `read.py` and `rules.py` do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

from mdsmix.frozen import frozen
from mdsmix.json_schema import match_whole
from mdsmix.recipe.amounts import (
    A_BUDGET,
    A_SHARE,
    ABOVE_WHOLE,
    BUDGET_PATTERN,
    LONE_SHARE,
    NO_BUDGET,
    NOTHING,
    is_phase_budget,
    match_share,
    read_budget,
    read_share,
)
from mdsmix.recipe.stream_spec import (
    NOT_NEGATIVE,
    POSITIVE,
    SET_BY_READER,
    StreamSpec,
    key,
    must_be,
)
from mdsmix.schema import ShortForm

MAX_BAD = "10%"
"The default of `max_bad`."
COMPRESSION = re.compile(r"zstd(:([1-9]|1\d|2[0-2]))?")


@frozen(kw_only=True)
class TokenizerSpec:
    """The tokenizer, in the words of LLM-Foundry."""

    SHORT_FORM: ClassVar[ShortForm] = ShortForm("name", "a name, or keys and values")
    name: str = key(MISSING, "path", "name_or_path", "tokenizer_name_or_path")
    """A folder, a hub name, or a lone `tokenizer.json`, which Foundry cannot load: `render-yaml`
    then needs a remote.
    """
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `AutoTokenizer.from_pretrained`; an argument that the tokenizer's class
    does not read is refused.
    """
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, `{enable_thinking: false}`; a variable that the template does
    not read is refused.
    """
    stop_tokens: list[str] = field(default_factory=list)
    """The tokens at which the model stops to generate, `["<|user|>", "<|observation|>"]`; without
    it the `eos_token_id` of the generation_config.json next to the tokenizer ([the end of an
    answer](conversations.md#the-end-of-an-answer)).
    """
    backend: Literal["auto", "reference", "fastokens"] = "auto"
    """The encoder: `reference`, `fastokens`, or `auto`: fastokens if it is proved equal to the
    reference, otherwise the reference.
    """
    published_hash: str = field(default="", metadata={"set by": "published streams"})
    "The tokenizer's hash in the manifests of published streams, if an earlier rule computed it."


@frozen(kw_only=True)
class WeightSpec:
    """A stream's part of an epoch. A recipe sets exactly one of the first four keys: `repeat`,
    `proportion` or `choose` of Streaming's Stream, or `share`.
    """

    SHORT_FORM: ClassVar[ShortForm] = ShortForm(
        "share",
        "a share with %, such as 30%, or keys and values, such as {repeat: 2} or {share: 0.3}: a "
        "number alone could be a repeat or a share",
        LONE_SHARE.pattern,
    )
    repeat: int | float | None = key(None, must=NOT_NEGATIVE)
    "How often each sample is taken, as Streaming's `repeat`."
    proportion: int | float | None = key(None, must=NOT_NEGATIVE)
    "The part of an epoch's samples, as Streaming's `proportion`."
    choose: int | None = key(None, must=NOT_NEGATIVE)
    "The number of samples, as Streaming's `choose`."
    share: str | int | float | None = key(
        None,
        must=must_be(
            A_SHARE, lambda value: read_share(value) >= 0, minimum=0, pattern=match_share()
        ),
    )
    """The part of an epoch's tokens, or of the unit in `count`: `0.3`, `30%` or `1/3`. Streams
    without a share divide the rest in proportion to their size.
    """
    max_repeat: int | float | None = key(None, must=POSITIVE)
    "In a mix by shares: how often an epoch may draw each sample of this stream."

    @property
    def set_keys(self) -> dict[str, str | int | float]:
        """The weight that the recipe sets, with its key: `{"share": "30%"}`."""
        values = dataclasses.asdict(self)
        del values["max_repeat"]
        return {key: value for key, value in values.items() if value is not None}


@frozen(kw_only=True)
class PhaseSpec:
    """A phase of a run: how many tokens it trains, and the shares of its streams."""

    budget: str | int | float = key(
        must=must_be(
            f"{A_BUDGET}; or a part of the recipe's budget, such as 10%",
            is_phase_budget,
            type="string",
            anyOf=[
                {"pattern": BUDGET_PATTERN, "not": {"pattern": NO_BUDGET}},
                {"pattern": match_whole(LONE_SHARE.pattern), "not": {"pattern": NOTHING}},
            ],
        )
    )
    "The size of the phase: `10B tokens`, or `10%` of the recipe's `budget`."
    mix: Mapping[str, WeightSpec]
    "The shares of the phase's streams, by their names. Streams that are not named are not drawn."
    max_repeat: int | float | None = key(None, must=POSITIVE)
    "The `max_repeat` of this phase. What earlier phases drew of a stream counts too."
    shuffle_seed: int | None = key(None, must=NOT_NEGATIVE)
    "The `shuffle_seed` of this phase."


@frozen(kw_only=True)
class Recipe:
    """A recipe: the settings of a whole run. Its paths are absolute, or URLs."""

    folder: Path = field(default=Path(), metadata=SET_BY_READER)
    "The folder of the recipe."
    tokenizer: TokenizerSpec = key(example="Qwen/Qwen2.5-7B")
    "A folder or a hub name, or the keys `tokenizer.<key>`."
    max_seq_len: int = key(
        must=must_be(
            "from 2, since one token gives no loss, to 2^31 - 1",
            range(2, 2**31).__contains__,
            minimum=2,
            maximum=2**31 - 1,
        ),
        example="2048",
    )
    "Tokens of a row, shared by all streams."
    streams: Mapping[str, StreamSpec] = key(
        example="{web: {kind: pretraining, source: {path: data.jsonl, text: text}}}"
    )
    "The streams, by their names."
    processor: str | None = None
    """The folder or hub name of a vision-language model's [processor](images.md#the-processor). It
    counts the tokens of each image.
    """
    decoder_only_format: bool = True
    "`false`: encoder-decoder, for finetuning streams only."
    target_prompts: str = "none"
    "The prompts that are trained: `none`, `all`, `length>=N` (tokens)."
    target_responses: Literal["last", "all"] = "last"
    "The answers of a conversation that are trained."
    special_tokens_in_text: Literal["escape", "allow", "reject"] = "escape"
    """How `<|im_start|>` inside a text is read: as text (`escape`), as the control token (`allow`),
    or as a fault (`reject`) ([encode](../mdsmix/encode/README.md#special-tokens-in-text)).
    """
    compression: str | None = key(
        None,
        must=must_be(
            "zstd or zstd:N with N from 1 to 22",
            COMPRESSION.fullmatch,
            pattern=match_whole(COMPRESSION.pattern),
        ),
    )
    "The compression of the shards: `zstd`, or `zstd:1` to `zstd:22`."
    max_bad: str | int | float = key(
        MAX_BAD,
        must=must_be(
            "a share such as 0.001 or 0.1%",
            lambda value: read_share(value) <= 1,
            minimum=0,
            maximum=1,
            pattern=match_share(),
            **{"not": {"type": "string", "pattern": ABOVE_WHOLE}},
        ),
    )
    """The share of quarantined records, `0.001` or `0.1%`, above which nothing is published; `1.0`
    allows any. One bad record alone is never too many, unless the share is below the default.
    """
    publish: Literal["replace", "versioned"] = "replace"
    """`replace`: a rebuild takes the place of the stream; `versioned`: it becomes a folder
    `<stream>/<split>-<hash8>/`, which never changes.
    """
    remote: str | None = None
    """`s3://bucket/prefix`, `gs://bucket/prefix` or `azure://HOST/container/prefix`
    ([the host](publishing.md#azure-blob-storage)): streams are published there and streamed from
    there. To a bucket of the hub, `hf://buckets/org/name`, they are only
    [published](publishing.md#buckets-of-the-hugging-face-hub).
    """
    local: str | None = None
    """Without a remote the folder where streams are published; with one the training node's cache,
    which `convert` never writes.
    """
    shared: bool = False
    """With [`--engine ray`](many-machines.md#a-ray-cluster): local paths are the same folders on
    every node, as a mount is.
    """
    mdsmix_on_nodes: bool = False
    """Training nodes have mdsmix, which [fetches the
    tokenizer](publishing.md#the-tokenizer-beside-the-streams); with `train_loader.name: mdsmix`
    they have it anyway.
    """
    mix: Mapping[str, WeightSpec] = field(default_factory=dict)
    """The [weight](mixing.md) of each stream, by its name; `repeat: 1` for the others. `30%` is
    short for `{share: 30%}`.
    """
    budget: str | int | float | None = key(
        None,
        must=must_be(
            A_BUDGET,
            lambda value: read_budget(value) is not None,
            type=["string", "null"],  # a number has no unit
            pattern=BUDGET_PATTERN,
            **{"not": {"type": "string", "pattern": NO_BUDGET}},
        ),
    )
    """The size of an epoch: `2B tokens`, `500M loss_tokens`, `1M samples` or `2 passes of STREAM`
    (`k`, `M`, `B`, `T` are thousands). Without it: the largest epoch that takes no stream
    more than once.
    """
    count: Literal["tokens", "loss_tokens", "samples"] | None = None
    """The unit of shares: `tokens` that the model sees, `loss_tokens` that it is trained on, or
    `samples`. Without it: the budget's, otherwise `tokens`.
    """
    max_repeat: int | float = key(4, must=POSITIVE)
    """How often an epoch, or all phases together, may draw each sample of a stream. What a share
    has more than that goes to the other streams, in proportion to their shares; under `absolute:
    true` it is refused. `mix.<name>.max_repeat` is for one stream.
    """
    phases: Mapping[str, PhaseSpec] = field(default_factory=dict)
    """The [phases](mixing.md#phases) of the run by their names, in their order, such as `main` and
    `anneal`. Each phase has a mix of its own.
    """
    phase: str | None = None
    """The phase that a command is about, usually given as an override: `mdsmix preview RECIPE
    phase=anneal`.
    """
    temperature: int | float = key(1, must=POSITIVE)
    "Streams without a share are drawn in proportion to their size to the power of 1 / temperature."
    absolute: bool = False
    """Each share is a part of the whole budget, and shares need not sum to 1. So a stream gets the
    same amount whether it is planned alone or with others.
    """
    train_loader: Mapping[str, Any] = field(default_factory=dict)
    "`name`, and any key that the chosen Foundry loader knows, `dataset` keys included."

    @property
    def is_opened(self) -> bool:
        """Whether the recipe was read by `open_recipe`, so that its paths are absolute."""
        return self.folder.is_absolute()

    @property
    def loader(self) -> str:
        """The training loader, `text`, `finetuning` or `mdsmix`: it decides the columns of every
        stream. Only `mdsmix` reads packed rows, images and loss weights.
        """
        if "name" in self.train_loader:
            return str(self.train_loader["name"])
        for stream in self.streams.values():
            if stream.pack or stream.has_images or stream.loss_weights:
                return "mdsmix"
        kinds = {stream.kind for stream in self.streams.values() if stream.kind}
        return "text" if kinds == {"pretraining"} else "finetuning"

    @property
    def has_plain_rows(self) -> bool:
        """Whether pretraining rows that are not packed have the single column `tokens`. The text
        loader and mdsmix's loader read it. The finetuning loader does not: for it, the columns are
        `input_ids` and `labels`.
        """
        return self.loader in ("text", "mdsmix")

    @property
    def max_bad_share(self) -> Fraction:
        """`max_bad` as an exact fraction: in floats, 29 of 100 records would be more than 29%."""
        return read_share(self.max_bad)

    @property
    def sourced(self) -> list[StreamSpec]:
        """The streams that `convert` makes."""
        return [stream for stream in self.streams.values() if stream.source]

    def choose_sourced(self, only: Collection[str]) -> list[StreamSpec]:
        """Return those of `sourced` with these names, and those that are held out of them; without
        names, all of `sourced`.
        """
        if not only:
            return self.sourced
        return [
            stream
            for stream in self.sourced
            if not {stream.name, stream.held_out_of}.isdisjoint(only)
        ]

    @property
    def trained(self) -> list[StreamSpec]:
        """The streams of the split `train`, which are mixed. Streams of any other split are only
        evaluated on.
        """
        return [stream for stream in self.streams.values() if stream.split == "train"]

    @property
    def is_by_share(self) -> bool:
        """Whether shares decide how often each stream is drawn. Otherwise Streaming's own weights
        decide: `repeat`, `proportion` and `choose`.
        """
        has_shares = any(weight.share is not None for weight in self.mix.values())
        return has_shares or self.budget is not None or self.temperature != 1

    def find_max_repeat(self, stream: str) -> int | float:
        """Return how often an epoch of a mix by shares may draw each sample of a stream."""
        own = self.mix.get(stream, WeightSpec()).max_repeat
        return self.max_repeat if own is None else own

    def published(self, stream: StreamSpec) -> str:
        """Return the URL or folder that contains a folder for each split of the stream, such as
        `s3://bucket/mix/web`.
        """
        if stream.source is None:
            return str(stream.remote or stream.local)
        return f"{self.remote or self.local}/{stream.held_out_of or stream.name}"

    def target(self, stream: StreamSpec, limit: int | None) -> str:
        """Return the URL or folder where the stream is published, such as
        `s3://bucket/mix/web/train`.

        Args:
            stream: a stream with a source.
            limit: the value of `--limit`; None: all records are converted.
        """
        folder = f"limit-{limit}" if limit else stream.split
        return f"{self.published(stream)}/{folder}"
