"""Mixes for the tests of the checks: streams to publish, and training YAMLs and recipes that read
them.

A test needs a folder of its own for its streams, so most functions here return a function that
publishes the streams in a folder and opens the mix (`BuildMix`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mdsmix.kinds import open_recipe
from mdsmix.mix.check import verify_streams
from mdsmix.mix.epoch.apportion import (
    Apportioned,
    StreamShare,
    choose_epoch_samples,
    set_target_shares,
)
from mdsmix.mix.streams.mix import Mix
from mdsmix.mix.streams.resolve import make_mix, make_recipe_mix
from mdsmix.recipe.amounts import Budget
from mdsmix.shards.counts import Records
from mdsmix.shards.published import StreamFault
from mdsmix.storage import locate
from tests import published
from tests.converting import RecordingWatcher
from tests.published import CARD, CONCAT, LENGTH, PAIR, SPLIT, TOKEN_ROW, TURNS, TURNS_ROW, edit

Keys = dict[str, Any]
BuildMix = Callable[[Path], Mix]
"A function that publishes streams in a folder and opens a mix of them."
P = ParamSpec("P")


@dataclass(frozen=True)
class PublishedStream:
    """A stream to publish: 40 equal rows, unless the options set others."""

    name: str
    columns: dict[str, str]
    row: Keys
    options: Keys = field(default_factory=dict)
    """`rows`, or `n` for their number, and arguments of `published.publish`, such as `card` (None:
    without a manifest).
    """
    change: Callable[[Path], object] = bool
    "Applied to the folder of the split after it is published."
    make_section: Callable[[Keys], Keys] = dict
    "Makes the stream's section of the YAML from the keys that name its folder."

    def __call__(self, name: str = "", **options: Any) -> PublishedStream:
        """Return the same stream with another name or other options."""
        return replace(self, name=name or self.name, options=self.options | options)

    def __or__(self, keys: Keys) -> PublishedStream:
        """Return the same stream with these keys in its section."""
        return replace(self, make_section=lambda section: section | keys)

    def publish(self, home: Path) -> Keys:
        """Publish the stream below `home`, and return its section of a YAML."""
        options = {"card": {}} | self.options
        rows = options.pop("rows", None) or [self.row] * options.pop("n", 40)
        folder = published.publish(home / self.name, self.columns, rows, **options)
        self.change(folder / "train")
        return self.make_section({"local": str(folder), "split": "train"})


NO_MANIFEST: Keys = {"card": None}
"Options of a stream that another tool wrote."
TURNS_CARD = {"kind": "finetuning", "layout": None, "add_bos": None, "add_eos": None}
MESSAGES_CARD = {"fields": {"messages": "m"}}
PACKED_CARD = TURNS_CARD | MESSAGES_CARD | {"pack": True}
WEB = PublishedStream("web", CONCAT, TOKEN_ROW)
DOCS = PublishedStream("docs", {"tokens": "ndarray:uint16"}, TOKEN_ROW)
WEB_BARE = WEB(card=None)
CHUNKS = PublishedStream("web", SPLIT, published.SPLIT_ROW)
CHAT = PublishedStream("chat", TURNS, TURNS_ROW)
PACKS = PublishedStream("chat", published.PACKED, published.PACKED_ROW, {"card": PACKED_CARD})
FAQ = PublishedStream("faq", PAIR, published.PAIR_ROW)
TEXT = PublishedStream("raw", {"text": "str"}, {"text": "a"}, NO_MANIFEST)
RAW_COLUMNS = {"prompt": "str", "response": "str"}
RAW = PublishedStream("raw", RAW_COLUMNS, {"prompt": "hi", "response": "ho"}, NO_MANIFEST)
PICKLES = PublishedStream("web", CONCAT | {"x": "pkl"}, TOKEN_ROW | {"x": b"N."}, NO_MANIFEST)
INT32, UINT16 = (
    PublishedStream(
        "old", {"tokens": "bytes"}, {"tokens": dtype(TOKEN_ROW["tokens"]).tobytes()}, NO_MANIFEST
    )
    for dtype in (np.int32, np.uint16)
)
IMAGE_COLUMNS = {"images": "bytes", "sizes": "json", **TURNS}
IMAGE_TURNS = PublishedStream("see", IMAGE_COLUMNS, {"images": bytes(8), "sizes": [], **TURNS_ROW})
TWO_SHARDS = WEB(shards=2, card=None)


def built_later(build: Callable[Concatenate[Path, P], Mix]) -> Callable[P, BuildMix]:
    """Turn a function of a folder and other arguments into one of the other arguments. It returns
    a BuildMix, which is called when the folder is known.
    """
    return lambda *args, **keys: lambda home: build(home, *args, **keys)


@built_later
def train_mix(
    home: Path,
    name: str,
    *streams: PublishedStream,
    loader: Any = (),
    top: Any = (),
    **dataset: Any,
) -> Mix:
    """Return a mix of these streams.

    Args:
        name: the loader's name.
        loader: further keys of train_loader.
        top: further keys at the top of the YAML.
        dataset: further keys of the loader's dataset. `...` as a value removes a key, here and in
            `loader`; without `streams` the dataset is the stream `web` itself.
    """
    sections = {stream.name: stream.publish(home) for stream in streams}
    keys = {"max_seq_len": LENGTH, "shuffle": True, "streams": sections} | dataset
    if keys["streams"] is ...:
        keys |= sections["web"]
    section = {"name": name, "drop_last": True, "num_workers": 2} | dict(loader)
    section["dataset"] = {key: value for key, value in keys.items() if value is not ...}
    section = {key: value for key, value in section.items() if value is not ...}
    config = {"max_seq_len": LENGTH, "train_loader": section} | dict(top)
    return replace(make_mix(config, "train.yaml"), tokenizer=CARD)


mdsmix_loader = partial(train_mix, "mdsmix")


@built_later
def with_remote(home: Path, remote: str) -> Mix:
    """Return a mix of one stream, whose section in the YAML names another remote than the folder
    that was opened.
    """
    mix = text_loader()(home)
    section = deepcopy(mix.train.section)
    section["dataset"]["streams"]["web"]["remote"] = remote
    return replace(mix, train=replace(mix.train, section=section))


def text_loader(*streams: PublishedStream, **keys: Any) -> BuildMix:
    return train_mix("text", *(streams or [WEB]), **keys)


def finetuning_loader(*streams: PublishedStream, **keys: Any) -> BuildMix:
    return train_mix("finetuning", *(streams or [CHAT]), **({"decoder_only_format": True} | keys))


@built_later
def recipe_mix(home: Path, source: bytes | None = b"", **keys: Any) -> Mix:
    """Return the mix of a recipe whose stream `web` is published.

    Args:
        source: the content of its source file now; None if the file is gone.
        keys: keys of the stream that were added to the recipe since the conversion.
    """
    WEB(card={"fields": {"text": "text"}, "min_tokens": 0}).publish(home)
    if source is not None:
        (home / "a.jsonl").write_bytes(source)
    stream = {"kind": "pretraining", "source": {"path": "a.jsonl", "text": "text"}} | keys
    tree = {"tokenizer": "tok", "max_seq_len": LENGTH, "local": ".", "streams": {"web": stream}}
    path = home / "recipe.yaml"
    path.write_text(json.dumps(tree))
    mix = make_recipe_mix(open_recipe(path), str(path), may_estimate=False)
    return replace(mix, run_tokenizer=published.TOKENIZER, tokenizer=CARD)


@built_later
def with_fields(home: Path, build: BuildMix, **fields: Any) -> Mix:
    return replace(build(home), **fields)


@built_later
def mix_by_shares(home: Path, max_repeat: int) -> Mix:
    """Return a mix of two streams of 40 samples. Half of a budget of 160 samples is 80 of each, and
    `web` may be drawn `max_repeat` times.
    """
    shares = [
        StreamShare(
            stream=name,
            samples=40,
            share_units=Fraction(1),
            budget_units=Fraction(1),
            is_exact=True,
            written=Fraction(1),
            max_passes=Fraction(passes),
        )
        for name, passes in (("web", max_repeat), ("docs", 4))
    ]
    budget = Budget(amount=Fraction(160), unit="samples")
    streams = choose_epoch_samples(set_target_shares(shares), budget, "samples")
    apportioned = Apportioned(count="samples", budget=budget, is_absolute=False, streams=streams)
    return replace(text_loader(WEB, DOCS)(home), shares=apportioned)


def chats_ended_by(tokenizer: Any, target_responses: str = "all") -> BuildMix:
    """Return chats of a run with this tokenizer. All their answers are trained by default."""
    card = TURNS_CARD | MESSAGES_CARD | {"target_responses": target_responses}
    mix = finetuning_loader(CHAT(card=card), target_responses=target_responses)
    return with_fields(mix, run_tokenizer=tokenizer)


def with_tokenizer_card(build: BuildMix, **fields: Any) -> BuildMix:
    """Change the card of the run's tokenizer, but not those of the streams."""
    return with_fields(build, tokenizer=replace(CARD, **fields))


