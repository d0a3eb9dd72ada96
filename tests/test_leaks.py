"""`mdsmix leaks`, compared with plain Python sets of tuples, and run from the command line."""

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

from mdsmix.leaks.audit import ScannedStream, _context, find_longest_shared, rank_leaks
from mdsmix.leaks.evaluation_grams import LENGTH, EvalSamples, hash_grams
from mdsmix.ragged import Ragged
from tests.alarm import fail_after
from tests.converting import Project, chats, documents, mdsmix, read_samples, run_ok, tokens
from tests.published import edit
from tests.styles import make_dialogue

Rows = list[list[int]]
BASE = np.random.default_rng(1).integers(0, 3, 60).tolist()
SLICES = st.builds(
    lambda start, length: BASE[start : start + length], st.integers(0, 45), st.integers(0, 30)
)
ROWS = st.lists(st.builds(list.__add__, SLICES, SLICES), max_size=6)
"Rows that share runs, at their beginnings, inside and at their ends."


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdsmix.leaks.evaluation_grams.BLOCK", 16)
    monkeypatch.setattr("mdsmix.leaks.evaluation_grams.MOST_BITS", 5)


def grams(row: list[int]) -> set[tuple[int, ...]]:
    return {tuple(row[i : i + LENGTH]) for i in range(len(row) - LENGTH + 1)}


def eval_samples(rows: Rows, common: int = 0) -> EvalSamples:
    return EvalSamples(Ragged.from_rows(rows, "int64"), [0], common)


def find_in(items: EvalSamples, training: Rows) -> Any:
    """Return the numbers of the shared grams and of their training samples."""
    return items.find(Ragged.from_rows(training, "uint16"))


def test_a_gram_as_long_as_its_row_is_found_and_image_placeholders_are_ignored() -> None:
    """Grams of twenty image tokens and one word were found once."""
    rows = [[*[7] * 20, *range(100, 120)], [*[7] * 20, *range(200, 205)]]
    seeing = replace(eval_samples(rows), images=(7,))
    assert (len(seeing.hashes), seeing.shorts) == (8, 1)
    assert find_in(seeing, [[*[7] * 40, 100], list(range(100, 113))])[1].tolist() == [1]
    one, other = list(range(LENGTH)), list(range(50, 50 + LENGTH))  # a block ends with each row
    items = eval_samples([one, other, one[1:]])
    assert items.shorts == 1
    assert [find_in(items, [row]).shape for row in (one, other)] == [(2, 1)] * 2


@settings(max_examples=25)
@given(ROWS, ROWS, st.sampled_from([0, 1, 2]))
def test_grams_are_found_exactly_as_by_sets_of_tuples(
    evals: Rows, training: Rows, common: int
) -> None:
    items = eval_samples(evals, common)
    times = Counter(gram for row in evals for gram in grams(row))
    usable = {gram for gram, n in times.items() if not common or n <= common}
    known = {int(hash_grams(np.array(gram))[0]): gram for gram in times}
    name = [known[number] for number in items.hashes.tolist()]
    assert (len(name), set(name)) == (len(usable), usable)
    assert items.left_out == len(times) - len(usable)
    assert items.shorts == sum(not grams(row) for row in evals)
    counts = items.count(np.ones(len(name), bool)).tolist()
    assert counts == [len(grams(row) & usable) for row in evals]
    pairs = [(name[gram], row) for gram, row in find_in(items, training).T.tolist()]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(g, r) for r, row in enumerate(training) for g in grams(row) & usable}


def test_the_longest_run_of_two_long_rows_is_found_fast() -> None:
    """Comparing every pair of positions takes a minute."""
    before, after = _context(np.arange(100), 40, 20)
    assert [before.tolist(), after.tolist()] == [[*range(16, 40)], [*range(60, 84)]]
    mine, its = np.zeros(20_000, np.int64), np.zeros(200_000, np.int64)
    mine[15_001], its[100_000] = 1, 2
    other = np.arange(len(its))
    other[7000:7100], other[9000:9200] = mine[:100], mine[15_000:15_200]
    with fail_after(8):
        assert find_longest_shared(mine, its) == (0, 0, 15_001)
        assert find_longest_shared(mine, other) == (15_000, 9000, 200)


@settings(max_examples=20)
@given(ROWS, ROWS)
def test_leaks_are_counted_and_sorted_as_by_sets_of_tuples(evals: Rows, training: Rows) -> None:
    items = eval_samples(evals)
    found = find_in(items, training)
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
    ranked = []
    for leak in leaks:
        sources = [(source.sample, source.grams) for source in leak.sources]
        ranked.append((-leak.share, -leak.leaked_grams, leak.item, sources))
    assert ranked == sorted(expected)


