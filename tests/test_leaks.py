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

from mdsmix.leaks.audit import ScannedStream, _cut_context, find_longest_shared, rank_leaks
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
    """Return all runs of 13 ids of a row."""
    return {tuple(row[i : i + LENGTH]) for i in range(len(row) - LENGTH + 1)}


def eval_samples(rows: Rows, common: int = 0) -> EvalSamples:
    return EvalSamples(Ragged.from_rows(rows, "int64"), [0], common)


def find_in(items: EvalSamples, training: Rows) -> Any:
    """Return the numbers of the shared grams and of their training samples."""
    return items.find(Ragged.from_rows(training, "uint16"))


def test_a_gram_as_long_as_its_row_is_found_and_image_placeholders_are_ignored() -> None:
    """Rows with the same number of images are not alike. Grams of twenty image tokens and one word
    were found once.
    """
    rows = [[*[7] * 20, *range(100, 120)], [*[7] * 20, *range(200, 205)]]
    seeing = replace(eval_samples(rows), images=(7,))
    assert (len(seeing.hashes), seeing.shorts) == (8, 1)
    assert find_in(seeing, [[*[7] * 40, 100], list(range(100, 113))])[1].tolist() == [1]
    # A block of positions ends with each of these rows.
    first_row = list(range(LENGTH))
    second_row = list(range(50, 50 + LENGTH))
    items = eval_samples([first_row, second_row, first_row[1:]])
    assert items.shorts == 1
    for row in (first_row, second_row):
        assert find_in(items, [row]).shape == (2, 1)


@settings(max_examples=25)
@given(ROWS, ROWS, st.sampled_from([0, 1, 2]))
def test_grams_are_found_exactly_as_by_sets_of_tuples(
    evals: Rows, training: Rows, common: int
) -> None:
    items = eval_samples(evals, common)
    times = Counter(gram for row in evals for gram in grams(row))
    usable = {gram for gram, n in times.items() if not common or n <= common}
    gram_of_hash = {int(hash_grams(np.array(gram))[0]): gram for gram in times}
    gram_of_number = [gram_of_hash[hashed] for hashed in items.hashes.tolist()]
    assert sorted(gram_of_number) == sorted(usable)
    assert items.left_out == len(times) - len(usable)
    assert items.shorts == sum(not grams(row) for row in evals)
    counts = items.count(np.ones(len(usable), bool)).tolist()
    assert counts == [len(grams(row) & usable) for row in evals]
    pairs = [(gram_of_number[gram], row) for gram, row in find_in(items, training).T.tolist()]
    expected = list[Any]()
    for number, row in enumerate(training):
        expected += [(gram, number) for gram in grams(row) & usable]
    assert sorted(pairs) == sorted(expected)


def test_the_longest_run_of_two_long_rows_is_found_fast() -> None:
    """Comparing every pair of positions takes a minute."""
    before, after = _cut_context(np.arange(100), 40, 20)
    assert [before.tolist(), after.tolist()] == [[*range(16, 40)], [*range(60, 84)]]
    item = np.zeros(20_000, np.int64)
    item[15_001] = 1
    zeros = np.zeros(200_000, np.int64)
    zeros[100_000] = 2
    with_two_runs = np.arange(len(zeros))
    with_two_runs[7000:7100] = item[:100]
    with_two_runs[9000:9200] = item[15_000:15_200]
    with fail_after(8):
        assert find_longest_shared(item, zeros) == (0, 0, 15_001)
        assert find_longest_shared(item, with_two_runs) == (15_000, 9000, 200)


@settings(max_examples=20)
@given(ROWS, ROWS)
def test_leaks_are_counted_and_sorted_as_by_sets_of_tuples(evals: Rows, training: Rows) -> None:
    # The leaks as sets give them: each with the three rows that share most of its grams.
    training_grams = [*map(grams, training)]
    expected = list[Any]()
    for number, item_grams in enumerate(map(grams, evals)):
        times = len(item_grams & set().union(*training_grams))
        shared = [len(item_grams & row_grams) for row_grams in training_grams]
        sources = sorted((-count, row) for row, count in enumerate(shared) if count)
        if times:
            top_rows = [(row, -count) for count, row in sources[:3]]
            expected.append((-times / len(item_grams), -times, number, top_rows))
    # The longest run of each pair is in both rows, and has a gram if they share one.
    for item, row in product(evals, training):
        start, row_start, length = find_longest_shared(np.array(item, int), np.array(row, int))
        assert item[start : start + length] == row[row_start : row_start + length]
        assert (length >= LENGTH) == bool(grams(item) & grams(row))
    items = eval_samples(evals)
    shared_grams = find_in(items, training)
    leaks = rank_leaks(items, [ScannedStream(0, 0, *shared_grams)])
    ranked = []
    for leak in leaks:
        sources = [(source.sample, source.grams) for source in leak.sources]
        ranked.append((-leak.share, -leak.leaked_grams, leak.item, sources))
    assert ranked == sorted(expected)


