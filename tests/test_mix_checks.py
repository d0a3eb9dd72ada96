"""Every check fires on the one mix that is wrong in its way, and is silent on the same mix put right."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
import yaml
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel

from mdsmix.errors import Unreachable
from mdsmix.mix.checking import checks, findings, is_refused, looked, report, with_bytes_read
from mdsmix.mix.epoch import epoch_of, epoch_table
from mdsmix.mix.into import ConfigChange
from mdsmix.mix.render import epoch_comment
from mdsmix.mix.resolve import mix_of, mix_of_streams
from mdsmix.mix.streams import Mix, moved
from mdsmix.shards.counts import Records
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.shards.published import StreamFault
from mdsmix.storage import locate
from mdsmix.training.findings import Finding
from tests.published import (
    CARD,
    CONCAT,
    LENGTH,
    PACKED,
    PACKED_ROW,
    PAIR,
    PAIR_ROW,
    SPLIT,
    SPLIT_ROW,
    TOKEN_ROW,
    TURNS,
    TURNS_ROW,
    edit,
    publish,
)

RAW_PAIR = {"prompt": "str", "response": "str"}
RAW_ROW = {"prompt": "hi", "response": "ho"}


class Lab:
    """A folder of streams and the mixes made of them."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def stream(
        self, name: str, columns: dict[str, str], row: dict[str, Any], n: int = 40, **how: Any
    ) -> dict[str, Any]:
        """Publishes a stream of n equal rows and returns its section."""
        how.setdefault("card", {})
        folder = publish(self.home / name, columns, how.pop("rows", [row] * n), **how)
        return {"local": str(folder), "split": "train"}

    def web(self, name: str = "web", **how: Any) -> dict[str, Any]:
        return self.stream(name, CONCAT, TOKEN_ROW, **how)

    def chunks(self, name: str = "web", **how: Any) -> dict[str, Any]:
        return self.stream(name, SPLIT, SPLIT_ROW, **how)

    def chat(self, name: str = "chat", **how: Any) -> dict[str, Any]:
        return self.stream(name, TURNS, TURNS_ROW, **how)

    def seeing(self, name: str = "see", **how: Any) -> dict[str, Any]:
        """Conversations with images; this one is of text."""
        row = {"images": bytes(8), "sizes": [], **TURNS_ROW}
        return self.stream(name, {"images": "bytes", "sizes": "json", **TURNS}, row, **how)

    def packed(self, name: str = "chat", **how: Any) -> dict[str, Any]:
        """Conversations, two to a row."""
        told = {"kind": "finetuning", "pack": True, "fields": {"messages": "messages"}}
        card = {"layout": None, "add_bos": None, "add_eos": None, **told, **how.pop("more", {})}
        return self.stream(name, PACKED, PACKED_ROW, card=card, **how)

    def text(self, *, dataset: Any = None, loader: Any = None, **streams: Any) -> Mix:
        return self._mix("text", dataset or {}, loader or {}, streams)

    def finetuning(self, *, dataset: Any = None, loader: Any = None, **streams: Any) -> Mix:
        given = {"decoder_only_format": True} | (dataset or {})
        return self._mix("finetuning", given, loader or {}, streams)

    def own(self, *, dataset: Any = None, loader: Any = None, **streams: Any) -> Mix:
        return self._mix("mdsmix", dataset or {}, loader or {}, streams)

    def _mix(self, name: str, dataset: Any, loader: Any, streams: Any) -> Mix:
        top = loader.pop("top", {})
        keys = {"max_seq_len": LENGTH, "shuffle": True, "streams": streams} | dataset
        keys = {k: v for k, v in keys.items() if v is not ...}
        section = {"name": name, "dataset": keys, "drop_last": True, "num_workers": 2} | loader
        section = {k: v for k, v in section.items() if v is not ...}
        mix = mix_of({"max_seq_len": LENGTH, "train_loader": section} | top, "train.yaml")
        return dataclasses.replace(mix, tokenizer=CARD)


def of_model(name: str, **more: Any) -> dict[str, Any]:
    """What a loader's config says of the model."""
    return {"top": {"model": {"name": name, "max_seq_len": LENGTH, **more}}}


def with_tokenizer(mix: Mix, **changes: Any) -> Mix:
    return dataclasses.replace(mix, tokenizer=dataclasses.replace(CARD, **changes))


def card(**changes: Any) -> TokenizerCard:
    return dataclasses.replace(CARD, **changes)