def text(number: int, words: int = 40) -> str:
    draw = np.random.default_rng(number)
    return " ".join(f"w{n}" for n in draw.integers(0, 1000, words).tolist())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Convert 50 documents and a quiz. Documents 4 and 47 are questions too. One question is in 10
    documents, as often as a gram may occur, and a licence is in 11 and in a question.
    """
    licence, known, patch = text(999), text(998), pytest.MonkeyPatch()
    made = Project(tmp_path_factory.mktemp("leaks"), tokenizer_folder, patch)
    more = [licence if 30 <= i < 41 else known if i < 20 and i % 2 else "" for i in range(50)]
    made.write_source(text(i) + each for i, each in enumerate(more))
    questions = {f"q{i}": text(i) for i in (4, 47, 100, 101)}
    questions |= {"short": "w1", "licence": licence, "known": known}
    made.write_source(
        [{"id": id, "text": output} for id, output in questions.items()], "quiz.jsonl"
    )
    quiz = documents("quiz.jsonl", split="eval", layout="document")
    quiz["source"]["id"] = "id"
    streams = {"web": documents("a.jsonl", layout="document"), "quiz": quiz}
    made.set_window_size(3000)
    made.configure(streams=streams, max_seq_len=2048).convert_ok()
    patch.undo()
    return made.recipe


@pytest.fixture
def out(recipe: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recipe.parent / "out", tmp_path / "out")


def leaks(*arguments: object) -> Any:
    return json.loads(run_ok("leaks", *arguments, "--json").out)


def test_the_command_shows_the_leaked_samples(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = leaks(recipe)
    found = {leak["sample"]: leak for leak in tree["leaks"]}
    assert {n: leak["places"][0]["sample"] for n, leak in found.items()} == {0: 4, 1: 47, 6: 1}
    assert all(leak["share"] > 0.9 for leak in found.values())
    assert [tree[k] for k in ("samples", "too_short")] == [7, 1]
    assert found[1]["id"] == "q47"
    assert found[1]["shared"].removesuffix("<|endoftext|>").strip() == text(47)
    output = mdsmix("leaks", recipe, "-n", 1).out
    first = tree["leaks"][0]["shared"].lstrip()
    assert output.count(f"⟮{first[:40]}") == 2, "once in each passage"
    assert "⟦" not in output, "the tokens are shared, whether or not they are trained"
    assert "⟮ ⟯ mark the longest run of tokens that both passages share" in output
    assert "⟮" not in mdsmix("leaks", recipe, "-n", 0).out
    assert "of 7 samples of quiz: 3 samples leaked" in output
    assert "skipped 1 sample with fewer than 13 tokens" in output
    assert re.search(r"ignored \d+ grams as common, in more than 10 samples", output)
    monkeypatch.setattr("mdsmix.report.leaked_samples.ROWS", 2)
    assert "only the first 2 of 3 samples are listed: --json has all" in mdsmix("leaks", recipe).out
    assert "--common 0 searches for all grams" in output
    out = recipe.parent / "out"
    every = leaks(out / "web", "--eval", out / "quiz/eval", "--common", 0)["leaks"]
    assert {leak["sample"] for leak in every} == {0, 1, 5, 6}


def test_samples_of_shards_chats_and_packed_rows_are_found_by_number(project: Project) -> None:
    """A document that is twice in a packed row is in one sample. Each evaluation is counted on its
    own.
    """
    project.set_window_size(600)
    texts = [text(i) for i in range(6)]
    talk = [{"messages": make_dialogue(text(60 + i), text(i))} for i in range(6)]
    twice = [each for each in texts[::-1] for _ in "ab"]
    for name, held in (("quiz", texts), ("a", texts[::-1]), ("twice", twice), ("talk", talk)):
        project.write_source(held, f"{name}.jsonl")
    streams = {
        "web": documents("a.jsonl", layout="document"),
        "twice": documents("twice.jsonl", layout="document", pack=True),
        "quiz": documents("quiz.jsonl", split="eval", layout="document"),
        "talk": chats("talk.jsonl", split="eval"),
        "packed": chats("talk.jsonl", split="eval", pack=True),
    }
    project.configure(streams=streams, max_seq_len=1024).convert_ok()

    def leaks_of(name: str, *evals: str) -> Any:
        named = [word for each in evals for word in ("--eval", project.out / each / "eval")]
        return leaks(project.out / name, *named, "-n", 6)["leaks"]

    asked = read_samples(project.out / "quiz/eval")
    for name, column in (("web", "tokens"), ("twice", "input_ids")):
        rows, found = read_samples(project.out / name / "train"), leaks_of(name, "quiz")
        assert sorted(leak["sample"] for leak in found) == list(range(6))
        for leak in found:
            ids = str(tokens(asked[leak["sample"]])[:-1])[1:-1]
            for place in leak["places"]:
                assert ids in str(np.asarray(rows[place["sample"]][column]).tolist())
            assert leak["shared"].startswith(text(leak["sample"]))
    found = leaks_of("web", "talk", "packed")
    of_talk = [leak["sample"] for leak in found if "talk" in leak["evaluation"]]
    assert sorted(of_talk) == list(range(6))
    assert all(0.2 < leak["share"] < 0.9 for leak in found)


def test_an_unknown_tokenizer_is_reported_and_another_one_refused(out: Path) -> None:
    project, quiz = out / "web", out / "quiz"
    alike = mdsmix("leaks", project, quiz / "eval", "--eval", quiz / "eval", "-n", 0)
    assert ("quiz/eval sample" in alike.out, "no manifest" in alike.out) == (True, False)
    edit(quiz / "eval/mdsmix.manifest", lambda tree: tree["tokenizer"].update(hash="0" * 32))
    for more, output in (
        ((), "name published evaluation streams by --eval"),
        (("--eval", quiz / "eval"), "The same text has different ids in the two streams"),
    ):
        answer = mdsmix("leaks", project, *more)
        assert (answer.code, output in answer.err) == (2, True)
    (quiz / "eval/mdsmix.manifest").unlink()
    answer = mdsmix("leaks", project, "--eval", quiz / "eval", "-n", 0)
    assert "is unknown (no manifest)" in answer.out