def text(number: int, words: int = 40) -> str:
    """Return words that are drawn by a seed, the text's number."""
    draw = np.random.default_rng(number)
    return " ".join(f"w{n}" for n in draw.integers(0, 1000, words).tolist())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Convert 50 documents and a quiz. Documents 4 and 47 are questions too. One question is in 10
    documents, as often as a gram may occur, and a licence is in 11 and in a question.
    """
    licence = text(999)
    repeated_question = text(998)
    patch = pytest.MonkeyPatch()
    project = Project(tmp_path_factory.mktemp("leaks"), tokenizer_folder, patch)
    texts = [text(i) for i in range(50)]
    for number in range(30, 41):
        texts[number] += licence
    for number in range(1, 20, 2):
        texts[number] += repeated_question
    project.write_source(texts)
    questions = {f"q{i}": text(i) for i in (4, 47, 100, 101)}
    questions |= {"short": "w1", "licence": licence, "known": repeated_question}
    project.write_source(
        [{"id": id, "text": question} for id, question in questions.items()], "quiz.jsonl"
    )
    quiz = documents("quiz.jsonl", split="eval", layout="document")
    quiz["source"]["id"] = "id"
    streams = {"web": documents("a.jsonl", layout="document"), "quiz": quiz}
    project.set_window_size(3000)
    project.configure(streams=streams, max_seq_len=2048).convert_ok()
    patch.undo()
    return project.recipe


@pytest.fixture
def streams_folder(recipe: Path, tmp_path: Path) -> Path:
    """Return a copy of the published streams, which a test may change."""
    return shutil.copytree(recipe.parent / "out", tmp_path / "out")


def leaks(*arguments: object) -> Any:
    return json.loads(run_ok("leaks", *arguments, "--json").out)


def test_the_command_shows_the_leaked_samples(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = leaks(recipe)
    leak_of = {leak["sample"]: leak for leak in tree["leaks"]}
    assert {n: leak["places"][0]["sample"] for n, leak in leak_of.items()} == {0: 4, 1: 47, 6: 1}
    assert all(leak["share"] > 0.9 for leak in leak_of.values())
    assert [tree[k] for k in ("samples", "too_short")] == [7, 1]
    assert leak_of[1]["id"] == "q47"
    assert leak_of[1]["shared"].removesuffix("<|endoftext|>").strip() == text(47)
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
    streams = recipe.parent / "out"
    all_leaks = leaks(streams / "web", "--eval", streams / "quiz/eval", "--common", 0)["leaks"]
    assert {leak["sample"] for leak in all_leaks} == {0, 1, 5, 6}


def test_samples_of_shards_chats_and_packed_rows_are_found_by_number(project: Project) -> None:
    """A document that is twice in a packed row is in one sample. Each evaluation is counted on its
    own.
    """
    project.set_window_size(600)
    texts = [text(i) for i in range(6)]
    talk = [{"messages": make_dialogue(text(60 + i), text(i))} for i in range(6)]
    reversed_texts = texts[::-1]
    twice = [document for document in reversed_texts for _ in range(2)]
    sources = {"quiz": texts, "a": reversed_texts, "twice": twice, "talk": talk}
    for name, records in sources.items():
        project.write_source(records, f"{name}.jsonl")
    streams = {
        "web": documents("a.jsonl", layout="document"),
        "twice": documents("twice.jsonl", layout="document", pack=True),
        "quiz": documents("quiz.jsonl", split="eval", layout="document"),
        "talk": chats("talk.jsonl", split="eval"),
        "packed": chats("talk.jsonl", split="eval", pack=True),
    }
    project.configure(streams=streams, max_seq_len=1024).convert_ok()

    def leaks_of(name: str, *evals: str) -> Any:
        """Return the leaks of evaluations into a stream."""
        options = list[object]()
        for evaluation in evals:
            options += ["--eval", project.out / evaluation / "eval"]
        return leaks(project.out / name, *options, "-n", 6)["leaks"]

    questions = read_samples(project.out / "quiz/eval")
    for name, column in (("web", "tokens"), ("twice", "input_ids")):
        rows = read_samples(project.out / name / "train")
        leaks_of_quiz = leaks_of(name, "quiz")
        assert sorted(leak["sample"] for leak in leaks_of_quiz) == list(range(6))
        for leak in leaks_of_quiz:
            ids = str(tokens(questions[leak["sample"]])[:-1])[1:-1]
            for source in leak["places"]:
                assert ids in str(np.asarray(rows[source["sample"]][column]).tolist())
            assert leak["shared"].startswith(text(leak["sample"]))
    leaks_of_chats = leaks_of("web", "talk", "packed")
    of_talk = [leak["sample"] for leak in leaks_of_chats if "talk" in leak["evaluation"]]
    assert sorted(of_talk) == list(range(6))
    assert all(0.2 < leak["share"] < 0.9 for leak in leaks_of_chats)


def test_an_unknown_tokenizer_is_reported_and_another_one_refused(streams_folder: Path) -> None:
    web = streams_folder / "web"
    quiz = streams_folder / "quiz/eval"
    manifest = quiz / "mdsmix.manifest"
    alike = mdsmix("leaks", web, quiz, "--eval", quiz, "-n", 0)
    assert "quiz/eval sample" in alike.out
    assert "no manifest" not in alike.out
    # Another tokenizer, and no evaluation at all.
    edit(manifest, lambda tree: tree["tokenizer"].update(hash="0" * 32))
    refused = mdsmix("leaks", web)
    assert refused.code == 2
    assert "name published evaluation streams by --eval" in refused.err
    refused = mdsmix("leaks", web, "--eval", quiz)
    assert refused.code == 2
    assert "The same text has different ids in the two streams" in refused.err
    # An unknown tokenizer.
    manifest.unlink()
    answer = mdsmix("leaks", web, "--eval", quiz, "-n", 0)
    assert "is unknown (no manifest)" in answer.out