def edit_index(section: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    path = Path(section["local"]) / "train" / "index.json"
    tree = json.loads(path.read_bytes())
    change(tree)
    path.write_text(json.dumps(tree))
    return section


def shard_file(section: dict[str, Any], number: int = 0) -> Path:
    return sorted((Path(section["local"]) / "train").glob("shard.*"))[number]


def cached(lab: Lab, content: bytes | None) -> Mix:
    """A stream with a remote and a local cache whose index is `content`, or the remote's own."""
    section = lab.web()
    remote, cache = Path(section["local"]), lab.home / "cache"
    (cache / "train").mkdir(parents=True)
    own = (remote / "train" / "index.json").read_bytes()
    (cache / "train" / "index.json").write_bytes(own if content is None else content)
    return lab.text(web={"remote": str(remote), "local": str(cache), "split": "train"})


def remote(section: dict[str, Any], cache: str) -> dict[str, Any]:
    return section | {"remote": section["local"], "local": cache}


def in_bytes(lab: Lab, dtype: str) -> dict[str, Any]:
    import numpy as np

    data = np.array(TOKEN_ROW["tokens"], dtype).tobytes()
    return lab.stream("old", {"tokens": "bytes"}, {"tokens": data}, card=None)


def preferring(lab: Lab, *with_reward: bool) -> Mix:
    """A stream of preferences for each, with a reward or without."""
    sides = dict.fromkeys(("prompt", "chosen", "rejected"), "bytes")
    row = dict.fromkeys(sides, bytes([5] + [0] * 7))
    streams = {}
    for n, has in enumerate(with_reward):
        more = {"chosen_reward": bytes(8)} if has else {}
        columns = sides | dict.fromkeys(more, "bytes")
        streams[f"s{n}"] = lab.stream(f"s{n}", columns, row | more, card=None)
    return lab._mix("pairwise_preference", {}, {}, streams)


def two_sided(lab: Lab, max_seq_len: int, longest: int, cut_rows: int = 0) -> Mix:
    """An encoder-decoder's stream that was converted for that length, in a mix for LENGTH."""
    card = {
        "decoder_only_format": False,
        "max_seq_len": max_seq_len,
        "totals": {"longest": longest, "cut_rows": cut_rows, "cut_tokens": cut_rows},
    }
    return lab.finetuning(chat=lab.chat(card=card), dataset={"decoder_only_format": False})


def chats(lab: Lab, responses: list[list[int]]) -> dict[str, Any]:
    rows = [{"turns": [{"input_ids": [5, 6], "labels": r}]} for r in responses]
    return lab.stream("chat", TURNS, {}, rows=rows, card=None)


def first_missing(lab: Lab, delete: bool) -> Mix:
    section = lab.web(shards=2)
    if delete:
        shard_file(section, 1).unlink()
    return lab.text(web=section)


def first_resized(lab: Lab, extra: bytes) -> Mix:
    section = lab.web()
    shard_file(section).write_bytes(shard_file(section).read_bytes() + extra)
    return lab.text(web=section)


def first_damaged(lab: Lab, is_damaged: bool) -> Mix:
    section = lab.web(card=None)
    if is_damaged:
        data = bytearray(shard_file(section).read_bytes())
        data[4:8] = b"\xff\xff\xff\x7f"
        shard_file(section).write_bytes(data)
    return lab.text(web=section)


def unlike_shards(lab: Lab, encoding: str) -> Mix:
    def change(tree: dict[str, Any]) -> None:
        size = 16 if encoding == CONCAT["tokens"] else None
        tree["shards"][1].update(column_encodings=[encoding], column_sizes=[size])

    return lab.text(web=edit_index(lab.web(shards=2, card=None), change))


def renamed(lab: Lab, name: str) -> Mix:
    def change(tree: dict[str, Any]) -> None:
        tree["shards"][1]["raw_data"]["basename"] = name

    section = lab.web(shards=2, card=None)
    return lab.text(web=edit_index(section, change))


def formatted(lab: Lab, name: str) -> Mix:
    def change(tree: dict[str, Any]) -> None:
        tree["shards"][0]["format"] = name

    return lab.text(web=edit_index(lab.web(card=None), change))


def evals(lab: Lab, *labels: str) -> Mix:
    section = {
        "name": "text",
        "dataset": {"max_seq_len": LENGTH, "streams": {"held": lab.web("held")}},
        "num_workers": 2,
        "drop_last": False,
    }
    entries = [section | ({"label": label} if label else {}) for label in labels]
    return lab.text(web=lab.web(), loader={"top": {"eval_loader": entries}})


def batched(lab: Lab, method: str, batch: int, *sizes: int) -> Mix:
    streams = {f"s{i}": lab.web(f"s{i}", n=n) for i, n in enumerate(sizes)}
    top = {"global_train_batch_size": batch}
    return lab.text(dataset={"batching_method": method}, loader={"top": top}, **streams)


def model(lab: Lab, **section: Any) -> Mix:
    return lab.text(web=lab.web(), loader={"top": {"model": section}})


def pretrained(lab: Lab, own: dict[str, int], run: dict[str, int], is_seen: bool = True) -> Mix:
    """A pretrained model with a tokenizer of its own, and the run's; what is added to either stands behind 100."""
    section = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "hub/model"}
    mix = model(lab, **section)
    yaml = dataclasses.replace(mix.yaml, config=mix.yaml.config | {"tokenizer": {"name": "hub/t"}})
    for name, ids in (("own", own), ("run", run)):
        built = Tokenizer(WordLevel(dict(ids), unk_token=next(iter(ids))))
        built.add_tokens([token for token, i in ids.items() if i > 100])
        built.save(str(lab.home / f"{name}.json"))
    mix = dataclasses.replace(
        mix, yaml=yaml, opened=SimpleNamespace(path=str(lab.home / "run.json"))
    )
    mix.__dict__["model_tokenizer"] = str(lab.home / "own.json") if is_seen else None
    return mix


def fetched_by_nodes(lab: Lab, published: str) -> Mix:
    home = lab.home / "tokenizer-0123abcd"
    home.mkdir(parents=True)
    (home / published).write_text("{}")
    return dataclasses.replace(lab.text(web=lab.web()), tokenizer_home=locate(home))


def repeated(count: int) -> Records:
    return Records(read=100, written=100, duplicates=count)


def quarantined(bad: int) -> Records:
    return Records(read=100, written=100 - bad, quarantined={"invalid_json": bad - 1, "no_text": 1})


class Quiet:
    """A watcher that is told nothing worth keeping."""

    def begin(self, stream: str, size: int) -> None: ...

    def on_progress(self, size: int, tokens: int) -> None: ...


def read_through(lab: Lab, damage: bytes) -> Mix:
    """A stream of which every byte is read, the last ones being `damage`."""
    section = lab.web(card=None)
    data = shard_file(section).read_bytes()
    shard_file(section).write_bytes(data[: len(data) - len(damage)] + damage)
    return with_bytes_read(lab.text(web=section), Quiet())


def sided(lab: Lab, is_lost: bool) -> Mix:
    """A stream whose manifest names a file beside its shards."""
    section = lab.web()
    home, digest = Path(section["local"]) / "train", xxhash.xxh128_hexdigest(b"ids")
    side = {"name": f"{digest}.ids.side", "bytes": 3, "hash": digest, "kind": "ids", "shard": ""}
    edit(home / "mdsmix.manifest", lambda tree: tree.update(side_files=[side]))
    if not is_lost:
        (home / side["name"]).write_bytes(b"ids")
    return lab.text(web=section)


def set_aside(lab: Lab, bad: int) -> Mix:
    """A stream of which every byte is read, without the bad records that it counts."""
    records = quarantined(bad) if bad else Records(read=9, written=9)
    return with_bytes_read(lab.text(web=lab.web(card={"records": records})), Quiet())


def damaged_once(lab: Lab, is_damaged: bool) -> Mix:
    mix = with_bytes_read(lab.text(web=lab.web(card=None)), Quiet())
    fault = StreamFault(rule="shard-contents", file="a.mds", problem="its xxh128 is 1", fix="look")
    changes = {"in_transit": (fault,)} if is_damaged else {}
    verified = {url: dataclasses.replace(r, **changes) for url, r in mix.verified.items()}
    return dataclasses.replace(mix, verified=verified)


