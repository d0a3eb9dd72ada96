"""`mdsmix mix`: the draws follow the weights, their random order follows from the seed, and a
mix is published whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.mix.offline import drawn_samples, mix_plan, mix_streams
from mdsmix.mix.offline.drawn_samples import (
    count_samples,
    derive_seed,
    draw_copies,
    make_random_keys,
)
from mdsmix.shards.counts import Totals
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import hold_lease
from mdsmix.shards.shard_samples import read_all_samples
from mdsmix.shards.token_ids import decode_tokens
from mdsmix.storage import Location, locate
from tests import published as hand
from tests.converting import Answer, manifest_of, mdsmix, read_files, read_times, run_ok
from tests.published import CARD, CONCAT, PAIR, TURNS, publish, write_mix

TEXT, FINETUNING = ({"train_loader": {"name": name}} for name in ("text", "finetuning"))


@pytest.fixture(autouse=True)
def _known_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdsmix.mix.streams.resolve._open_run_tokenizer", lambda *_: hand.TOKENIZER)


def concat_rows(n: int, first: int = 2) -> list[dict[str, Any]]:
    """Return `n` different rows. Their first token is `first`, which identifies the stream."""
    return [{"tokens": [first, *divmod(i, 500), 7, 8, 9, 10, 0]} for i in range(n)]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Write a recipe of two streams: a of 300 samples, b of 200."""
    publish(tmp_path / "a", CONCAT, concat_rows(300, 2), card={}, shards=4)
    publish(tmp_path / "b", CONCAT, concat_rows(200, 3), card={}, shards=3, compression="zstd")
    return write_mix(tmp_path, "a", "b", **TEXT)


def invoke(recipe: Path, *arguments: object, out: str = "out", **how: bool) -> Answer:
    return mdsmix("mix", recipe, "--out", recipe.parent / out, *arguments, **how)


def output_of(recipe: Path, *arguments: object) -> str:
    return invoke(recipe, *arguments, together=True).out


def mix(recipe: Path, *arguments: object, out: str = "out") -> Path:
    answer = invoke(recipe, *arguments, out=out)
    assert answer.code == 0, answer.err
    return recipe.parent / out / "train"


def refused(code: int, match: str, recipe: Path, *arguments: object, out: str = "out") -> None:
    """Require a refusal in one sentence that matches, and no file in `out`."""
    result = invoke(recipe, *arguments, out=out)
    assert (result.code, match in result.err) == (code, True), result
    assert read_files(recipe.parent / "out") == {}


def samples(folder: Path) -> list[bytes]:
    place, shards = locate(folder), read_index(locate(folder)).shards
    return [bytes(sample) for shard in shards for sample in read_all_samples(place, shard).slices()]


def source(recipe: Path, name: str) -> Counter[bytes]:
    return Counter(samples(recipe.parent / name / "train"))


OF_THE_RUN = ("train_loader.persistent_workers=true", "train_loader.num_workers=0")
DRAWN: tuple[tuple[tuple[str, ...], dict[int, int], dict[int, int]], ...] = (
    ((), {1: 300}, {1: 200}), (("mix.a.repeat=2",), {2: 300}, {1: 200}),
    (("mix.a.repeat=0.5",), {1: 150}, {1: 200}), (("mix.a.repeat=0",), {}, {1: 200}),
    (("mix.a.choose=700",), {3: 100, 2: 200}, {1: 200}),
    (("mix.a.proportion=0.3", "mix.b.proportion=0.7"), {1: 150}, {2: 150, 1: 50}),
    (("train_loader.dataset.epoch_size=100",), {1: 60}, {1: 40}),
    (('streams.heldout={"local": "/nowhere", "split": "val"}',), {1: 300}, {1: 200}),
    (OF_THE_RUN, {1: 300}, {1: 200}),
)  # fmt: skip
"""Weights, and how many samples of a and of b are drawn so often: as often as all others, or once
more.
"""


def test_every_sample_is_drawn_as_often_as_its_weight_requires(two: Path) -> None:
    a, b = source(two, "a"), source(two, "b")
    for number, (weights, of_a, of_b) in enumerate(DRAWN):
        folder = mix(two, *weights, out=str(number))
        drawn = Counter(samples(folder))
        assert drawn.keys() <= (a + b).keys(), weights
        assert Counter(n for sample, n in drawn.items() if sample in a) == of_a, weights
        assert Counter(n for sample, n in drawn.items() if sample not in a) == of_b, weights
        assert [part.name for part in manifest_of(folder).mixed] == ["a", "b"][not of_a :]


