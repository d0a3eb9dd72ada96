"""`mdsmix leaks` against plain Python sets of tuples, and by the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.leaks.audit import ScannedStream, _around, find_longest_shared, rank_leaks
from mdsmix.leaks.evaluation_grams import LENGTH, EvalSamples, hash_grams
from mdsmix.ragged import Ragged
from tests.alarm import at_most
from tests.converting import Web, chats, documents, done, mdsmix, samples, tokens
from tests.published import edit
from tests.styles import in_turn

Rows = list[list[int]]
BASE = np.random.default_rng(1).integers(0, 3, 60).tolist()
SLICES = st.builds(lambda start, length: BASE[start : start + length], st.integers(0, 45), st.integers(0, 30))  # fmt: skip
ROWS = st.lists(st.builds(list.__add__, SLICES, SLICES), max_size=6)
"Rows that share runs, at their beginnings, inside and at their ends."


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdsmix.leaks.evaluation_grams.BLOCK", 16)
    monkeypatch.setattr("mdsmix.leaks.evaluation_grams.MOST_BITS", 5)


def grams(row: list[int]) -> set[tuple[int, ...]]:
    return {tuple(row[i : i + LENGTH]) for i in range(len(row) - LENGTH + 1)}


def made(rows: Rows, common: int = 0) -> EvalSamples:
    return EvalSamples(Ragged.of(rows, "int64"), [0], common)


def found_in(items: EvalSamples, training: Rows) -> Any:
    """(grams of the items, samples) of all that is shared."""
    return items.find(Ragged.of(training, "uint16"))


def test_a_gram_that_fills_its_row_is_found_and_placeholders_of_images_are_no_text() -> None:
    """Twenty images, then other words: the runs that reach one word into these were found."""
    rows = [[*[7] * 20, *range(100, 120)], [*[7] * 20, *range(200, 205)]]
    seeing = replace(made(rows), images=(7,))
    assert (len(seeing.hashes), seeing.shorts) == (8, 1)
    assert found_in(seeing, [[*[7] * 40, 100], list(range(100, 113))])[1].tolist() == [1]
    one, other = list(range(LENGTH)), list(range(50, 50 + LENGTH))  # a block ends with each row
    items = made([one, other, one[1:]])
    assert items.shorts == 1
    assert [found_in(items, [row]).shape for row in (one, other)] == [(2, 1)] * 2


@settings(max_examples=25)
@given(ROWS, ROWS, st.sampled_from([0, 1, 2]))
def test_found_is_just_what_sets_of_tuples_share(evals: Rows, training: Rows, common: int) -> None:
    items = made(evals, common)
    times = Counter(gram for row in evals for gram in grams(row))
    usable = {gram for gram, n in times.items() if not common or n <= common}
    known = {int(hash_grams(np.array(gram))[0]): gram for gram in times}
    name = [known[number] for number in items.hashes.tolist()]
    assert (len(name), set(name)) == (len(usable), usable)
    assert items.left_out == len(times) - len(usable)
    assert items.shorts == sum(not grams(row) for row in evals)
    assert items.count(np.ones(len(name), bool)).tolist() == [len(grams(row) & usable) for row in evals]  # fmt: skip
    pairs = [(name[gram], row) for gram, row in found_in(items, training).T.tolist()]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(g, r) for r, row in enumerate(training) for g in grams(row) & usable}


def test_the_longest_run_of_two_long_rows_is_found_soon_and_what_is_around_it() -> None:
    """By every pair of places these take a minute."""
    before, behind = _around(np.arange(100), 40, 20)
    assert [before.tolist(), behind.tolist()] == [[*range(16, 40)], [*range(60, 84)]]
    mine, its = np.zeros(20_000, np.int64), np.zeros(200_000, np.int64)
    mine[15_001], its[100_000] = 1, 2
    other = np.arange(len(its))
    other[7000:7100], other[9000:9200] = mine[:100], mine[15_000:15_200]
    with at_most(8):
        assert find_longest_shared(mine, its) == (0, 0, 15_001)
        assert find_longest_shared(mine, other) == (15_000, 9000, 200)


@settings(max_examples=20)
@given(ROWS, ROWS)
def test_leaks_are_counted_sorted_and_shown_as_sets_have_it(evals: Rows, training: Rows) -> None:
    items = made(evals)
    found = found_in(items, training)
    held, expected = [*map(grams, training)], []
    for n, mine in enumerate(map(grams, evals)):
        times = sum(any(g in its for its in held) for g in mine)
        counts = sorted((-len(mine & its), at) for at, its in enumerate(held) if mine & its)
        if times:
            expected.append((-times / len(mine), -times, n, [(at, -k) for k, at in counts[:3]]))
    for mine, its in product(evals, training):
        begin, there, length = find_longest_shared(np.array(mine, int), np.array(its, int))
        assert mine[begin : begin + length] == its[there : there + length]
        assert (length >= LENGTH) == bool(grams(mine) & grams(its))
    leaks = rank_leaks(items, [ScannedStream(0, 0, *found)])
    assert [(-e.share, -e.found, e.item, [(w.sample, w.grams) for w in e.places]) for e in leaks] == sorted(expected)  # fmt: skip


def text(number: int, words: int = 40) -> str:
    draw = np.random.default_rng(number)
    return " ".join(f"w{n}" for n in draw.integers(0, 1000, words).tolist())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """50 documents in several shards, of which numbers 3 and 47 are questions too, a question that
    stands in 10 documents, as often as a gram may, and a licence that stands in 11 and in a
    question.
    """
    licence, known, patch = text(999), text(998), pytest.MonkeyPatch()
    made = Web(tmp_path_factory.mktemp("leaks"), tokenizer_folder, patch)
    more = [licence if 30 <= i < 41 else known if i < 20 and i % 2 else "" for i in range(50)]
    made.holds(text(i) + each for i, each in enumerate(more))
    questions = {f"q{i}": text(i) for i in (4, 47, 100, 101)}
    questions |= {"short": "w1", "licence": licence, "known": known}
    made.holds([{"id": id, "text": said} for id, said in questions.items()], "quiz.jsonl")
    quiz = documents("quiz.jsonl", split="eval", layout="document")
    quiz["source"]["id"] = "id"
    streams = {"web": documents("a.jsonl", layout="document"), "quiz": quiz}
    made.windows(3000)
    made.says(streams=streams, max_seq_len=2048).done()
    patch.undo()
    return made.recipe


@pytest.fixture
def out(recipe: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recipe.parent / "out", tmp_path / "out")


def leaks(*arguments: object) -> Any:
    return json.loads(done("leaks", *arguments, "--json").out)


def test_the_command_shows_what_is_trained(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = leaks(recipe)
    found = {leak["sample"]: leak for leak in tree["leaks"]}
    assert {n: leak["places"][0]["sample"] for n, leak in found.items()} == {0: 4, 1: 47, 6: 1}
    assert all(leak["share"] > 0.9 for leak in found.values())
    assert [tree[k] for k in ("samples", "too_short")] == [7, 1]
    assert found[1]["id"] == "q47"
    assert found[1]["shared"].removesuffix("<|endoftext|>").strip() == text(47)
    said = mdsmix("leaks", recipe, "-n", 1).out
    first = tree["leaks"][0]["shared"].lstrip()
    assert said.count(f"⟮{first[:40]}") == 2, "once in each passage"
    assert "⟦" not in said, "the tokens are shared, whether or not they are trained"
    assert "in ⟮ ⟯ is the longest run of tokens that both passages share" in said
    assert "⟮" not in mdsmix("leaks", recipe, "-n", 0).out
    assert "7 samples of quiz" in said
    assert "skipped 1 sample of fewer than 13 tokens" in said
    assert re.search(r"left out as common are \d+ grams in more than 10 samples", said)
    monkeypatch.setattr("mdsmix.report.leaked_samples.ROWS", 2)
    assert "the first 2 of 3 samples are listed, --json has all" in mdsmix("leaks", recipe).out
    assert "--common 0 looks for all" in said
    out = recipe.parent / "out"
    every = leaks(out / "web", "--eval", out / "quiz/eval", "--common", 0)["leaks"]
    assert {leak["sample"] for leak in every} == {0, 1, 5, 6}


def test_samples_of_shards_chats_and_packed_rows_are_told_by_their_numbers(web: Web) -> None:
    """A document that stands twice in a packed row is in one sample; each evaluation counts for
    itself.
    """
    web.windows(600)
    texts = [text(i) for i in range(6)]
    talk = [{"messages": in_turn(text(60 + i), text(i))} for i in range(6)]
    twice = [each for each in texts[::-1] for _ in "ab"]
    for name, held in (("quiz", texts), ("a", texts[::-1]), ("twice", twice), ("talk", talk)):
        web.holds(held, f"{name}.jsonl")
    streams = {
        "web": documents("a.jsonl", layout="document"),
        "twice": documents("twice.jsonl", layout="document", pack=True),
        "quiz": documents("quiz.jsonl", split="eval", layout="document"),
        "talk": chats("talk.jsonl", split="eval"),
        "packed": chats("talk.jsonl", split="eval", pack=True),
    }
    web.says(streams=streams, max_seq_len=1024).done()

    def found_of(name: str, *evals: str) -> Any:
        named = [word for each in evals for word in ("--eval", web.out / each / "eval")]
        return leaks(web.out / name, *named, "-n", 6)["leaks"]

    asked = samples(web.out / "quiz/eval")
    for name, column in (("web", "tokens"), ("twice", "input_ids")):
        rows, found = samples(web.out / name / "train"), found_of(name, "quiz")
        assert sorted(leak["sample"] for leak in found) == list(range(6))
        for leak in found:
            ids = str(tokens(asked[leak["sample"]])[:-1])[1:-1]
            for place in leak["places"]:
                assert ids in str(np.asarray(rows[place["sample"]][column]).tolist())
            assert leak["shared"].startswith(text(leak["sample"]))
    found = found_of("web", "talk", "packed")
    of_talk = [leak["sample"] for leak in found if "talk" in leak["evaluation"]]
    assert sorted(of_talk) == list(range(6))
    assert all(0.2 < leak["share"] < 0.9 for leak in found)


def test_ids_of_no_stated_tokenizer_are_told_and_of_another_one_refused(out: Path) -> None:
    web, quiz = out / "web", out / "quiz"
    alike = mdsmix("leaks", web, quiz / "eval", "--eval", quiz / "eval", "-n", 0)
    assert ("quiz/eval sample" in alike.out, "no manifest" in alike.out) == (True, False)
    edit(quiz / "eval/mdsmix.manifest", lambda tree: tree["tokenizer"].update(hash="0" * 32))
    for more, said in (
        ((), "name published streams by --eval"),
        (("--eval", quiz / "eval"), "which mean different texts"),
    ):
        answer = mdsmix("leaks", web, *more)
        assert (answer.code, said in answer.err) == (2, True)
    (quiz / "eval/mdsmix.manifest").unlink()
    answer = mdsmix("leaks", web, "--eval", quiz / "eval", "-n", 0)
    assert "no manifest says which tokenizer made the ids of " in answer.out
