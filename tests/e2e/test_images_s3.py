"""Images in a bucket: none is asked for when a run is planned, each once when it is converted, and a second run lists them."""

from pathlib import Path

import pytest

from mdsmix.convert import known_sources
from mdsmix.errors import Unreachable
from mdsmix.storage import locate
from tests.converting import (
    manifest_of,
    quarantined,
    run_recipe,
    samples,
    write_jsonl,
    write_recipe,
)
from tests.counting import counted
from tests.faults import Proxy
from tests.pictures import drawing, record, seeing_tokenizer, stream


def test_images_in_a_bucket(
    bucket: str,
    proxy: Proxy,
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_sources, "FEW", 5)
    root = f"s3://{bucket}/pictures"
    for number in range(12):
        locate(f"{root}/{number % 3}/{number}.jpg").write(drawing(seed=number))
    names = [f"{number % 3}/{number}.jpg" for number in range(12)]
    data = write_jsonl(tmp_path / "a.jsonl", [*map(record, names), record(names[0], "../gone.jpg")])
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "tokenizer")
    recipe = write_recipe(
        tmp_path, tokenizer, max_seq_len=200, streams={"see": stream(data, images={"root": root})}
    )
    with counted(proxy) as first:
        run_recipe(recipe)
    assert first.by_operation == {"GET": 13}, str(first)
    out = tmp_path / "out/see/train"
    assert [sample["images"] for sample in samples(out)] == [[drawing(seed=n)] for n in range(12)]
    (bad,) = quarantined(out)
    assert (bad["reason"], bad["detail"]["image"]) == ("image_not_found", "../gone.jpg")
    with counted(proxy) as second:
        (again,) = run_recipe(recipe)
    assert again.units == 0
    assert second.by_operation == {"GET list": 1, "HEAD": 1}, str(second)
    locate(f"{root}/0/3.jpg").write(drawing(seed=99))
    run_recipe(recipe)
    assert samples(out)[3]["images"] == [drawing(seed=99)]
    assert manifest_of(out).totals.images == 12


def test_a_bucket_that_is_not_there_costs_the_record_that_names_it_alone(
    bucket: str, minio: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Whether it is what a path begins at, or what a record of somebody else names."""
    locate(f"s3://{bucket}/0.jpg").write(drawing())
    gone = [f"s3://{bucket}-gone/0.jpg", f"s3://{bucket}/../x.jpg", f"s3://{'B' * 9}/0.jpg"]
    gone += [f"s3://{bucket}/", "x" * 1025, "s3://b/0.jpg"]
    data = write_jsonl(tmp_path / "a.jsonl", [*map(record, gone), record("0.jpg")])
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "tokenizer")
    root = {"root": f"s3://{bucket}"}
    streams = {"see": stream(data, images=root)}
    recipe = write_recipe(tmp_path, tokenizer, max_seq_len=200, streams=streams)
    run_recipe(recipe)
    out = tmp_path / "out/see/train"
    assert manifest_of(out).records.written == 1
    bad = {each["detail"]["image"]: each for each in quarantined(out)}
    assert list(bad) == [path[:300] for path in gone]
    assert {each["reason"] for each in bad.values()} == {"image_not_found"}
    assert bad[gone[0]]["detail"]["why"].startswith("the bucket does not exist")
    (again,) = run_recipe(recipe)
    assert again.units == 0


def test_a_store_that_does_not_answer_ends_the_run(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    data = write_jsonl(tmp_path / "a.jsonl", [record("s3://bucket/0.jpg")])
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "tokenizer")
    recipe = write_recipe(tmp_path, tokenizer, streams={"see": stream(data)})
    with pytest.raises(Unreachable, match=r"cannot reach s3://bucket/0\.jpg"):
        run_recipe(recipe)
