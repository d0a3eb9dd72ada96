"""Streams of images: what is stored of a record, from every shape, and that a bad image is a bad record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.converting import (
    manifest_of,
    mdsmix,
    run_recipe,
    samples,
    write_jsonl,
    write_recipe,
)
from tests.pictures import (
    TOKEN,
    record,
    seeing_tokenizer,
    stream,
    write_drawings,
)


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "tokenizer"
    return seeing_tokenizer(tokenizer_folder, folder)


def convert(folder: Path, tokenizer: Path, records: list[Any], **settings: Any) -> Path:
    path = write_jsonl(folder / "a.jsonl", records)
    settings = {"shape": "llava", **settings}
    recipe = write_recipe(
        folder, tokenizer, max_seq_len=400, streams={"see": stream(path, **settings)}
    )
    run_recipe(recipe)
    return folder / "out/see/train"


def text_of(sample: Any, tokenizer: Path) -> str:
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = [t for turn in sample["turns"] for t in (*turn["input_ids"], *turn["labels"])]
    return str(model.decode(ids, skip_special_tokens=False))


def test_the_bytes_of_every_image_are_stored_as_they_are(tmp_path: Path, seeing: Path) -> None:
    paths = write_drawings(tmp_path / "img")
    names = [f"img/{path.name}" for path in paths]
    out = convert(tmp_path, seeing, [record(names[0]), record(), record(*names)])
    found = samples(out)
    assert [sample["images"] for sample in found] == [
        [paths[0].read_bytes()],
        [],
        [path.read_bytes() for path in paths],
    ]
    assert [sample["sizes"] for sample in found] == [[[30, 40]], [], [[30, 40]] * 3]
    assert [text_of(sample, seeing).count(TOKEN) for sample in found] == [1, 0, 3]
    assert text_of(found[0], seeing) == (
        f"<|im_start|>user\n<|vision_start|>{TOKEN}<|vision_end|>\nWhat is it?<|im_end|>\n<|im_start|>assistant\nA drawing.<|im_end|>\n"
    )
    totals = manifest_of(out).totals
    assert (totals.samples, totals.images) == (3, 4)
    assert totals.image_bytes == sum(len(path.read_bytes()) for path in [paths[0], *paths])


def test_a_recipe_without_an_image_token_is_told_of_it(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_drawings(tmp_path / "img")
    path = write_jsonl(tmp_path / "a.jsonl", [record("img/0.jpg")])
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"see": stream(path)})
    answer = mdsmix("convert", recipe)
    assert answer.code == 2
    assert "declares no image_token" in answer.err
