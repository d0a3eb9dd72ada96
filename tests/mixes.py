"""Mixes for the tests of the checks: streams to publish, and the training YAMLs that read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mdsmix.kinds import open_recipe
from mdsmix.mix.check import verify_streams
from mdsmix.mix.streams.mix import Mix
from mdsmix.mix.streams.resolve import make_mix, make_recipe_mix
from mdsmix.shards.counts import Records
from mdsmix.shards.published import StreamFault
from mdsmix.storage import locate
from tests import published as hand
from tests.converting import Told
from tests.published import CARD, CONCAT, LENGTH, PAIR, SPLIT, TOKEN_ROW, TURNS, TURNS_ROW, edit

Keys = dict[str, Any]
Make = Callable[[Path], Mix]
P = ParamSpec("P")


@dataclass(frozen=True)
class Sort:
    """A stream to publish, of 40 equal rows unless it says otherwise."""

    name: str
    columns: dict[str, str]
    row: Keys
    how: Keys = field(default_factory=dict)
    change: Callable[[Path], object] = bool
    "Made to the folder of its split."
    section: Callable[[Keys], Keys] = dict

    def __call__(self, name: str = "", **how: Any) -> Sort:
        """The same under another name, or published otherwise."""
        return replace(self, name=name or self.name, how=self.how | how)

    def __or__(self, keys: Keys) -> Sort:
        return replace(self, section=lambda own: own | keys)

    def at(self, home: Path) -> Keys:
        """Publishes it below `home`; its section."""
        rows = self.how.get("rows") or [self.row] * self.how.get("n", 40)
        how = {"card": {}} | {k: v for k, v in self.how.items() if k not in ("rows", "n")}
        folder = hand.publish(home / self.name, self.columns, rows, **how)
        self.change(folder / "train")
        return self.section({"local": str(folder), "split": "train"})


THEIRS: Keys = {"card": None}
"Of other tools: without a manifest."
OF_TURNS = {"kind": "finetuning", "layout": None, "add_bos": None, "add_eos": None}
MESSAGES = {"fields": {"messages": "m"}}
PACK = OF_TURNS | MESSAGES | {"pack": True}
WEB = Sort("web", CONCAT, TOKEN_ROW)
DOCS = Sort("docs", {"tokens": "ndarray:uint16"}, TOKEN_ROW)
BARE = WEB(card=None)
CHUNKS = Sort("web", SPLIT, hand.SPLIT_ROW)
CHAT = Sort("chat", TURNS, TURNS_ROW)
PACKS = Sort("chat", hand.PACKED, hand.PACKED_ROW, {"card": PACK})
FAQ = Sort("faq", PAIR, hand.PAIR_ROW)
TEXT = Sort("raw", {"text": "str"}, {"text": "a"}, THEIRS)
RAW = Sort("raw", {"prompt": "str", "response": "str"}, {"prompt": "hi", "response": "ho"}, THEIRS)
PICKLES = Sort("web", CONCAT | {"x": "pkl"}, TOKEN_ROW | {"x": b"N."}, THEIRS)
INT32, UINT16 = (
    Sort("old", {"tokens": "bytes"}, {"tokens": dtype(TOKEN_ROW["tokens"]).tobytes()}, THEIRS)
    for dtype in (np.int32, np.uint16)
)
IMAGES = {"images": "bytes", "sizes": "json", **TURNS}
SEES = Sort("see", IMAGES, {"images": bytes(8), "sizes": [], **TURNS_ROW})
TWO = WEB(shards=2, card=None)


def at_home(build: Callable[Concatenate[Path, P], Mix]) -> Callable[P, Make]:
    """The mix is built later, when the folder is known."""
    return lambda *args, **keys: lambda home: build(home, *args, **keys)


@at_home
def loaded(home: Path, name: str, *sorts: Sort, loader: Any = (), top: Any = (), **dataset: Any) -> Mix:  # fmt: skip
    """The streams under that loader. `loader` and `top`: keys of its section and of the config;
    `...` takes a key out.
    """
    streams = {sort.name: sort.at(home) for sort in sorts}
    keys = {"max_seq_len": LENGTH, "shuffle": True, "streams": streams} | dataset
    if keys["streams"] is ...:  # the dataset is the one stream
        keys |= streams["web"]
    section = {"name": name, "drop_last": True, "num_workers": 2} | dict(loader)
    section["dataset"] = {k: v for k, v in keys.items() if v is not ...}
    section = {k: v for k, v in section.items() if v is not ...}
    config = {"max_seq_len": LENGTH, "train_loader": section} | dict(top)
    return replace(make_mix(config, "train.yaml"), tokenizer=CARD)


own = partial(loaded, "mdsmix")


def text(*sorts: Sort, **keys: Any) -> Make:
    return loaded("text", *(sorts or [WEB]), **keys)


def finetuning(*sorts: Sort, **keys: Any) -> Make:
    return loaded("finetuning", *(sorts or [CHAT]), **({"decoder_only_format": True} | keys))


@at_home
def converted_by(home: Path, source: bytes | None = b"", **keys: Any) -> Mix:
    """The published stream `web`, and its recipe. `source`: what its source file holds now, None
    without one; `keys`: of the stream, as the recipe says them now.
    """
    WEB(card={"fields": {"text": "text"}, "min_tokens": 0}).at(home)
    if source is not None:
        (home / "a.jsonl").write_bytes(source)
    stream = {"kind": "pretraining", "source": {"path": "a.jsonl", "text": "text"}} | keys
    tree = {"tokenizer": "tok", "max_seq_len": LENGTH, "local": ".", "streams": {"web": stream}}
    path = home / "recipe.yaml"
    path.write_text(json.dumps(tree))
    recipe = open_recipe(path)
    made = make_recipe_mix(recipe, str(path), may_estimate=False)
    return replace(made, run_tokenizer=hand.TOKENIZER, tokenizer=CARD)


@at_home
def of_mix(home: Path, make: Make, **changes: Any) -> Mix:
    return replace(make(home), **changes)


def ended(opened: Any, target_responses: str = "all") -> Make:
    """Chats by that tokenizer, all of whose answers are trained unless `target_responses` says
    otherwise.
    """
    card = OF_TURNS | MESSAGES | {"target_responses": target_responses}
    return of_mix(
        finetuning(CHAT(card=card), target_responses=target_responses), run_tokenizer=opened
    )


def tokenized(make: Make, **changes: Any) -> Make:
    """The run's tokenizer is another."""
    return of_mix(make, tokenizer=replace(CARD, **changes))