def model_keys(name: str | None = None, **section: Any) -> Keys:
    """Return the argument of `train_mix` for a YAML with this model."""
    named = {"name": name} if name else {}
    return {"top": {"model": section | named}}


def tokenizer_keys(name: str) -> Keys:
    """Return the argument of `train_mix` for a YAML with this tokenizer."""
    return {"top": {"tokenizer": {"name": name}}}


def with_totals(stream: PublishedStream, **counts: Any) -> PublishedStream:
    """Change the totals in the stream's manifest."""
    return stream(card=stream.options.get("card", {}) | {"totals": counts})


def with_shard_bytes(stream: PublishedStream, change: Callable[[bytes], bytes]) -> PublishedStream:
    """Change the bytes of the stream's only shard after it is published."""

    def rewrite(folder: Path) -> None:
        (shard,) = folder.glob("shard.*")
        shard.write_bytes(change(shard.read_bytes()))

    return replace(stream, change=rewrite)


def with_local_section(make_section: Callable[[str], Keys], name: str = "web") -> PublishedStream:
    """Return a stream whose section is made from the path of its folder."""
    return replace(WEB(name), make_section=lambda section: make_section(section["local"]))


def cached_index(content: bytes | None) -> BuildMix:
    """Return a mix of a stream with a remote and a local cache. The cached index has this content,
    or that of the remote if it is None.
    """

    def make_section(local: str) -> Keys:
        remote = Path(local, "train")
        cache = Path(local).with_name("cache")
        (cache / "train").mkdir(parents=True)
        (cache / "train/index.json").write_bytes(content or (remote / "index.json").read_bytes())
        return {"remote": local, "local": str(cache), "split": "train"}

    return text_loader(with_local_section(make_section))