Make = Callable[[Lab], Mix]
CASES: dict[str, tuple[Make, Make]] = {
    "columns-loader": (
        lambda lab: lab.finetuning(web=lab.web(), chat=lab.chat()),
        lambda lab: lab.finetuning(web=lab.chunks(), chat=lab.chat()),
    ),
    "columns-text-and-tokens": (
        lambda lab: lab.text(web=lab.web(), raw=lab.stream("raw", {"text": "str"}, {"text": "a"})),
        lambda lab: lab.text(web=lab.web(), raw=lab.web("raw")),
    ),
    "columns-unlike": (
        lambda lab: preferring(lab, True, False),
        lambda lab: preferring(lab, True, True),
    ),
    "columns-exact": (
        lambda lab: lab.finetuning(
            raw=lab.stream("raw", RAW_PAIR | {"id": "str"}, RAW_ROW | {"id": "1"}, card=None)
        ),
        lambda lab: lab.finetuning(raw=lab.stream("raw", RAW_PAIR, RAW_ROW, card=None)),
    ),
    "columns-encoding": (
        lambda lab: lab.text(raw=lab.stream("raw", {"text": "bytes"}, {"text": b"a"}, card=None)),
        lambda lab: lab.text(raw=lab.stream("raw", {"text": "str"}, {"text": "a"}, card=None)),
    ),
    "columns-shards": (
        lambda lab: unlike_shards(lab, "ndarray:int32"),
        lambda lab: unlike_shards(lab, CONCAT["tokens"]),
    ),
    "columns-unsafe": (
        lambda lab: lab.text(
            web=lab.stream("web", CONCAT | {"x": "pkl"}, TOKEN_ROW | {"x": b"N."}, card=None)
        ),
        lambda lab: lab.text(
            web=lab.stream("web", CONCAT | {"x": "pkl"}, TOKEN_ROW | {"x": b"N."}, card=None),
            dataset={"allow_unsafe_types": True},
        ),
    ),
    "columns-raw-and-tokenized": (
        lambda lab: lab.finetuning(
            raw=lab.stream("raw", RAW_PAIR, RAW_ROW, card=None), chat=lab.chat()
        ),
        lambda lab: lab.finetuning(raw=lab.stream("raw", RAW_PAIR, RAW_ROW, card=None)),
    ),
    "images-loader": (
        lambda lab: lab.finetuning(see=lab.seeing()),
        lambda lab: lab.own(see=lab.seeing()),
    ),
    "images-processor": (
        lambda lab: lab.own(see=lab.seeing()),
        lambda lab: lab.own(see=lab.seeing(), dataset={"processor": "./none"}),
    ),
    "images-unplanned": (
        lambda lab: lab.own(see=lab.seeing(), dataset={"processor": "./none"}),
        lambda lab: lab.own(web=lab.web(), dataset={"processor": "./none"}),
    ),
    "tokens-dtype": (
        lambda lab: lab.text(old=in_bytes(lab, "int32")),
        lambda lab: lab.text(old=in_bytes(lab, "int32"), dataset={"token_encoding_type": "int32"}),
    ),
    "id-vocabulary": (
        lambda lab: lab.text(web=lab.web(card={"totals": {"largest_id": 512}})),
        lambda lab: lab.text(web=lab.web(card={"totals": {"largest_id": 511}})),
    ),
    "rows-too-long": (
        lambda lab: lab.text(web=lab.web(), dataset={"max_seq_len": LENGTH - 1}),
        lambda lab: lab.text(web=lab.web()),
    ),
    "rows-cut": (
        lambda lab: lab.finetuning(chat=lab.chat(card={"totals": {"longest": LENGTH + 1}})),
        lambda lab: lab.finetuning(chat=lab.chat(card={"totals": {"longest": LENGTH}})),
    ),
    "sides-unseen": (
        lambda lab: two_sided(lab, max_seq_len=2 * LENGTH, longest=LENGTH + 1),
        lambda lab: two_sided(lab, max_seq_len=2 * LENGTH, longest=LENGTH),
    ),
    "rows-short": (
        lambda lab: lab.text(web=lab.web(), dataset={"max_seq_len": 2 * LENGTH}),
        lambda lab: lab.text(web=lab.web()),
    ),
    "rows-uneven": (
        lambda lab: lab.text(
            docs=lab.stream(
                "docs", {"tokens": "ndarray:uint16"}, TOKEN_ROW, card={"layout": "document"}
            )
        ),
        lambda lab: lab.text(docs=lab.stream("docs", {"tokens": "ndarray:uint16"}, TOKEN_ROW)),
    ),
    "pad-missing": (
        lambda lab: with_tokenizer(
            lab.text(
                docs=lab.stream(
                    "docs", {"tokens": "ndarray:uint16"}, TOKEN_ROW, card={"layout": "document"}
                )
            ),
            pad_id=None,
        ),
        lambda lab: with_tokenizer(lab.text(web=lab.web()), pad_id=None),
    ),
    "separator-absent": (
        lambda lab: lab.text(
            web=lab.stream("web", CONCAT, {"tokens": [5] * LENGTH}, card={"add_eos": False}),
            dataset={"eos_token_id": 0},
        ),
        lambda lab: lab.text(web=lab.web(card=None), dataset={"eos_token_id": 0}),
    ),
    "sample-unusable": (
        lambda lab: lab.finetuning(chat=chats(lab, [[7, 0], []])),
        lambda lab: lab.finetuning(chat=chats(lab, [[7, 0], [7]])),
    ),
    "tokenizer-differs": (
        lambda lab: lab.text(web=lab.web(card={"tokenizer": card(hash="b" * 32)})),
        lambda lab: lab.text(web=lab.web()),
    ),
    "template-differs": (
        lambda lab: lab.finetuning(
            chat=lab.chat(
                card={"fields": {"messages": "m"}, "tokenizer": card(chat_template_hash="c")}
            )
        ),
        lambda lab: lab.finetuning(chat=lab.chat(card={"fields": {"messages": "m"}})),
    ),
    "tokenizer-unknown": (
        lambda lab: lab.text(web=lab.web(card=None)),
        lambda lab: lab.text(web=lab.web()),
    ),
    "tokenizer-unseen": (
        lambda lab: dataclasses.replace(lab.text(web=lab.web()), tokenizer_problem="not here"),
        lambda lab: lab.text(web=lab.web()),
    ),
    "tokenizer-lone-file": (
        lambda lab: lab.text(
            web=lab.web(), loader={"top": {"tokenizer": {"name": "none/tokenizer.json"}}}
        ),
        lambda lab: lab.text(web=lab.web(), loader={"top": {"tokenizer": {"name": ""}}}),
    ),
    "tokenizer-unpublished": (
        lambda lab: fetched_by_nodes(lab, "mdsmix.tokenizer" + ".old"),
        lambda lab: fetched_by_nodes(lab, "mdsmix.tokenizer"),
    ),
    "eos-missing": (
        lambda lab: with_tokenizer(lab.text(web=lab.web()), eos_id=None),
        lambda lab: lab.text(web=lab.web()),
    ),
    "pad-eos-text": (
        lambda lab: with_tokenizer(lab.text(web=lab.web()), pad_id=0),
        lambda lab: lab.text(web=lab.web()),
    ),
    "pad-eos-finetuning": (
        lambda lab: with_tokenizer(lab.finetuning(web=lab.chunks()), pad_id=0),
        lambda lab: lab.finetuning(web=lab.chunks()),
    ),
    "separator-differs": (
        lambda lab: lab.text(web=lab.web(), dataset={"eos_token_id": 5}),
        lambda lab: lab.text(web=lab.web(), dataset={"eos_token_id": 0}),
    ),
    "format-differs": (
        lambda lab: lab.finetuning(
            chat=lab.chat(card={"decoder_only_format": False}),
        ),
        lambda lab: lab.finetuning(chat=lab.chat()),
    ),
    "format-pretraining": (
        lambda lab: lab.finetuning(web=lab.chunks(), dataset={"decoder_only_format": False}),
        lambda lab: lab.finetuning(web=lab.chunks()),
    ),
    "targets-narrower": (
        lambda lab: lab.finetuning(chat=lab.chat(card={"target_prompts": "length>=4"})),
        lambda lab: lab.finetuning(
            chat=lab.chat(card={"target_prompts": "length>=4"}),
            dataset={"target_prompts": "length>=4"},
        ),
    ),
    "targets-wider": (
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"target_responses": "all"}),
        lambda lab: lab.finetuning(chat=lab.chat()),
    ),
    "targets-packed": (
        lambda lab: lab.own(chat=lab.packed(), dataset={"target_responses": "all"}),
        lambda lab: lab.own(chat=lab.packed()),
    ),
    "targets-compact": (
        lambda lab: lab.finetuning(
            chat=lab.chat(card={"compact": True}), dataset={"target_prompts": "all"}
        ),
        lambda lab: lab.finetuning(chat=lab.chat(card={"compact": True})),
    ),
    "documents-unseparated": (
        lambda lab: lab.finetuning(web=lab.chunks()),
        lambda lab: lab.finetuning(
            web=lab.stream("web", PAIR, PAIR_ROW, card={"layout": "document"})
        ),
    ),
    "documents-unmarked": (
        lambda lab: lab.own(web=lab.web(), chat=lab.chat()),
        lambda lab: lab.own(web=lab.web(), chat=lab.chat(), dataset={"eos_token_id": 0}),
    ),
    "documents-unmasked": (
        lambda lab: lab.own(chat=lab.packed(), loader=of_model("mpt_causal_lm")),
        lambda lab: lab.own(
            chat=lab.packed(),
            loader=of_model("mpt_causal_lm", attn_config={"attn_uses_sequence_id": True}),
        ),
    ),
    "weights-zero": (
        lambda lab: lab.text(web=lab.web() | {"repeat": 0.02}, docs=lab.web("docs")),
        lambda lab: lab.text(web=lab.web() | {"repeat": 0.03}, docs=lab.web("docs")),
    ),
    "weights-off": (
        lambda lab: lab.text(web=lab.web() | {"choose": 0}, docs=lab.web("docs")),
        lambda lab: lab.text(web=lab.web() | {"choose": 1}, docs=lab.web("docs")),
    ),
    "weights-repeated": (
        lambda lab: lab.text(web=lab.web() | {"repeat": 4.1}),
        lambda lab: lab.text(web=lab.web() | {"repeat": 4}),
    ),
    "weights-tokens": (
        lambda lab: lab.text(
            web=lab.web(),
            short=lab.stream("short", {"tokens": "ndarray:uint16:2"}, {"tokens": [5, 0]}),
        ),
        lambda lab: lab.text(
            web=lab.web(),
            short=lab.stream("short", {"tokens": "ndarray:uint16:4"}, {"tokens": [5, 6, 7, 0]}),
        ),
    ),
    "shuffle-off": (
        lambda lab: lab.text(web=lab.web(), docs=lab.web("docs"), dataset={"shuffle": False}),
        lambda lab: lab.text(web=lab.web(), dataset={"shuffle": False}),
    ),
    "epoch-too-small": (
        lambda lab: batched(lab, "random", 41, 40),
        lambda lab: batched(lab, "random", 40, 40),
    ),
    "canonical-nodes": (
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"num_canonical_nodes": 41}),
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"num_canonical_nodes": 40}),
    ),
    "batching-infeasible": (
        lambda lab: batched(lab, "per_stream", 8, 40, 7),
        lambda lab: batched(lab, "per_stream", 8, 40, 8),
    ),
    "batching-drops": (
        lambda lab: batched(lab, "per_stream", 8, 41),
        lambda lab: batched(lab, "per_stream", 8, 40),
    ),
    "batching-unknown": (
        lambda lab: batched(lab, "stratified", 0, 30, 10),
        lambda lab: batched(lab, "random", 0, 30, 10),
    ),
    "shard-damaged": (
        lambda lab: first_damaged(lab, True),
        lambda lab: first_damaged(lab, False),
    ),
    "validate-hash": (
        lambda lab: lab.text(web=lab.web(), dataset={"validate_hash": "sha1"}),
        lambda lab: lab.text(web=lab.web(), dataset={"validate_hash": "xxh128"}),
    ),
    "index-stale": (
        lambda lab: cached(lab, b'{"version": 2, "shards": []}'),
        lambda lab: cached(lab, None),
    ),
    "cache-limit-small": (
        lambda lab: lab.text(web=lab.web(), dataset={"cache_limit": "1kb"}),
        lambda lab: lab.text(web=lab.web(), dataset={"cache_limit": "1mb"}),
    ),
    "shard-missing": (
        lambda lab: first_missing(lab, True),
        lambda lab: first_missing(lab, False),
    ),
    "shard-size": (lambda lab: first_resized(lab, b"x"), lambda lab: first_resized(lab, b"")),
    "shard-contents": (
        lambda lab: read_through(lab, b"!"),
        lambda lab: read_through(lab, b""),
    ),
    "shard-basenames": (
        lambda lab: renamed(lab, "shard.00000.mds"),
        lambda lab: renamed(lab, "shard.00001.mds"),
    ),
    "publication-interrupted": (
        lambda lab: lab.text(web=lab.web(card={"index_hash": "0" * 32})),
        lambda lab: lab.text(web=lab.web()),
    ),
    "manifest-contradicts": (
        lambda lab: lab.text(web=lab.web(card={"totals": {"samples": 41}})),
        lambda lab: lab.text(web=lab.web()),
    ),
    "side-files": (lambda lab: sided(lab, True), lambda lab: sided(lab, False)),
    "quarantine": (lambda lab: set_aside(lab, 2), lambda lab: set_aside(lab, 0)),
    "damage-in-transit": (
        lambda lab: damaged_once(lab, True),
        lambda lab: damaged_once(lab, False),
    ),
    "records-bad": (
        lambda lab: lab.text(web=lab.web(card={"records": quarantined(2)})),
        lambda lab: lab.text(web=lab.web(card={"records": quarantined(1)})),
    ),
    "records-duplicate": (
        lambda lab: lab.text(web=lab.web(card={"records": repeated(2)})),
        lambda lab: lab.text(web=lab.web(card={"records": repeated(1)})),
    ),
    "index-empty": (
        lambda lab: lab.text(web=lab.web(n=0), docs=lab.web("docs")),
        lambda lab: lab.text(web=lab.web(n=1), docs=lab.web("docs")),
    ),
    "shard-format": (lambda lab: formatted(lab, "jsonl"), lambda lab: formatted(lab, "mds")),
    "length-model": (
        lambda lab: model(lab, max_seq_len=LENGTH - 1),
        lambda lab: model(lab, max_seq_len=LENGTH),
    ),
    "length-differs": (
        lambda lab: model(lab, max_seq_len=LENGTH + 1),
        lambda lab: model(lab, max_seq_len=LENGTH),
    ),
    "model-encoder": (
        lambda lab: model(lab, name="hf_t5"),
        lambda lab: model(lab, name="mpt_causal_lm"),
    ),
    "model-tokenizer": (
        lambda lab: pretrained(lab, {"a": 0, "b": 1}, {"b": 0, "a": 1}),
        lambda lab: pretrained(lab, {"a": 0, "<r>": 101}, {"a": 0, "c": 1, "<|im_start|>": 101}),
    ),
    "model-tokenizer-unseen": (
        lambda lab: pretrained(lab, {"a": 0}, {"b": 0}, is_seen=False),
        lambda lab: pretrained(lab, {"a": 0}, {"a": 0}),
    ),
    "eval-label": (lambda lab: evals(lab, "held", ""), lambda lab: evals(lab, "held", "other")),
    "loader-unknown": (
        lambda lab: lab.text(web=lab.web(), loader={"name": "denoising"}),
        lambda lab: lab.text(web=lab.web()),
    ),
    "key-dropped": (
        lambda lab: lab.text(web=lab.web(), dataset={"packing_ratio": 2}),
        lambda lab: lab.text(web=lab.web(), dataset={"predownload": 2}),
    ),
    "key-rejected": (
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"eos_token_id": 0}),
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"pad_to_longest": True}),
    ),
    "key-missing": (
        lambda lab: lab.text(web=lab.web(), loader={"drop_last": ...}),
        lambda lab: lab.finetuning(chat=lab.chat(), loader={"drop_last": ...}),
    ),
    "streams-and-remote": (
        lambda lab: lab.text(web=lab.web(), dataset={"remote": "s3://bucket/web"}),
        lambda lab: lab.text(web=lab.web()),
    ),
    "remote-alone": (
        lambda lab: lab.finetuning(dataset={"streams": ...} | lab.chat()),
        lambda lab: lab.text(dataset={"streams": ...} | lab.web()),
    ),
    "streams-none": (
        lambda lab: lab.text(dataset={"streams": {}}),
        lambda lab: lab.text(dataset={"streams": ...} | lab.web()),
    ),
    "split-inherited": (
        lambda lab: lab.text(web={"local": lab.web()["local"]}, dataset={"split": "train"}),
        lambda lab: lab.text(web=lab.web(), dataset={"split": "train"}),
    ),
    "local-duplicate": (
        lambda lab: lab.text(web=lab.web(), again=lab.web()),
        lambda lab: lab.text(web=lab.web(), again=lab.web("again")),
    ),
    "local-unset": (
        lambda lab: lab.text(web={"remote": lab.web()["local"], "split": "train"}),
        lambda lab: lab.text(web=lab.web()),
    ),
    "cache-limit-local": (
        lambda lab: lab.text(web=lab.web(), dataset={"cache_limit": "1gb"}),
        lambda lab: lab.text(
            web=remote(lab.web(), str(lab.home / "cache")), dataset={"cache_limit": "1gb"}
        ),
    ),
    "length-invalid": (
        lambda lab: lab.text(web=lab.web(), dataset={"max_seq_len": ...}),
        lambda lab: lab.text(web=lab.web()),
    ),
    "setting-value": (
        lambda lab: lab.text(web=lab.web(), dataset={"shuffle_algo": "py3"}),
        lambda lab: lab.text(web=lab.web(), dataset={"shuffle_algo": "py1s"}),
    ),
    "workers": (
        lambda lab: lab.text(web=lab.web(), loader={"num_workers": 0}),
        lambda lab: lab.text(
            web=lab.web(),
            loader={"num_workers": 0, "prefetch_factor": None, "persistent_workers": False},
        ),
    ),
    "targets-invalid": (
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"target_prompts": "some"}),
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"target_prompts": "all"}),
    ),
    "packing-invalid": (
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"max_leftover_bins_to_keep": 2}),
        lambda lab: lab.finetuning(chat=lab.chat(), dataset={"packing_ratio": "auto"}),
    ),
    "unsafe-types": (
        lambda lab: lab.own(web=lab.web(), dataset={"allow_unsafe_types": True}),
        lambda lab: lab.text(web=lab.web(), dataset={"allow_unsafe_types": True}),
    ),
    "changed-accepted": (
        lambda lab: lab.own(web=lab.web(), loader={"accept_changed": True}),
        lambda lab: lab.own(web=lab.web(), loader={"accept_changed": False}),
    ),
    "separators-both": (
        lambda lab: lab.text(web=lab.web(), dataset={"eos_token_id": 0, "bos_token_id": 0}),
        lambda lab: lab.text(web=lab.web(), dataset={"bos_token_id": 0}),
    ),
    "weights-scheme": (
        lambda lab: lab.text(web=lab.web() | {"proportion": 0.5}, docs=lab.web("docs")),
        lambda lab: lab.text(web=lab.web() | {"repeat": 0.5}, docs=lab.web("docs")),
    ),
    "weights-number": (
        lambda lab: lab.text(web=lab.web() | {"repeat": "0.5"}),
        lambda lab: lab.text(web=lab.web() | {"repeat": 0.5}),
    ),
    "weights-epoch-size": (
        lambda lab: lab.text(web=lab.web() | {"repeat": 1}, dataset={"epoch_size": 10}),
        lambda lab: lab.text(web=lab.web() | {"proportion": 1}, dataset={"epoch_size": "1k"}),
    ),
}