def model(name: str | None = None, **section: Any) -> Keys:
    return {"top": {"model": section | ({"name": name} if name else {})}}


def tokenizer(name: str) -> Keys:
    return {"top": {"tokenizer": {"name": name}}}


def totals(sort: Sort, **counts: Any) -> Sort:
    return sort(card=sort.how.get("card", {}) | {"totals": counts})


def bytes_changed(sort: Sort, change: Callable[[bytes], bytes]) -> Sort:
    def rewrite(at: Path) -> None:
        (shard,) = at.glob("shard.*")
        shard.write_bytes(change(shard.read_bytes()))

    return replace(sort, change=rewrite)


def placed(section: Callable[[str], Keys], name: str = "web") -> Sort:
    """A stream whose section is made of its place."""
    return replace(WEB(name), section=lambda own: section(own["local"]))


def cached(content: bytes | None) -> Make:
    """A stream with a remote and a local cache whose index is `content`, or the remote's own."""

    def section(local: str) -> Keys:
        remote, cache = Path(local, "train"), Path(local).with_name("cache")
        (cache / "train").mkdir(parents=True)
        (cache / "train/index.json").write_bytes(content or (remote / "index.json").read_bytes())
        return {"remote": local, "local": str(cache), "split": "train"}

    return text(placed(section))


def preferring(*rewards: bool, **keys: Any) -> Make:
    """A stream of preferences for each, with a reward or without. `keys`: of the loader's
    dataset.
    """
    row = dict.fromkeys(("prompt", "chosen", "rejected"), bytes([5] + [0] * 7))
    rows = [row | ({"chosen_reward": bytes(8)} if has else {}) for has in rewards]
    sorts = (Sort(f"s{n}", dict.fromkeys(r, "bytes"), r, THEIRS) for n, r in enumerate(rows))
    return loaded("pairwise_preference", *sorts, **keys)


def two_sided(max_seq_len: int, longest: int, cut_rows: int = 0) -> Make:
    """An encoder-decoder's stream that was converted for that length, in a mix for LENGTH."""
    counted = {"longest": longest, "cut_rows": cut_rows, "cut_tokens": cut_rows}
    card = {"decoder_only_format": False, "max_seq_len": max_seq_len, "totals": counted}
    return finetuning(CHAT(card=card), decoder_only_format=False)


def theirs(*lengths: tuple[int, int], **dataset: Any) -> Make:
    """Samples of LLM-Foundry's converter: of each the tokens of its prompt and of its response."""
    turns = ({"input_ids": [5] * prompt, "labels": [6] * answer} for prompt, answer in lengths)
    return finetuning(CHAT(rows=[{"turns": [turn]} for turn in turns], **THEIRS), **dataset)