def preference_streams(*has_rewards: bool, **dataset: Any) -> BuildMix:
    """Return a mix with a stream of preferences for each argument, with or without a reward."""
    streams = list[PublishedStream]()
    for number, has_reward in enumerate(has_rewards):
        row = dict.fromkeys(("prompt", "chosen", "rejected"), bytes([5] + [0] * 7))
        if has_reward:
            row["chosen_reward"] = bytes(8)
        columns = dict.fromkeys(row, "bytes")
        streams.append(PublishedStream(f"s{number}", columns, row, NO_MANIFEST))
    return train_mix("pairwise_preference", *streams, **dataset)


def prompt_streams(tokens: int = 5, padding_side: str = "left", **dataset: Any) -> BuildMix:
    """Return a mix with a stream of one prompt.

    Args:
        tokens: tokens of the prompt.
        padding_side: the side on which the run's tokenizer pads.
        dataset: further keys of the loader's dataset, such as max_gen_len.
    """
    row = {"prompt": np.full(tokens, 5, "<i8").tobytes()}
    stream = PublishedStream("rl", {"prompt": "bytes"}, row, NO_MANIFEST)
    tokenizer = replace(published.TOKENIZER, padding_side=padding_side)
    mix = train_mix("prompt", stream, **{"max_gen_len": LENGTH - 5} | dataset)
    return with_fields(mix, run_tokenizer=tokenizer)


