"""What was lost or damaged of a publication is completed by the same command, and what must not be published is refused."""

import os
from typing import Any

import pytest

from mdsmix.convert import publish
from mdsmix.errors import MdsmixError, TooManyBadRecords
from mdsmix.kinds.pretraining import Pretraining
from tests.converting import Web, documents, files, times

CARD = {"index.json", "mdsmix.manifest"}


@pytest.fixture
def published(web: Web) -> Web:
    web.windows(300)
    web.holds(f"The first version, document {n}." for n in range(30))
    web.run()
    return web


def test_a_lost_half_of_a_publication_is_completed(published: Web) -> None:
    before = published.files
    for lost in sorted(CARD):
        (published.train / lost).unlink()
        is_ours = lost == "index.json"
        if not is_ours:  # nothing says that the index is ours
            with pytest.raises(MdsmixError, match=r"without an mdsmix manifest.* --reencode"):
                published.run()
        assert published.run(reencode=not is_ours).done == 0, "units that are done stay done"
        assert published.files == before


def test_what_a_manifest_says_of_its_making_is_brought_up_to_date(published: Web) -> None:
    """Where neither another version of mdsmix nor another treatment of duplicates changes a shard."""
    shards = published.shards
    published.patch.setattr(publish, "__version__", "99")
    published.run()
    assert published.manifest.tool_version == "99"
    for way in ("drop", "keep"):
        published.run(f"streams.web.duplicates={way}")
        assert published.manifest.encoding.duplicates == way
    assert sorted(published.train.glob("*.mds")) == sorted(shards)


def test_shards_of_equal_bytes_are_files_of_their_own(web: Web) -> None:
    """A cache that evicts one of them must not evict the other."""
    web.windows(200)
    for n in range(3):
        web.holds(["the same text in every unit, as often as it may come"] * 2, f"{n}.jsonl")
    web.says(documents("*.jsonl", layout="document"), compression="zstd:3").run()
    first = web.shards[0].name.removesuffix(".mds.zstd")
    assert [path.name for path in web.shards] == [f"{first}{n}.mds.zstd" for n in ("", "-1", "-2")]
    assert len({path.read_bytes() for path in web.shards}) == 1
    assert web.rows == web.rows[: len(web.rows) // 3] * 3
    before = times(web.train)
    assert web.run().state == "up to date"
    assert times(web.train) == before


def test_a_stream_without_a_sample_is_refused_and_nothing_is_published(web: Web) -> None:
    for records, layout, sentence in (
        ([], "concat", r"\(0 records: none\)"),
        (["short"], "concat", r"of its source \(1 records: \d tokens, less than a row\)"),
        (["", {"x": 1}], "document", r"\(2 records: 1 empty, 1 missing_field\)"),
    ):
        web.holds(records)
        web.says(documents("a.jsonl", layout=layout), max_seq_len=512)
        with pytest.raises(TooManyBadRecords, match=sentence):
            web.run()
        assert not CARD & set(web.files)


def test_a_damaged_unit_record_is_done_again(published: Web) -> None:
    """What it says would be published without a look at the shards."""
    before = published.files
    record, another, *_ = sorted((published.train / ".mdsmix").iterdir())
    content = record.read_bytes()
    flipped = content[:99] + bytes([content[99] ^ 1]) + content[100:]
    for damaged in (content[:99], flipped, b"", another.read_bytes()):
        record.write_bytes(damaged)
        (published.train / "index.json").unlink()
        assert published.run().done == 1
        assert published.files == before


@pytest.mark.parametrize(("way", "was_published"), [("replace", True), ("versioned", False)])
def test_a_cut_shard_is_made_again(published: Web, way: str, was_published: bool) -> None:
    """Of the leftovers or of a unit."""
    published.says(publish=way).run()
    before = files(published.out)
    for number in (-1, 0):
        shard = published.shards[number]
        os.truncate(shard, shard.stat().st_size - 1)
        if not was_published:
            (shard.parent / "index.json").unlink()
        assert published.run().done == (number == 0)
        assert files(published.out) == before


def test_counts_that_do_not_add_up_are_never_published(web: Web) -> None:
    """An encoder that loses a record, or writes it twice, without a word."""
    encode = Pretraining.encode
    web.holds(f"The first version, document {n}." for n in range(30))
    for layout, start, twice in (("concat", 1, 0), ("concat", 0, 1), ("document", 1, 0)):

        def wrong(self: Any, records: list[Any], start: int = start, twice: int = twice) -> Any:
            return encode(self, [*records[:twice], *records[start:]])

        web.patch.setattr(Pretraining, "encode", wrong)
        with pytest.raises(MdsmixError, match=r"30 records read, but \d+ written, 0 filtered"):
            web.run(f"streams.web.layout={layout}")
        assert not CARD & set(web.files)
