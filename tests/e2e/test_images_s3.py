"""Images in a bucket: none is asked for when a run is planned, each once when it is converted, and a second run lists them."""

from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import known_sources
from mdsmix.errors import Unreachable
from mdsmix.storage import locate
from tests.converting import Web, samples
from tests.counting import counted
from tests.faults import Proxy
from tests.pictures import drawing, record, stream


@pytest.fixture
def see(web: Web, seeing: Path) -> Web:
    web.tokenizer = seeing
    return web


def says(see: Web, root: str, *records: Any) -> None:
    """Converts these records, whose images' paths begin at `root`."""
    see.holds(records)
    see.says(stream("a.jsonl", images={"root": root}), max_seq_len=200)


def test_images_in_a_bucket_are_asked_for_once(bucket: str, proxy: Proxy, see: Web) -> None:
    see.patch.setattr(known_sources, "FEW", 5)
    root, names = f"s3://{bucket}/pictures", [f"{number % 3}/{number}.jpg" for number in range(12)]
    for number, name in enumerate(names):
        locate(f"{root}/{name}").write(drawing(seed=number))
    says(see, root, *map(record, names), record(names[0], "../gone.jpg"))
    with counted(proxy) as first:
        see.run()
    assert first.by_operation == {"GET": 13}, str(first)
    expected = [[drawing(seed=n)] for n in range(12)]
    assert [sample["images"] for sample in samples(see.train)] == expected
    (bad,) = see.bad
    assert (bad["reason"], bad["detail"]["image"]) == ("image_not_found", "../gone.jpg")
    with counted(proxy) as second:
        assert see.run().units == 0
    assert second.by_operation == {"GET list": 1, "HEAD": 1}, str(second)
    locate(f"{root}/0/3.jpg").write(drawing(seed=99))
    see.run()
    assert samples(see.train)[3]["images"] == [drawing(seed=99)]
    assert see.manifest.totals.images == 12


def test_a_bucket_that_is_not_there_costs_one_record_that_names_it(bucket: str, see: Web) -> None:
    """Whether it is what a path begins at, or what a record of somebody else names."""
    locate(f"s3://{bucket}/0.jpg").write(drawing())
    gone = [f"s3://{bucket}-gone/0.jpg", f"s3://{bucket}/../x.jpg", f"s3://{'B' * 9}/0.jpg"]
    gone += [f"s3://{bucket}/", "x" * 1025, "s3://b/0.jpg"]
    says(see, f"s3://{bucket}", *map(record, gone), record("0.jpg"))
    see.run()
    assert see.manifest.records.written == 1
    bad = {each["detail"]["image"]: each for each in see.bad}
    assert list(bad) == [path[:300] for path in gone]
    assert {each["reason"] for each in bad.values()} == {"image_not_found"}
    assert bad[gone[0]]["detail"]["why"].startswith("the bucket does not exist")
    assert see.run().units == 0


def test_a_store_that_does_not_answer_ends_the_run(see: Web) -> None:
    see.patch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    says(see, "s3://bucket", record("0.jpg"))
    with pytest.raises(Unreachable, match=r"cannot reach s3://bucket/0\.jpg"):
        see.run()
