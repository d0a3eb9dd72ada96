"""A mixture file makes a recipe of what is there of its sources, and says of each side what the other lacks."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from tests.converting import Answer, mdsmix, write_jsonl

PUBLISHED = {
    "mixture": {"commoncrawl": 52.2, "c4": 26.7, "github": 5.2, "book": 4.2, "arxiv": 4.6, "wiki": 3.8, "stackexchange": 3.3},
    "num_tokens_avg": {"commoncrawl": 1207, "c4": 378, "wiki": 393, "stackexchange": 309, "github": 436, "book": 89373, "arxiv": 7375},
}  # fmt: skip
"As FlagEmbedding publishes it."
ONE = {"mixture": {"c4": 20}}
WORDS = ["the", "of", "library", "loader", "token", "shard", "window", "sample", "record", "budget"]


def texts(name: str, count: int, words: int = 20) -> list[dict[str, str]]:
    rng = random.Random(name)
    return [{"text": " ".join(rng.choices(WORDS, k=rng.randint(5, words)))} for _ in range(count)]


def init(folder: Path, tokenizer: Path, mixture: Any, *more: object) -> Answer:
    """On the files of `data`; the recipe is written beside it."""
    path = folder / "mixture.json"
    path.write_text(mixture if isinstance(mixture, str) else json.dumps(mixture))
    place = ["--tokenizer", tokenizer, "-o", folder / "recipe.yaml", "--to", folder / "out"]
    return mdsmix("init", "--mixture", path, folder / "data", *place, "--replace", *more)


def read(folder: Path) -> Any:
    return yaml.safe_load((folder / "recipe.yaml").read_text())


def test_the_published_mixture_is_a_recipe_that_converts(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    for name, percent in PUBLISHED["mixture"].items():
        write_jsonl(tmp_path / f"data/{name}.json", texts(name, 30 + int(8 * percent)))
    answer = init(tmp_path, tokenizer_folder, PUBLISHED, "--budget", "64:3k")
    assert (answer.code, answer.err) == (0, "")
    recipe = read(tmp_path)
    assert recipe["max_seq_len"] == 64
    assert (recipe["budget"], recipe["absolute"]) == ("3k tokens", True)
    assert recipe["mix"] == {n: {"share": f"{p}%"} for n, p in PUBLISHED["mixture"].items()}
    for name, stream in recipe["streams"].items():
        assert stream["sample"] == "budget"
        assert stream["expected_mean_tokens"] == PUBLISHED["num_tokens_avg"][name]
        assert stream["source"] == {"path": f"data/{name}.json", "text": "text"}
    path = tmp_path / "recipe.yaml"
    converted = mdsmix("convert", path, "--json")
    rows = {row["stream"]: row for row in orjson.loads(converted.out)["rows"]}
    for name, percent in PUBLISHED["mixture"].items():
        assert rows[name]["budget"]["wanted_tokens"] == pytest.approx(30 * percent, abs=1)


def test_sources_are_files_and_folders_by_their_names_in_any_case(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    data, some = tmp_path / "data", texts("a", 30)
    for name in ("CommonCrawl/chunk1/part-0001", "CommonCrawl/chunk2/part-0001", "C4/train", "C4/validation", "C4/zero/train", "books", "notebook", "zero"):  # fmt: skip
        write_jsonl(data / f"{name}.jsonl", some)
    packed = gzip.compress(b"".join(orjson.dumps(r) + b"\n" for r in some))
    (data / "Wiki-00001-of-00002.jsonl.gz").write_bytes(packed)
    write_jsonl(data / "github.jsonl", [{"odd": n} for n in range(9)])
    mixture = {"commoncrawl": 50, "c4": 20, "wiki": 5.5, "book": 4, "github": 5, "Stack Exchange": 3, "zero": 0}  # fmt: skip
    said = {"mixture": mixture, "num_tokens_avg": {"c4": 3.5, "pile": 7}}
    answer = init(tmp_path, tokenizer_folder, said, "--budget", "1M tokens")
    assert answer.code == 0
    recipe = read(tmp_path)
    paths = {name: stream["source"]["path"] for name, stream in recipe["streams"].items()}
    assert paths == {
        "commoncrawl": "data/CommonCrawl/chunk*/part-0001.jsonl",
        "c4": "data/C4/train.jsonl",
        "c4-validation": "data/C4/validation.jsonl",
        "wiki": "data/Wiki-00001-of-00002.jsonl.gz",
    }
    shares = {"commoncrawl": "50%", "c4": "20%", "wiki": "5.5%"}
    assert recipe["mix"] == {name: {"share": share} for name, share in shares.items()}
    assert recipe["streams"]["c4"]["expected_mean_tokens"] == 3.5
    assert "sample" not in recipe["streams"]["c4-validation"]
    for sentence in (
        "book: 4% of the mixture, and no file or folder that was named is called so: it is left out",
        "Stack Exchange: 3% of the mixture, and no file",
        "github: none of its files can be read, so it is left out",
        "zero: 0% of the mixture, so it is left out",
        "of no source of the mixture, and left out: data/books.jsonl, data/notebook.jsonl",
    ):
        assert sentence in answer.err


def test_without_a_budget_nothing_is_sampled_and_a_source_that_is_refused_is_a_comment(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_jsonl(tmp_path / "data/c4/a.jsonl", texts("a", 40))
    write_jsonl(tmp_path / "data/c4/b.jsonl", [{"prompt": "a b", "response": "c d"}] * 4)
    write_jsonl(tmp_path / "data/wiki.jsonl", [*texts("b", 5), *[{"text": 5}] * 4])
    answer = init(tmp_path, tokenizer_folder, {"mixture": {"c4": 26.7, "wiki": 3}})
    left = "c4: data/c4/b.jsonl left out, since its fields are not those of most of it"
    assert (answer.code, left in answer.err) == (0, True)
    recipe = read(tmp_path)
    assert recipe["mix"] == {"c4": {"share": "26.7%"}}
    assert recipe["streams"]["c4"]["source"]["path"] == "data/c4/a.jsonl"
    assert not {"budget", "absolute"} & recipe.keys()
    assert "sample" not in recipe["streams"]["c4"]
    assert "\n  # wiki: {share: 3%}\n" in (tmp_path / "recipe.yaml").read_text()


REFUSED: list[tuple[Any, list[str], str]] = [
    ("{", [], "is no JSON"),
    ("[1]", [], "must hold keys and values"),
    ({"c4": 20}, [], "c4 is not a known key"),
    ({}, [], "mixture is missing"),
    ({"mixture": 5}, [], "mixture is 5; it must be keys and values"),
    ({"mixture": {"c4": -1, "wiki": 5}}, [], "come to 4; they are of one budget, so give 100 in all at most, each 0 or more"),
    ({"mixture": {"c4": "20%"}}, [], "mixture.c4 is '20%'; it must be a whole number or a number"),
    ({"mixture": {"c4": 0, "wiki": 0.0}}, [], "the percents of its mixture come to 0"),
    ({"mixture": {"c4": 70, "wiki": 40}}, [], "the percents of its mixture come to 110"),
    ({"mixture": {"pile": 7}}, [], "nothing that converts was found"),
    (ONE, ["--budget", "1M samples"], "counts tokens, as in 2B or 8192:2B"),
    (ONE, ["--budget", "1:2B"], "max_seq_len is 1"),
    (ONE, ["--dataset-info", "info.json"], "--dataset-info names entries: give one of the two"),
]  # fmt: skip


def test_what_is_no_mixture_is_one_sentence(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_jsonl(tmp_path / "data/c4.jsonl", texts("a", 3))
    for mixture, more, sentence in REFUSED:
        answer = init(tmp_path, tokenizer_folder, mixture, *more)
        assert (answer.code, answer.err.count("\n")) == (2, 1), mixture
        assert sentence in answer.err
    assert not (tmp_path / "recipe.yaml").exists()
    answer = mdsmix("init", tmp_path / "data", "--budget", "2B", "--tokenizer", tokenizer_folder)
    assert (answer.code, "it is of a mixture file (--mixture FILE)" in answer.err) == (2, True)