def ids(found: list[Finding]) -> set[str]:
    return {finding.id for finding in found}


@pytest.mark.parametrize("id", CASES)
def test_fires_on_what_is_wrong_and_on_nothing_else(id: str, tmp_path: Path) -> None:
    wrong, right = CASES[id]
    found = [f for f in findings(wrong(Lab(tmp_path / "wrong"))) if f.id == id]
    assert found, "the check did not fire"
    for sentence in (part for f in found for part in (f.message, f.why, f.fix)):
        assert re.fullmatch(r".+[^.,;:]\.", sentence)
        assert not re.search(r"[.,;:][.,;]|  |\{loader\}", sentence), "damaged"
    assert id not in ids(findings(right(Lab(tmp_path / "right"))))


@pytest.mark.parametrize("id", ["length-invalid", "length-model", "length-differs"])
def test_a_length_that_a_fix_writes_is_yaml_in_braces_too(id: str, tmp_path: Path) -> None:
    (fix, *_) = [f.fix for f in findings(CASES[id][0](Lab(tmp_path))) if f.id == id]
    (written,) = re.findall(r'"?\$\{max_seq_len\}"?', fix)
    assert yaml.safe_load(f"{{model: {{max_seq_len: {written}}}}}") == {
        "model": {"max_seq_len": "${max_seq_len}"}
    }


