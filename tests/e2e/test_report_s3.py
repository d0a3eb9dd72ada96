"""The page of streams in a bucket says what the page of the same streams on a disk says, and writes nothing there."""

from __future__ import annotations

from pathlib import Path

from tests.converting import documents, lying_at, mdsmix, run_recipe, write_jsonl, write_recipe
from tests.pages import Page


def test_a_stream_in_a_bucket_has_the_page_that_it_has_on_a_disk(
    tmp_path: Path, tokenizer_folder: Path, minio: str, bucket: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*({"text": f"Number {n}."} for n in range(80)), {"text": 1}])
    streams = {"a": documents("a.jsonl", layout="document")}
    pages = []
    for place in ({"remote": f"s3://{bucket}/mix"}, {}):
        recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, compression="zstd", **place)  # fmt: skip
        run_recipe(recipe)
        before = lying_at(f"s3://{bucket}")
        out = tmp_path / "r.html"
        answer = mdsmix("report", recipe, "--no-preview", "-n", 4, "-o", out)
        assert answer.code == 0, answer.err
        assert lying_at(f"s3://{bucket}") == before
        pages.append(Page(out.read_text("utf-8")))
    far, near = pages
    assert far.figures == near.figures
    assert [s.tokens for s in far.samples] == [s.tokens for s in near.samples]
    assert "quarantined, field_not_text, 1: 1.2%" in " ".join(far.text.split())
    assert f"s3://{bucket}/mix/a/train" in far.text