def evals(*labels: str) -> Make:
    section = {"name": "finetuning", "dataset": {"hf_name": "a/b", "max_seq_len": LENGTH}}
    section |= {"num_workers": 2, "drop_last": False}
    return text(top={"eval_loader": [section | ({"label": of} if of else {}) for of in labels]})


@at_home
def lone_eval(home: Path, **keys: Any) -> Mix:
    """One evaluation that is not in a list, with further keys in its section."""
    section = {"name": "text", "num_workers": 2, "drop_last": False} | keys
    section["dataset"] = {"streams": {"held": DOCS.at(home)}, "max_seq_len": LENGTH}
    return text(top={"eval_loader": section})(home)


@at_home
def evaluated(home: Path, repeat: float, **dataset: Any) -> Mix:
    """An evaluation that draws its stream so often."""
    held = DOCS.at(home) | {"repeat": repeat}
    keys = {"streams": {"held": held}, "max_seq_len": LENGTH} | dataset
    section = {"label": "held", "name": "text", "num_workers": 2, "drop_last": False}
    return text(top={"eval_loader": [section | {"dataset": keys}]})(home)


def with_mask(token: str | None) -> Make:
    """A loader that masks tokens, under a tokenizer with that mask token."""
    variables = {"mask_token": token} if token else {}
    opened = replace(hand.TOKENIZER, template_variables=variables)
    return of_mix(text(mlm_probability=0.15), run_tokenizer=opened)


def read_by(**changes: str) -> Make:
    """A mix whose tokenizer was opened with these remarks on how its folder was read."""
    return of_mix(text(), run_tokenizer=replace(hand.TOKENIZER, **changes))


def own_place(split: str) -> Make:
    """A dataset that is one local stream by itself, in the folder of that split."""

    def section(local: str) -> Keys:
        folder = str(Path(local, "train"))[: -len(split) - 1]
        return {"remote": folder, "local": folder, "split": split}

    return finetuning(placed(section), streams=...)


def batched(method: str, batch: int, *sizes: int) -> Make:
    sorts = (WEB(f"s{i}", n=n) for i, n in enumerate(sizes))
    return text(*sorts, batching_method=method, top={"global_train_batch_size": batch})


@at_home
def pretrained(home: Path, own: Any, run: Any, is_seen: bool = True, **of: Any) -> Mix:
    """A pretrained model with a tokenizer of its own, and the run's; what is added to either stands
    behind 100.
    """
    known = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "hub/model"} | of
    mix = text(top={"model": known, "tokenizer": {"name": "hub/t"}})(home)
    for name, ids in (("own", own), ("run", run)):
        built = Tokenizer(WordLevel(ids, unk_token=next(iter(ids))))
        built.add_tokens([token for token, i in ids.items() if i > 100])
        built.save(str(home / f"{name}.json"))
    mix = replace(
        mix,
        run_tokenizer=SimpleNamespace(path=str(home / "run.json"), class_changes="", note=""),
        tokenizer_problem=None,
    )
    mix.__dict__["model_tokenizer"] = str(home / "own.json") if is_seen else None
    return mix


@at_home
def fetched_by_nodes(home: Path, published: str) -> Mix:
    place = home / "tokenizer-0123abcd"
    place.mkdir(parents=True)
    (place / f"mdsmix{published}").write_text("{}")
    return replace(text()(home), tokenizer_home=locate(place))


def bad(count: int, **records: Any) -> Make:
    """A stream of 100 records, of which so many are bad."""
    reasons = {"invalid_json": count - 1, "no_text": 1} if count else {}
    counts = {"read": 100, "written": 100 - count, "quarantined": reasons} | records
    return text(WEB(card={"records": Records(**counts)}))


@at_home
def read_through(home: Path, make: Make, *in_transit: StreamFault) -> Mix:
    """Every byte of its streams is read, of which some came damaged once."""
    mix = verify_streams(make(home), Told())
    found = {url: replace(each, in_transit=in_transit) for url, each in mix.verified.items()}
    return replace(mix, verified=found)


def damaged(by: bytes) -> Make:
    """The last bytes of its shard are these."""
    changed = bytes_changed(BARE, lambda data: data[: len(data) - len(by)] + by)
    return read_through(text(changed))


def second(change: Callable[[list[Any]], object]) -> Make:
    """Two shards, of which the index says something else of the second."""
    return text(
        replace(TWO, change=lambda at: edit(at / "index.json", lambda t: change(t["shards"])))
    )