def test_a_tokenizer_that_gave_way_unseen_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    change = ConfigChange(key="tokenizer.name", was="hub/model", now="hub/t")
    mix = pretrained(Lab(tmp_path), {"a": 0}, {"a": 0}, is_seen=False)
    found = findings(dataclasses.replace(mix, changed=(change,)))
    (told,) = [f for f in found if f.id.startswith("model-tokenizer")]
    assert told.id == "model-tokenizer"
    assert "cannot be looked at here, and --into changes tokenizer.name: hub/model ->" in str(told)
    assert "name the recipe's in the config" in told.fix


@pytest.mark.parametrize("given", [{"pretrained": False}, {"name": "mpt_causal_lm"}])
def test_weights_that_are_not_loaded_want_no_tokenizer(tmp_path: Path, given: Any) -> None:
    mix = pretrained(Lab(tmp_path), {"a": 0}, {"b": 0})
    mix.yaml.config["model"].update(given)
    assert not {i for i in ids(findings(mix)) if i.startswith("model-tokenizer")}


def test_pieces_of_a_unigram_stand_at_their_places(tmp_path: Path) -> None:
    for name, pieces in (("own", "abc"), ("run", "acbd")):
        built = Tokenizer(Unigram([(piece, -1.0) for piece in pieces]))
        built.save(str(tmp_path / f"{name}.json"))
    assert moved(str(tmp_path / "own.json"), str(tmp_path / "run.json")) == (2, 3)