def labelled_streams(*labels: dict[str, int]) -> BuildMix:
    """Return a mix with a stream of unpaired preferences for each argument, with these counts of
    labels.
    """
    streams = list[PublishedStream]()
    for number, counts in enumerate(labels):
        ids = dict.fromkeys(("prompt_ids", "completion_ids"), np.array([5, 6], np.int32))
        card = {"kind": "preference", "loader": "unpaired_preference", "totals": {"labels": counts}}
        columns = dict.fromkeys(ids, "ndarray:int32") | {"label": "int8"}
        row = ids | {"label": np.int8(1)}
        streams.append(PublishedStream(f"s{number}", columns, row, {"card": card}))
    return train_mix("unpaired_preference", *streams)


def encoder_decoder(max_seq_len: int, longest: int, cut_rows: int = 0) -> BuildMix:
    """Return a mix for rows of LENGTH, with a stream for encoder-decoder models.

    Args:
        max_seq_len: the length that the stream was converted for.
        longest: tokens of its longest sample.
        cut_rows: rows that lose one token each.
    """
    counted = {"longest": longest, "cut_rows": cut_rows, "cut_tokens": cut_rows}
    card = {"decoder_only_format": False, "max_seq_len": max_seq_len, "totals": counted}
    return finetuning_loader(CHAT(card=card), decoder_only_format=False)


def foundry_turns(*lengths: tuple[int, int], **dataset: Any) -> BuildMix:
    """Return a mix of samples as LLM-Foundry's converter writes them, with these tokens of prompt
    and response.
    """
    rows = [
        {"turns": [{"input_ids": [5] * prompt, "labels": [6] * response}]}
        for prompt, response in lengths
    ]
    return finetuning_loader(CHAT(rows=rows, **NO_MANIFEST), **dataset)


def evaluations(*labels: str) -> BuildMix:
    """Return a mix with an evaluation of Hugging Face data for each label; empty for none."""
    section = {"name": "finetuning", "dataset": {"hf_name": "a/b", "max_seq_len": LENGTH}}
    section |= {"num_workers": 2, "drop_last": False}
    entries = [section | ({"label": label} if label else {}) for label in labels]
    return text_loader(top={"eval_loader": entries})


@built_later
def lone_evaluation(home: Path, **keys: Any) -> Mix:
    """Return a mix with one evaluation that is not in a list, with these keys in its section."""
    section = {"name": "text", "num_workers": 2, "drop_last": False} | keys
    section["dataset"] = {"streams": {"held": DOCS.publish(home)}, "max_seq_len": LENGTH}
    return text_loader(top={"eval_loader": section})(home)


@built_later
def evaluation_drawing(home: Path, repeat: float, **dataset: Any) -> Mix:
    """Return a mix with an evaluation that draws its stream `repeat` times."""
    stream = DOCS.publish(home) | {"repeat": repeat}
    keys = {"streams": {"held": stream}, "max_seq_len": LENGTH} | dataset
    section = {"label": "held", "name": "text", "num_workers": 2, "drop_last": False}
    return text_loader(top={"eval_loader": [section | {"dataset": keys}]})(home)


@built_later
def evaluation_of(
    home: Path, stream: PublishedStream, weight: float = 1, trained: PublishedStream = WEB
) -> Mix:
    """Return a mix that trains on one stream with this weight, and evaluates on another one."""
    keys = {"streams": {stream.name: stream.publish(home)}, "max_seq_len": LENGTH}
    section = {"label": "held", "name": "text", "num_workers": 2, "drop_last": False}
    streams = {trained.name: trained.publish(home) | {"repeat": weight}}
    return text_loader(streams=streams, top={"eval_loader": [section | {"dataset": keys}]})(home)


def without_hashes(stream: PublishedStream) -> PublishedStream:
    """Return the stream as MDSWriter writes it by default: no hashes of shards, no manifest."""

    def remove_hashes(index: Keys) -> None:
        for shard in index["shards"]:
            shard["raw_data"]["hashes"] = {}

    def change_index(folder: Path) -> None:
        edit(folder / "index.json", remove_hashes)

    return replace(stream(card=None), change=change_index)


