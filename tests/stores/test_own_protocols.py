"""The stores of a protocol of their own: runs that are killed, raced and disturbed publish the same
bytes. The tests of S3 in `tests/e2e` are the same; what is imported from there runs here on other
stores.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, retries
from tests.converting import Project, documents, mdsmix, pairs, run_ok
from tests.counting import count_requests
from tests.e2e.test_faults import DONE_BY_STORE, PLACES, fail_with_one_sentence, put_into_bucket
from tests.e2e.test_killed import (  # noqa: F401  (a test)
    WINDOW,
    Runs,
    test_a_killed_run_that_is_started_again_publishes_the_same_bytes,
    write_sources,
)
from tests.faults import Proxy, Rule
from tests.paused_run import assert_paused_run_publishes_nothing
from tests.stores.servers import PROTOCOLS, Store

pytestmark = pytest.mark.parametrize("running", PROTOCOLS, indirect=True)


@pytest.fixture
def runs(project: Project, root: Location) -> Runs:
    project.set_window_size(WINDOW)
    sources = [project.folder / name for name in ("a.jsonl", "b.jsonl.zst")]
    project.configure(streams={"web": documents(sources), "faq": pairs(project.folder / "c.jsonl")})
    drop = "streams.web.duplicates=drop"  # its sources have some, within a file and across files
    return Runs(project.recipe, "remote", root.url, 2, settings=(drop,), late=2)


@pytest.mark.parametrize("faults", [["repeated"], *([last] for last in DONE_BY_STORE), ["silence"]])
def test_faults_that_pass_change_no_byte(
    faults: Sequence[str],
    root: Location,
    proxy: Proxy,
    store: Store,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request has every fault, one after the other. Only a shard has a silence."""
    faults = store.temporary_faults if faults == ["repeated"] else faults
    far = put_into_bucket(project, root.url)
    if "silence" in faults:
        monkeypatch.setattr(store.client, "_READ_SECONDS", 1)
    places = [PLACES["a shard"]] if "silence" in faults else PLACES.values()
    proxy.rules = [Rule(fault, *place) for place in places for fault in faults]
    project.run()
    assert [rule for rule in proxy.rules if rule.times] == [], "every fault occurred"
    assert far.published == far.undisturbed


def test_a_fault_that_lasts_is_an_error_and_the_next_run_continues(
    root: Location,
    proxy: Proxy,
    store: Store,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retries, "_LATER_SECONDS", 0.3)
    far = put_into_bucket(project, root.url)
    for fault, place, words in store.lasting_faults:
        proxy.rules = [Rule(fault, *PLACES[place], times=999)]
        line = fail_with_one_sentence("convert", project.recipe, "--workers", "1")
        assert (words in line, f"cannot reach {root}/mix/web" in line) == (True, True), line
        assert "train/index.json" not in far.published
    proxy.rules = []
    assert project.run().reused >= 2, "finished units are kept"
    assert far.published == far.undisturbed


def test_a_broken_body_is_continued_where_it_broke_and_never_in_another_version(
    root: Location, proxy: Proxy
) -> None:
    data = bytes(range(256)) * 40_000
    file = root / "x"
    file.write(data)
    stat = file.stat()
    for fault in ("reset in the answer", "cut short"):
        for times, read, expected in (
            (4, file.read, data),
            (2, lambda: file.read(1_000_000, 8_000_000), data[1_000_000:9_000_000]),
            (1, file.fetch, (stat, data)),
        ):
            proxy.rules = [Rule(fault, "GET", times=times)]
            assert read() == expected
            assert not proxy.rules[0].times, fault
    proxy.rules = [Rule("reset in the answer", "GET")]
    with file.open() as reader:
        reader.read(1000)
        file.write(b"b" * len(data))
        with pytest.raises(Unreachable, match="was changed while it was being read"):
            reader.read()
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        file.open(stamp=stat.stamp)
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        file.open_random(stat).read(1)


def test_a_slow_link_has_five_seconds_for_each_part_of_a_body_and_not_for_all(
    root: Location, proxy: Proxy, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it has half a second, and the body takes longer."""
    monkeypatch.setattr(store.client, "_CONNECT_SECONDS", 0.5)
    content = bytes(range(256)) * 4096 * 24
    proxy.rules = [Rule("slow", "PUT")]
    with count_requests(proxy) as requests:
        (root / "x").write(content)
    assert requests.by_operation == {"PUT": 1}
    assert requests.seconds > 1
    assert (root / "x").read() == content


def test_an_upload_does_not_join_its_parts_in_memory(root: Location) -> None:
    file = root / "x"
    parts = [bytes([number]) * (2 << 20) for number in range(8)]
    file.write(b"opens the connection")
    tracemalloc.start()
    try:
        file.write(*parts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file.read() == b"".join(parts)
    assert peak < 8 << 20


def test_of_writers_at_one_moment_one_succeeds(root: Location) -> None:
    """A file is created, then replaced again and again, each time by eight writers."""
    file = root / "raced"
    stamp: str | None = None
    with ThreadPoolExecutor(8) as pool:
        for number in range(30):
            barrier = threading.Barrier(8)

            def write(
                writer: int, stamp: str | None = stamp, barrier: threading.Barrier = barrier
            ) -> str | None:
                content = f"{writer}".encode()
                barrier.wait()
                stat = file.create(content) if stamp is None else file.replace(stamp, content)
                return stat.stamp if stat else None

            stamps = list(pool.map(write, range(8)))
            (winner,) = [writer for writer in range(8) if stamps[writer]]
            stamp = stamps[winner]
            assert file.fetch() == (file.stat(), f"{winner}".encode()), number
            assert file.stat().stamp == stamp


def test_of_two_runs_at_one_moment_one_publishes(
    project: Project, root: Location, tmp_path: Path
) -> None:
    """The other is refused, or finds that all is done."""
    project.set_window_size(WINDOW)
    project.configure(documents(tmp_path / "a.jsonl"))
    runs = Runs(project.recipe, "remote", root.url, 0)
    write_sources(tmp_path, 1)
    assert runs.start("alone").await_end() == 0
    for number in range(3):
        racers = [runs.start(str(number), log=f"racer {racer}.log") for racer in range(2)]
        codes = sorted(racer.await_end() for racer in racers)
        assert codes in ([0, 0], [0, 4])
        assert runs.content(str(number)) == runs.content("alone")
        assert mdsmix("verify", runs.folder(str(number), "web")).code == 0


def test_a_paused_run_publishes_nothing_over_a_newer_one(project: Project, root: Location) -> None:
    project.configure(remote=f"{root}/mix")
    assert_paused_run_publishes_nothing(project.recipe, root / "mix/web/train", "replace")


def test_doctor_names_the_store_and_tries_the_target(root: Location, project: Project) -> None:
    project.write_source(["text"])
    project.configure(remote=f"{root}/mix")
    out = run_ok("doctor", project.recipe).out
    assert "ok       store: endpoint http://127.0.0.1:" in out
    assert (
        f"ok       target {root}/mix: listing, writing, reading, copying and deleting work" in out
    )
    assert list(root.list(recursive=True)) == []