def test_an_encoder_decoder_under_decoder_only_data_is_refused(tmp_path: Path) -> None:
    lab, top = Lab(tmp_path), {"model": {"name": "hf_t5"}}
    mix = lab.finetuning(chat=lab.chat(), loader={"top": top})
    (found,) = [f for f in findings(mix) if f.id == "model-encoder"]
    assert "train_loader makes decoder-only batches" in found.message
    right = lab.chat(card={"decoder_only_format": False})
    mix = lab.finetuning(
        chat=right,
        dataset={"decoder_only_format": False},
        loader={"top": {"model": {"name": "hf_t5"}}},
    )
    assert "model-encoder" not in ids(findings(mix))


def test_every_check_has_a_case() -> None:
    assert sorted(CASES) == sorted(check.id for check in checks())


def test_a_right_mix_of_both_kinds_has_no_error_and_no_warning(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    found = findings(lab.finetuning(web=lab.chunks(), chat=lab.chat()))
    assert ids(found) == {"documents-unseparated"}


@pytest.mark.parametrize("loader", ["text", "finetuning"])
def test_the_two_kinds_together_are_refused_with_the_ways_out(tmp_path: Path, loader: str) -> None:
    lab = Lab(tmp_path)
    mix = getattr(lab, loader)(web=lab.web(), chat=lab.chat())
    found = findings(mix)
    assert is_refused(found)
    text = str(next(f for f in found if f.id == "columns-loader"))
    assert text.startswith("error columns-loader [")
    for part in ("web", "tokens", "turns", "--reencode", "name: mdsmix", "mdsmix.load"):
        assert part in text


def test_the_loader_of_this_package_reads_both_kinds_as_they_are(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    streams = {"web": lab.web(), "split": lab.chunks("split"), "chat": lab.chat()}
    found = findings(lab.own(**streams, dataset={"eos_token_id": 0, "packing_ratio": 2}))
    assert ids(found) == {"documents-unseparated"}
    raw = lab.own(web=lab.web(), raw=lab.stream("raw", RAW_PAIR, RAW_ROW, card=None))
    (text,) = [str(f) for f in findings(raw) if f.severity == "error"]
    assert (
        "raw (prompt, response): the mdsmix loader reads other columns (tokens, turns, or" in text
    )
    assert "convert the text to tokens" in text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dataset": {"mlm_probability": 0.1}}, {"key-rejected"}),
        ({"loader": {"acept_changed": True}}, {"key-rejected"}),
        ({"loader": {"accept_changed": "yes"}}, {"setting-value"}),
        ({"dataset": {"eos_token_id": 5}}, {"separator-differs"}),
        ({"dataset": {"eos_token_id": 0, "decoder_only_format": "no"}}, {"targets-invalid"}),
        ({"dataset": {"eos_token_id": 0, "packing_ratio": 0.5}}, {"setting-value"}),
        ({"dataset": {"eos_token_id": 0}, "loader": {"num_workers": 0}}, set()),
        ({"dataset": {"eos_token_id": 0}, "loader": {"accept_changed": True}}, set()),
    ],
)
def test_what_may_stand_in_its_section(tmp_path: Path, settings: Any, expected: set[str]) -> None:
    lab = Lab(tmp_path)
    found = findings(lab.own(web=lab.web(), chat=lab.chat(), **settings))
    assert {f.id for f in found if f.severity == "error"} == expected