def with_mask_token(token: str | None) -> BuildMix:
    """Return a mix whose loader masks tokens, and whose tokenizer has this mask token."""
    variables = {"mask_token": token} if token else {}
    tokenizer = replace(published.TOKENIZER, template_variables=variables)
    return with_fields(text_loader(mlm_probability=0.15), run_tokenizer=tokenizer)


def with_tokenizer_notes(**notes: str | bool) -> BuildMix:
    """Return a mix whose tokenizer has these notes on how its folder was read."""
    return with_fields(text_loader(), run_tokenizer=replace(published.TOKENIZER, **notes))


def lone_local_stream(split: str) -> BuildMix:
    """Return a mix whose dataset is one local stream, in the folder of that split."""

    def make_section(local: str) -> Keys:
        folder = str(Path(local, "train"))[: -len(split) - 1]
        return {"remote": folder, "local": folder, "split": split}

    return finetuning_loader(with_local_section(make_section), streams=...)


def batching_mix(method: str, batch: int, *sizes: int) -> BuildMix:
    """Return a mix of streams with so many samples, under a batching method."""
    streams = [WEB(f"s{number}", n=size) for number, size in enumerate(sizes)]
    top = {"global_train_batch_size": batch}
    return text_loader(*streams, batching_method=method, top=top)


@built_later
def pretrained_model(
    home: Path,
    model_ids: dict[str, int],
    run_ids: dict[str, int],
    can_open: bool = True,
    **section: Any,
) -> Mix:
    """Return a mix with a pretrained model.

    Args:
        model_ids: the vocabulary of the model's own tokenizer; tokens with ids above 100 are added
            tokens.
        run_ids: the vocabulary of the run's tokenizer.
        can_open: whether the model's tokenizer can be opened.
        section: further keys of the model's section.
    """
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "hub/model"} | section
    mix = text_loader(top={"model": model, "tokenizer": {"name": "hub/t"}})(home)
    for name, ids in (("model", model_ids), ("run", run_ids)):
        tokenizer = Tokenizer(WordLevel(ids, unk_token=next(iter(ids))))
        tokenizer.add_tokens([token for token, id in ids.items() if id > 100])
        tokenizer.save(str(home / f"{name}.json"))
    run_tokenizer = replace(published.TOKENIZER, path=str(home / "run.json"))
    mix = replace(mix, run_tokenizer=run_tokenizer, tokenizer_problem=None)
    mix.__dict__["model_tokenizer"] = str(home / "model.json") if can_open else None
    return mix


@built_later
def tokenizer_for_nodes(home: Path, suffix: str) -> Mix:
    """Return a mix whose tokenizer training nodes fetch. Its folder contains one file, with this
    suffix.
    """
    folder = home / "tokenizer-0123abcd"
    folder.mkdir(parents=True)
    (folder / f"mdsmix{suffix}").write_text("{}")
    return replace(text_loader()(home), tokenizer_home=locate(folder))


def records_mix(bad: int, **records: Any) -> BuildMix:
    """Return a mix of a stream of 100 records, with so many bad ones."""
    reasons = {"invalid_json": bad - 1, "no_text": 1} if bad else {}
    counts = {"read": 100, "written": 100 - bad, "quarantined": reasons} | records
    return text_loader(WEB(card={"records": Records(**counts)}))


@built_later
def deep_checked(home: Path, build: BuildMix, *in_transit: StreamFault) -> Mix:
    """Return a mix whose streams were read completely, with these faults in transit."""
    mix = verify_streams(build(home), RecordingWatcher())
    reports = {url: replace(report, in_transit=in_transit) for url, report in mix.verified.items()}
    return replace(mix, verified=reports)


def damaged_shard(end: bytes) -> BuildMix:
    """Return a deeply checked mix of a stream whose shard ends in these bytes."""
    stream = with_shard_bytes(WEB_BARE, lambda data: data[: len(data) - len(end)] + end)
    return deep_checked(text_loader(stream))


def changed_index(change: Callable[[list[Any]], object]) -> BuildMix:
    """Return a mix of a stream of two shards, with a change of the entries in its index."""

    def change_index(folder: Path) -> None:
        edit(folder / "index.json", lambda index: change(index["shards"]))

    return text_loader(replace(TWO_SHARDS, change=change_index))
