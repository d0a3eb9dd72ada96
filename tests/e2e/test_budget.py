"""A budget of sources in a bucket: a look asks for a part of them, and a second run for none of them."""

from __future__ import annotations

from pathlib import Path

from mdsmix.storage import locate
from tests.converting import documents, run_recipe, write_jsonl, write_recipe
from tests.counting import counted
from tests.faults import Proxy


def test_a_look_reads_a_part_and_is_remembered(
    tmp_path: Path, tokenizer_folder: Path, bucket: str, proxy: Proxy
) -> None:
    for n in range(3):
        texts = [
            {"text": f"document {n} {m} of a bucket, and some words of its own"} for m in range(400)
        ]
        content = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes()
        locate(f"s3://{bucket}/data/CommonCrawl/{n}.jsonl").write(content)
    source = documents(f"s3://{bucket}/data/CommonCrawl/*.jsonl", sample="budget")
    settings = {"streams": {"web": source}, "budget": "2k tokens", "mix": {"web": {"share": 1}}}
    recipe = write_recipe(
        tmp_path, tokenizer_folder, remote=f"s3://{bucket}/mix", local=None, **settings
    )
    (first,) = run_recipe(recipe)
    assert first.wanted is not None
    assert first.wanted.source.places == 3
    assert not first.wanted.missing(first.manifest)
    assert first.manifest.encoding.sample
    with counted(proxy) as seen:
        (second,) = run_recipe(recipe)
    assert second.done == 0
    assert not [r for r in seen.requests if r.method == "GET" and ".jsonl" in r.path]