def test_accept_changed_is_no_key_of_the_other_loaders(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    found = findings(lab.text(web=lab.web(), loader={"accept_changed": True}))
    assert "key-rejected" in ids(found)


def test_a_padding_token_that_is_eos_is_told_of_plain_rows_alone(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    mix = lab.own(web=lab.web(), split=lab.chunks("split"), dataset={"eos_token_id": 0})
    told = {f.id: f.streams for f in findings(with_tokenizer(mix, pad_id=0))}
    assert told["pad-eos-text"] == ("web",)
    assert told["pad-eos-finetuning"] == ("split",)


@pytest.mark.parametrize("loader", ["text", "finetuning"])
def test_packed_rows_are_led_to_the_loader_that_keeps_their_documents_apart(
    tmp_path: Path, loader: str
) -> None:
    lab = Lab(tmp_path)
    made = getattr(lab, loader)(chat=lab.packed())
    (refusal,) = [f for f in findings(made) if f.severity == "error"]
    assert refusal.id == "columns-loader"
    assert (
        "set train_loader.name: mdsmix, which keeps the documents of each row apart" in refusal.fix
    )
    mix = lab.own(chat=lab.packed(), web=lab.web(), faq=lab.stream("faq", PAIR, PAIR_ROW))
    assert not [f for f in findings(mix) if f.severity == "error"]
    said = {share.stream: share.tokens for share in epoch_of(mix.train)}
    assert said["chat"] == 40 * 6


@pytest.mark.parametrize("loader", ["text", "finetuning"])
def test_images_are_read_by_the_loader_of_this_package_alone(tmp_path: Path, loader: str) -> None:
    lab = Lab(tmp_path)
    (refusal,) = [
        f for f in findings(getattr(lab, loader)(see=lab.seeing())) if f.severity == "error"
    ]
    assert refusal.id == "images-loader"
    assert "set train_loader.name: mdsmix" in refusal.fix
    assert "mdsmix.load" in refusal.fix


@pytest.mark.parametrize(
    ("given", "length", "said"),
    [
        ("b" * 32, LENGTH, {"images-processor"}),
        ("a" * 32, 2 * LENGTH, {"images-processor"}),
        ("a" * 32, LENGTH, set()),
        (None, LENGTH, {"images-unplanned"}),
    ],
    ids=["other", "longer", "same", "unseen"],
)
def test_images_are_for_the_processor_and_the_length_they_were_converted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, length: int, said: set[str]
) -> None:
    monkeypatch.setattr("mdsmix.mix.checks.images.processor_hash", lambda mix, name: given)
    monkeypatch.setattr("mdsmix.mix.checks.images._folder", lambda *_: None)
    lab = Lab(tmp_path)
    images = {"token": "<i>", "id": 5, "processor": "a" * 32}
    card = {"kind": "finetuning", "images": images, "max_seq_len": length, "layout": None}
    see = lab.seeing(card=card | {"fields": {"messages": "m"}, "add_bos": None, "add_eos": None})
    found = findings(lab.own(see=see, dataset={"processor": "p"}))
    assert {f.id for f in found if f.id.startswith("images")} == said


def test_a_model_of_transformers_cannot_be_told_of_documents(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    found = findings(lab.own(chat=lab.packed(), loader=of_model("hf_causal_lm", pretrained=False)))
    assert [f.id for f in found if f.severity == "warning"] == ["documents-unmasked"]


def test_packed_streams_alone_are_looked_at_as_their_loader_reads_them(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    folders = [lab.packed()["local"], lab.web()["local"]]
    mix = mix_of_streams(folders)
    assert mix.train.is_own
    assert not [f for f in findings(mix) if f.severity == "error"]
    # Under the policies that the first was packed for; one that was packed for others cannot stand beside it.
    other = lab.packed("other", more={"target_responses": "all"})["local"]
    assert not [f for f in findings(mix_of_streams([other])) if f.severity == "error"]
    found = findings(mix_of_streams([*folders, other]))
    assert [f.id for f in found if f.severity == "error"] == ["targets-packed"]


def test_the_command_is_named_only_for_streams_that_the_recipe_makes(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    mix = lab.finetuning(web=lab.web(), old=lab.web("old"), chat=lab.chat())
    ours = {"web": dataclasses.replace(mix.train.streams[0], is_sourced=True)}
    known = tuple(ours.get(s.name, s) for s in mix.train.streams)
    train = dataclasses.replace(mix.train, streams=known)
    for name in ("web", "old"):
        shard_file({"local": str(tmp_path / name)}).unlink()
    found = findings(dataclasses.replace(mix, recipe="mix.yaml", train=train))
    fixes = {(f.id, f.streams[0]): f.fix for f in found}
    command = "`mdsmix convert mix.yaml train_loader.name=finetuning --reencode`"
    again = "have old published again by whoever made it"
    assert f"re-encode web: {command}; {again}; or" in fixes["columns-loader", "web"]
    assert fixes["shard-missing", "web"].startswith("publish again web: `mdsmix convert mix.yaml`;")
    assert fixes["shard-missing", "old"] == f"{again}; or copy the files again."


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("cache_limit", "much", "1gb"),
        ("download_retry", 0, 1),
        ("seq_parallel_replication", 2, 1),
        ("packing_ratio", 0.5, 1),
        ("packing_ratio", "many", "auto"),
        ("shuffle_seed", -1, 0),
    ],
)
def test_a_value_out_of_the_range_of_its_key_is_refused(
    tmp_path: Path, key: str, wrong: Any, right: Any
) -> None:
    lab = Lab(tmp_path)
    for value, count in ((wrong, 1), (right, 0)):
        mix = lab.finetuning(chat=lab.chat(), dataset={key: value})
        told = [f.message for f in findings(mix) if f.id == "setting-value"]
        assert told == [f"{key} of train_loader is {value!r}."] * count


def test_what_a_batching_method_drops_is_counted_and_the_epoch_with_it(tmp_path: Path) -> None:
    mix = batched(Lab(tmp_path), "stratified", 10, 100, 9)
    (clipped,) = [f for f in findings(mix) if f.id == "batching-drops"]
    assert "delivers 90 of the epoch's 109 samples in batches of 10" in clipped.message
    assert "17.4% are dropped" in clipped.message
    epoch = report(mix, [])["epoch"]
    assert [(e["drawn"], e["delivered"]) for e in epoch] == [(100, 81), (9, 9)]
    table = epoch_table(epoch_of(mix.train, mix.yaml.batch_size))
    assert [row[2] for row in (*table.rows, table.total or ())] == [81, 9, 90]
    assert "(what batching_method: stratified delivers of it in batches of 10" in epoch_comment(mix)
    unknown = batched(Lab(tmp_path / "other"), "stratified", 0, 100, 9)
    assert "the batch is not known here" in epoch_comment(unknown)


def test_what_is_said_of_many_loaders_is_said_once(tmp_path: Path) -> None:
    mix = evals(Lab(tmp_path), "one", "two")
    wrong = {"batching_method": "sorted", "max_seq_len": None}
    loaders = [
        dataclasses.replace(e, section=e.section | {"dataset": e.section["dataset"] | wrong})
        for e in mix.evals
    ]
    found = findings(dataclasses.replace(mix, evals=tuple(loaders)))
    messages = [f.message for f in found if f.id in ("setting-value", "length-invalid")]
    both = "eval_loader one, eval_loader two"
    assert messages == [
        f"dataset.max_seq_len of {both} is null.",
        f"batching_method of {both} is 'sorted'.",
    ]


def test_a_shard_of_another_size_is_told_with_both_sizes(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    (resized,) = [f for f in findings(first_resized(lab, b"x")) if f.id == "shard-size"]
    assert resized.message == "shard.00000.mds of web: expected 998 bytes, found 999."


@pytest.mark.parametrize(("loader", "other"), [("text", "finetuning"), ("finetuning", "text")])
def test_where_the_other_loader_reads_all_streams_it_is_named(
    tmp_path: Path, loader: str, other: str
) -> None:
    lab = Lab(tmp_path)
    streams = {"web": lab.chunks() if loader == "text" else lab.web()}
    text = next(
        f.fix for f in findings(getattr(lab, loader)(**streams)) if f.id == "columns-loader"
    )
    assert text == f"set train_loader.name: {other}, which reads all of these streams."


def test_a_manifest_of_another_index_is_not_believed(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lying = {"index_hash": "0" * 32, "totals": {"largest_id": 9999}}
    assert "id-vocabulary" not in ids(findings(lab.text(web=lab.web(card=lying))))


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"tokens": "ndarray:int32"}, TOKEN_ROW),
        ({"tokens": "bytes"}, {"tokens": (9).to_bytes(8, "little") * LENGTH}),
        ({"text": "str"}, {"text": "a document"}),
    ],
)
def test_streams_of_other_tools_are_read_from_index_and_first_samples(
    tmp_path: Path, columns: dict[str, str], row: dict[str, Any]
) -> None:
    lab = Lab(tmp_path)
    mix = lab.text(old=lab.stream("old", columns, row, card=None))
    assert not is_refused(findings(mix))


