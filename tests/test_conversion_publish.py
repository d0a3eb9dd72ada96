"""A run may end anywhere, killed or by a power cut: the old stream is there or the new one, whole,
and the same command again makes what it would have made. What was lost or damaged of a publication
is completed so too, and what must not be published is refused.

Every state that a run leaves behind one of its system calls is looked at. From some the run is
started again: its last six, and as many before and power cuts as `MDSMIX_TEST_ENDS` says (2);
`MDSMIX_TEST_SEED` says which.
"""

from __future__ import annotations

import os
import random
import shutil
from typing import Any

import pytest

from mdsmix.conversion import publish
from mdsmix.conversion.finished_units import UnitResult
from mdsmix.conversion.unit import UnitTask
from mdsmix.engines.tasks import Attempt
from mdsmix.errors import MdsmixError, TooManyBadRecords
from mdsmix.kinds.pretraining import Pretraining
from tests.converting import Web, documents, done, files, lying_at
from tests.crash_states import ends
from tests.in_process import Here
from tests.publish_order import VERSION, current_of, faults
from tests.recording import TEMPORARY, Disk

ENDS = int(os.environ.get("MDSMIX_TEST_ENDS", "2"))
SEED = int(os.environ.get("MDSMIX_TEST_SEED", "0"))
CARD = {"index.json", "mdsmix.manifest"}
TEXTS = [f"Document {n} is about the number {n}. " for n in range(30)]


@pytest.fixture
def published(web: Web) -> Web:
    web.windows(300)
    web.holds(TEXTS)
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
    """Where neither another version of mdsmix nor another treatment of duplicates changes
    a shard.
    """
    shards = published.shards
    published.patch.setattr(publish, "__version__", "99")
    published.run()
    assert published.manifest.tool_version == "99"
    for way in ("drop", "keep"):
        published.run(f"streams.web.duplicates={way}")
        assert published.manifest.encoding.duplicates == way
    assert sorted(published.train.glob("*.mds")) == sorted(shards)


def test_a_stream_without_a_sample_is_refused_and_nothing_is_published(web: Web) -> None:
    for records, layout, sentence in (
        ([], "concat", r"\(0 records: none\)"),
        (
            ["short"],
            "concat",
            r"its source gives no sample \(1 record: \d tokens, less than a row\)",
        ),
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
    web.holds(TEXTS)
    for layout, start, twice in (("concat", 1, 0), ("concat", 0, 1), ("document", 1, 0)):

        def wrong(self: Any, records: list[Any], start: int = start, twice: int = twice) -> Any:
            return encode(self, [*records[:twice], *records[start:]])

        web.patch.setattr(Pretraining, "encode", wrong)
        with pytest.raises(MdsmixError, match=r"30 records read, but \d+ written, 0 filtered"):
            web.run(f"streams.web.layout={layout}")
        assert not CARD & set(web.files)


SPLIT = "web/train"
REPLACE, VERSIONED = "publish=replace", "publish=versioned"
WAYS = {
    "first": (None, REPLACE),
    "in place": (REPLACE, REPLACE),
    "versions": (VERSIONED, VERSIONED),
    "to versions": (REPLACE, VERSIONED),
    "from versions": (VERSIONED, REPLACE),
}
"How the stream was published, and how it is when the run ends."


def convert(web: Web, way: str, version: int = 0) -> None:
    """Writes the sources of a version first, where one is given. One record is bad; b.jsonl stays
    as it is.
    """
    web.windows(400)
    if version:
        web.holds([{"text": version}, *(f"{text}{version}" for text in TEXTS)])
        web.holds(TEXTS[:20], "b.jsonl")
    web.done(way, "--workers", "1")


@pytest.mark.parametrize("way", WAYS)
def test_wherever_a_conversion_ends_the_old_or_the_new_stream_is_there(web: Web, way: str) -> None:
    (before, after), out = WAYS[way], web.out
    if before:
        convert(web, before, 1)
    old, disk = lying_at(out), Disk(out, web.folder / "recorded")
    with disk.recording():
        convert(web, after, 2)
    new = lying_at(out)
    killed, cut = ends(disk, old, SEED, each=8)
    assert len(killed) > 20
    assert len(cut) > 20
    for end in (*killed, *cut):
        assert not faults(end.state), end.call
        reads = current_of(end.state, SPLIT)
        assert not reads or end.state[reads] in (*old.values(), *new.values())
        # A stream in place has its card before its index, and the card names no version.
        assert reads or not before or way == "from versions", end.call
        versions = {name for name in old if VERSION.match(name.rpartition("/")[0])}
        assert all(end.state.get(name) == old[name] for name in versions), end.call

    rng, changes = random.Random(SEED), ("rename", "link", "unlink")
    named = [end for end in killed if end.call.what in changes]
    chosen = [*named[-6:], *rng.sample(named[:-6], ENDS), *rng.sample(cut, ENDS)]
    for end in chosen:
        shutil.rmtree(out)
        for name, content in end.state.items():
            if not name.endswith("/lease"):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(content)
        convert(web, after)
        left = {name: of for name, of in lying_at(out).items() if not TEMPORARY.search(name)}
        assert left == new, end.call


def test_wherever_gc_ends_nothing_that_is_left_lacks_a_shard(web: Web) -> None:
    for way, version in ((REPLACE, 1), (REPLACE, 2), (VERSIONED, 3), (VERSIONED, 4)):
        convert(web, way, version)
    before, disk = lying_at(web.out), Disk(web.out, web.folder / "recorded")
    with disk.recording():
        done("gc", web.out / "web", "--older-than", "0s", "--delete", "--keep", "1")
    killed, cut = ends(disk, before, SEED, each=16)
    assert len(killed) > 5
    assert len(cut) > 2
    for end in (*killed, *cut):
        assert not faults(end.state), end.call
        assert current_of(end.state, SPLIT) == current_of(before, SPLIT)


def test_after_a_death_a_unit_takes_over_windows_whose_shards_lie_there(web: Web) -> None:
    """Every second unit has lost a shard by then."""
    encode_window, counts, done = UnitTask._encode, list[int](), list[int]()

    def counted(task: UnitTask, number: int, *rest: Any) -> Any:
        done.append(number)
        return encode_window(task, number, *rest)

    def twice(engine: Here, task: UnitTask) -> UnitResult:
        first = task.do(Attempt(), engine)()
        if is_lost := len(counts) % 2:
            (task.job.folder / first.records[0].shards[0].stored.basename).delete()
        done.clear()
        again = task.do(Attempt(deaths=1), engine)()
        assert again.records == first.records
        counts.append(len(done))
        assert len(done) == is_lost
        return again

    web.patch.setattr(UnitTask, "_encode", counted)
    web.patch.setattr(Here, "do", twice)
    convert(web, REPLACE, 1)
    assert set(counts) == {0, 1}