def test_the_same_seed_gives_the_same_bytes_in_any_order_of_the_recipe(two: Path) -> None:
    draw = ("mix.a.repeat=1.5", "--seed")
    folder = mix(two, *draw, 5)
    known = "3ca67b948ff4751157e205887564a67b"
    assert read_index(locate(folder)).hash == known, "on any machine, with any numpy"
    tree = json.loads(two.read_text())
    tree["streams"] = dict(reversed(tree["streams"].items()))
    two.write_text(json.dumps(tree))
    assert read_files(mix(two, *draw, 5, out="again")) == read_files(folder)
    other = mix(two, *draw, 6, out="other")
    assert Counter(samples(other)) != Counter(samples(folder)), "another seed draws others"


def test_the_order_is_a_shuffle_of_all_samples(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, drawn = source(two, "a"), samples(mix(two))
    of_a = np.array([sample in a for sample in drawn])
    # Neighbours are of one stream with a probability of 0.6² + 0.4².
    assert 0.42 < (of_a[1:] == of_a[:-1]).mean() < 0.62
    ascending = sum(x < y for x, y in pairwise(s for s in drawn if s in a))
    assert 120 < ascending < 180, "half of the neighbours of a random order ascend"
    monkeypatch.setattr(mix_plan, "BUCKET_BYTES", 700)
    monkeypatch.setattr(drawn_samples, "CHUNK", 3)
    folder = mix(two, out="buckets")
    assert samples(folder) == drawn
    assert len(read_index(locate(folder)).shards) > 10
    monkeypatch.setattr(mix_plan, "BUCKET_ROWS", 10)
    assert samples(mix(two, out="rows")) == drawn


def test_memory_does_not_grow_with_a_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, row = {"tokens": "ndarray:uint16:1024"}, {"tokens": np.arange(1024) % 500}
    publish(tmp_path / "a", columns, [row] * 500, shards=40)
    recipe = write_mix(tmp_path, "a", max_seq_len=1024, **TEXT)
    monkeypatch.setattr(mix_plan, "BUCKET_BYTES", 250_000)
    mix(recipe, "mix.a.choose=1", out="warm")

    def peak(out: str) -> int:
        tracemalloc.start()
        mix(recipe, "mix.a.repeat=8", out=out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    # Python's table of interned strings, 8 MB late in a long test run, may double in one of the
    # two, never in both.
    assert any(peak(out) < 8 * 500 * 2048 // 3 for out in ("first", "second"))


def test_totals_count_only_drawn_samples(tmp_path: Path) -> None:
    """Of rows of 4, 9 and 2 tokens the second, which has the largest id and is the longest, is
    never drawn.
    """
    rows = [{"input_ids": [2], "labels": [n] * (size - 1)} for n, size in ((5, 4), (9, 9), (7, 2))]
    publish(tmp_path / "faq", PAIR, rows, card={"kind": "finetuning"})
    place = locate(tmp_path / "faq/train")
    [shard] = read_index(place).shards
    tokens, card = decode_tokens(shard, read_all_samples(place, shard)), manifest_of(place.url)
    copies = map(np.array, ([0, 0, 0], [2, 0, 1], [2, 3, 1]))
    nothing, found, longest = (count_samples(tokens, each, card) for each in copies)
    assert (found.samples, found.tokens, found.largest_id, found.longest) == (3, 10, 7, 4)
    # The loader appends an EOS to each response, which is trained.
    assert (found.loss_tokens, found.lengths) == (2 * 4 + 2, {"2^2": 2, "2^1": 1})
    assert (longest.cut_rows, nothing) == (3, Totals())


def test_manifest_record_and_table_count_the_draws_of_each_stream(two: Path) -> None:
    output = output_of(two, "mix.a.repeat=0.5", "--seed", 9)
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "a 300 repeat 0.5 150 42.9% 1,200 42.9%" in rows
    assert "b 200 all 200 57.1% 1,600 57.1%" in rows
    assert "all 500 350 100.0% 2,800 100.0%" in rows
    folder = two.parent / "out/train"
    card, index = manifest_of(folder), read_index(locate(folder))
    mixed = [(m.name, m.samples, m.drawn, m.tokens, m.weight) for m in card.mixed]
    assert mixed == [("a", 300, 150, 1200, {"repeat": 0.5}), ("b", 200, 200, 1600, {})]
    assert card.mixed[0].index_hash == read_index(locate(two.parent / "a" / "train")).hash
    assert (card.seed, card.tokenizer, card.records.adds_up) == (9, CARD, True)
    assert (card.index_hash, card.totals.samples) == (index.hash, index.samples)


def test_a_second_run_writes_nothing_unless_something_changed(two: Path) -> None:
    folder = mix(two)
    before, stamps = (folder / "index.json").read_bytes(), read_times(folder)
    assert "up to date, seed 0" in output_of(two)
    assert read_times(folder) == stamps
    shutil.copy(two.parent / "a" / "train" / "index.json", folder)
    assert "up to date" not in output_of(two), "the index was replaced"
    assert (folder / "index.json").read_bytes() == before
    (two.parent / "b" / "train" / "mdsmix.manifest").unlink()
    assert "the mix has no manifest, because one of its streams has none" in output_of(two)
    assert not (folder / "mdsmix.manifest").exists()
    assert "up to date" in output_of(two)
    assert len(samples(mix(two, "mix.a.repeat=2", "--replace"))) == 800


def test_a_mix_is_checked_rendered_and_mixed_again_like_any_stream(two: Path) -> None:
    plain, packed = mix(two), mix(two, "compression=zstd:3", out="packed")
    assert [p.suffix for p in packed.iterdir() if ".mds" in p.suffixes] == [".zstd"]
    assert samples(packed) == samples(plain)
    again = write_mix(two.parent, "out", **TEXT)
    shown = run_ok("render-yaml", again).out
    assert "out 500 500 100.0% 4,000 100.0%" in " ".join(shown.split())
    assert len(samples(mix(again, out="second"))) == 500


def test_the_refusal_of_different_streams_names_the_remedy(tmp_path: Path) -> None:
    faq = {"kind": "finetuning", "fields": {"prompt": "p", "response": "r"}}
    publish(tmp_path / "faq", PAIR, [hand.PAIR_ROW] * 30, card=faq)
    chat = faq | {"fields": {"messages": "m"}}
    publish(tmp_path / "chat", TURNS, [hand.TURNS_ROW] * 20, card=chat)
    publish(tmp_path / "web", hand.SPLIT, [hand.SPLIT_ROW] * 20, card={})
    publish(tmp_path / "all", PAIR, [hand.PAIR_ROW], card=faq | {"target_prompts": "all"})
    for names, words in (
        ("faq chat", "columns: compact gives conversations the columns of pairs"),
        ("web faq", "or mix them while training"),
        ("faq all", "all has target_prompts: all, but faq has target_prompts: none"),
    ):
        recipe = write_mix(tmp_path, *names.split(), target_prompts="all", **FINETUNING)
        refused(3, words, recipe)


def test_streams_that_cannot_be_mixed_are_refused(two: Path) -> None:
    for columns, card, weights, words in (
        ({"tokens": "ndarray:uint16"}, {}, (), "all samples of a mix must have the same columns"),
        (CONCAT, {"tokenizer": replace(CARD, hash="b" * 32)}, (), "error tokenizer-differs [b]"),
        (CONCAT, {}, ("mix.a.repeat=0", "mix.b.repeat=0"), "draw no sample of any stream"),
        (CONCAT, {}, ("mix.a.repeat=0.001",), "weights-zero"),
    ):
        publish(two.parent / "b", columns, concat_rows(20), card=card)
        refused(3, words, two, *weights)
    bad = two.parent / "a/train/shard.00002.mds"
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    refused(4, f"the shard {bad} is damaged: the file's xxh128 hash is", two)
    bad.unlink()
    refused(3, "shard.00002.mds", two)


def test_a_stream_of_the_recipe_is_never_replaced_and_others_with_replace(two: Path) -> None:
    (two.parent / "sourced").symlink_to(two.parent / "a")
    before, message = read_files(two.parent / "a"), "is the folder of the recipe's stream a"
    for place in ("a", "a/train", "sourced"):
        refused(2, message, two, out=place)
    assert read_files(two.parent / "a") == before
    other = publish(two.parent / "other", CONCAT, concat_rows(3), card={})
    refused(2, "`mdsmix mix` did not make", two, out="other")
    (other / "train" / "index.json").write_text("{")  # a damaged index is none
    assert len(samples(mix(two, "--replace", out="other"))) == 500
    before = read_files(folder := mix(two, "--seed", 3))
    publish(two.parent / "c", CONCAT, concat_rows(9))
    was = 'contains the samples of another mix, {"a":{},"b":{}} (seed 3, columns tokens)'
    for streams, change, draw in (
        ("ab", ("--seed", 4), '{"a":{},"b":{}} (seed 4,'),
        ("ab", ("mix.a.repeat=2",), '{"a":{"repeat":2},"b":{}} (seed 3,'),
        ("ab", ("mix.b.repeat=0",), '{"a":{}} (seed 3,'),
        ("c", (), '{"c":{}} (seed 3,'),
    ):
        recipe = write_mix(two.parent, *streams, **TEXT)
        result = invoke(recipe, "--seed", 3, *change)
        assert result.code == 2
        assert f"{was}. This mix, {draw}" in result.err
        assert read_files(folder) == before
    assert len(samples(mix(recipe, "--replace"))) == 9


def test_the_same_draw_of_streams_that_have_changed_replaces_it(two: Path) -> None:
    ways = {"all": (), "shares": ("mix.a.share=0.5", "budget=0.5 passes of a")}
    before = {way: len(samples(mix(two, *keys, out=way))) for way, keys in ways.items()}
    publish(two.parent / "a", CONCAT, concat_rows(50), card={})
    for way, keys in ways.items():
        assert len(samples(mix(two, *keys, out=way))) < before[way]


def test_an_interrupted_run_leaves_nothing(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, mixed_before = (
        read_files(mix(two, out="whole")),
        read_files(mix(two, "mix.a.repeat=2", out="old")),
    )
    stored, temporary = mix_streams.store_shards, two.parent / "tmp"

    def killed(*arguments: Any) -> Any:
        stored(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mix_plan, "BUCKET_BYTES", 700)
        patch.setattr(mix_streams, "store_shards", killed)
        for out in ("out", "old"):
            assert invoke(two, "--tmp", temporary, "--replace", out=out).code == 130
    assert not (two.parent / "out" / "train" / "index.json").exists()
    assert read_files(two.parent / "old" / "train").items() >= mixed_before.items()
    assert list(temporary.iterdir()) == []
    assert read_files(mix(two)).items() >= whole.items()


def test_a_stream_published_before_the_lease_is_kept(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = two.parent / "out"

    @contextmanager
    def late(*arguments: Any) -> Iterator[Any]:
        with hold_lease(*arguments) as held:
            publish(out, CONCAT, concat_rows(3), card={})
            yield held

    monkeypatch.setattr(mix_streams, "hold_lease", late)
    assert "`mdsmix mix` did not make" in invoke(two).err
    assert len(samples(out / "train")) == 3


def test_a_second_run_at_the_same_time_is_refused_with_the_first_ones_process(two: Path) -> None:
    """The first run may be a mix or a conversion. An up-to-date mix needs no lease."""
    before = read_files(folder := mix(two))
    with hold_lease(locate(folder), lambda _: None), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(invoke, two, "mix.a.repeat=2", "--replace").result()
        assert (answer.code, "is being written by process" in answer.err) == (4, True)
        assert "up to date" in pool.submit(output_of, two).result()
    assert read_files(folder) == before


def test_a_run_that_lost_the_lease_publishes_nothing(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, stored = read_files(out := mix(two)), mix_streams.store_shards

    def robbed(folder: Location, *arguments: Any) -> Any:
        (folder / ".mdsmix" / "lease").write(b"another's")
        return stored(folder, *arguments)

    monkeypatch.setattr(mix_streams, "store_shards", robbed)
    assert "taken over by another run" in invoke(two, "mix.a.repeat=2", "--replace").err
    assert read_files(out).items() >= before.items()


def test_a_draw_is_of_the_smallest_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdsmix.mix.offline.drawn_samples.BLOCK", 64)
    seed = derive_seed(1, "x")
    for more in (0, 1, 500, 999):
        copies = np.concatenate([*draw_copies([300, 700], 2000 + more, seed)])
        smallest = np.argsort(make_random_keys(seed, 0, 1000))[:more]
        assert set(np.flatnonzero(copies == 3)) == set(smallest)
        assert copies.sum() == 2000 + more