def test_a_long_row_without_a_manifest_is_found_in_a_compressed_shard(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    row = {"tokens": list(range(5, 5 + LENGTH + 1))}
    old = lab.stream("old", {"tokens": "ndarray:int32"}, row, card=None, compression="zstd:3")
    assert "rows-too-long" in ids(findings(lab.text(old=old)))


@pytest.mark.parametrize(("prompt", "told"), [(2, "rows-cut"), (LENGTH, "sample-unusable")])
def test_long_turns_of_foundrys_converter_are_refused_only_where_no_target_is_left(
    tmp_path: Path, prompt: int, told: str
) -> None:
    lab = Lab(tmp_path)
    row = {"turns": [{"input_ids": [5] * prompt, "labels": [6] * LENGTH}]}
    found = findings(lab.finetuning(old=lab.stream("old", TURNS, row, card=None)))
    assert told in ids(found)
    assert is_refused(found) == (told == "sample-unusable")


def test_what_was_not_looked_at_is_said(tmp_path: Path) -> None:
    mix = Lab(tmp_path).text(web=(web := Lab(tmp_path).web(shards=2)), more=web | {"repeat": 2})
    size = sum(shard_file(web, n).stat().st_size for n in (0, 1))
    assert looked(mix).startswith(f"not looked at: the contents of 2 shards, {size:,} bytes, known")
    assert report(mix, [])["contents"] == {"read": False, "streams": []}
    deep = with_bytes_read(mix, Quiet())
    assert looked(deep) == f"read and hashed: 2 shards, {size:,} bytes"
    assert [each["shards"] for each in report(deep, [])["contents"]["streams"]] == [2]


def test_damage_that_keeps_the_size_is_found_by_reading_alone(tmp_path: Path) -> None:
    mix = read_through(Lab(tmp_path), b"!")
    assert not is_refused(findings(dataclasses.replace(mix, verified={})))
    (found,) = [f for f in findings(mix) if f.severity == "error"]
    assert found.message.startswith("shard.00000.mds of web: its xxh128 is ")


def test_a_bad_share_is_told_in_figures_with_the_command_that_shows_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    web = lab.web(card={"records": quarantined(6)})
    (found,) = [f for f in findings(lab.text(web=web)) if f.id == "records-bad"]
    assert found.message.startswith(
        "6 of 100 records of web (6.0%) were bad and set aside: 5 invalid_json, 1 no_text."
    )
    assert f"`mdsmix quarantine {web['local']}/train`" in found.fix


CUT = {"cut_rows": 3, "cut_tokens": 16, "tokens": 160, "longest": LENGTH + 9}


def cut(mix: Mix) -> list[str]:
    return [finding.message for finding in findings(mix) if finding.id == "rows-cut"]


def test_what_is_cut_is_counted_in_rows_and_tokens(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    chat = lab.chat(card={"totals": CUT, "kind": "finetuning", "fields": {"messages": "m"}})
    assert cut(lab.finetuning(chat=chat)) == [
        "3 of 40 samples of chat are cut, by 16 of 160 tokens (10.0%), and max_seq_len of train_loader is 8."
    ]
    assert epoch_of(lab.finetuning(chat=chat).train)[0].tokens == 144
    wider = lab.finetuning(chat=chat, dataset={"max_seq_len": LENGTH + 1})
    assert cut(wider)[0].startswith("the longest sample of chat has 17 tokens")
    pair = lab.stream(
        "faq",
        PAIR,
        PAIR_ROW,
        card={
            "totals": CUT | {"cut_rows": 1},
            "kind": "finetuning",
            "fields": {"prompt": "p", "response": "r"},
        },
    )
    assert cut(lab.finetuning(faq=pair))[0].startswith("1 of 40 samples of faq are cut, by 16 of")


def test_a_context_and_a_target_have_a_row_each(tmp_path: Path) -> None:
    lab, how = Lab(tmp_path), {"dataset": {"decoder_only_format": False}}
    totals: dict[str, Any] = {"totals": {"longest": 2 * LENGTH}, "decoder_only_format": False}
    assert not cut(lab.finetuning(chat=lab.chat(card=totals), **how))
    totals["totals"] = CUT
    assert (
        "by 16 of 160 tokens" in cut(lab.finetuning(chat=lab.chat("more", card=totals), **how))[0]
    )
    row = {"turns": [{"input_ids": [5] * LENGTH, "labels": [6] * LENGTH}]}
    theirs = lab.stream("old", TURNS, row, card=None)
    assert not cut(lab.finetuning(old=theirs, **how))
    row = {"turns": [{"input_ids": [5] * 2 * LENGTH, "labels": [6]}]}
    theirs = lab.stream("older", TURNS, row, card=None)
    told = findings(lab.finetuning(older=theirs, **how))
    assert "sides-unseen" in ids(told)
    assert "rows-cut" not in ids(told)


def test_a_stream_that_is_not_there_is_not_a_verdict(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"index\.json"):
        Lab(tmp_path).text(web={"local": str(tmp_path / "none"), "split": "train"})


@pytest.mark.parametrize(
    ("converted_for", "cut_rows", "told"),
    [
        (2 * LENGTH, 0, "sides-unseen"),
        (LENGTH, 0, None),
        (LENGTH, 1, "rows-cut"),
        (LENGTH - 1, 0, None),
        (LENGTH - 1, 1, "sides-unseen"),
    ],
)
def test_the_sum_of_what_an_encoder_and_its_decoder_read_is_no_row(
    tmp_path: Path, converted_for: int, cut_rows: int, told: str | None
) -> None:
    """Each side has max_seq_len of its own, so that no sum of two is too long."""
    found = findings(two_sided(Lab(tmp_path), converted_for, 2 * LENGTH - 1, cut_rows))
    about_length = {"rows-too-long", "rows-cut", "sides-unseen"} & set(ids(found))
    assert about_length == ({told} if told else set())
    assert not is_refused(found)
