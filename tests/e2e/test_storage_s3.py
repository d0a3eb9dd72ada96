"""A real MinIO through the one path type: the same answers as on a disk, and sentences without keys."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, locate, s3, s3_client, s3_conditions
from tests.alarm import SECONDS
from tests.counting import counted
from tests.faults import CONDITIONS, IGNORES, RACES, Proxy, Rule


@pytest.fixture
def root(bucket: str) -> Location:
    return locate(f"s3://{bucket}/a folder/ü")


def test_what_is_written_is_read_in_full_and_in_part(root: Location) -> None:
    place = root / "file.bin"
    place.write(b"ab", memoryview(b"cdef"), bytearray(b"g"))
    assert (place.read(), place.read(2, 3), place.read(6, 10)) == (b"abcdefg", b"cde", b"g")
    assert (place.read(99, 1), place.read(0, 0)) == (b"", b"")
    with place.open(5) as file:
        assert file.read() == b"fg"
    before = place.stat()
    assert before is not None
    assert before.size == 7
    place.write()
    after = place.stat()
    assert after is not None
    assert (after.size, place.read(), place.read(0, 5)) == (0, b"", b"")
    assert after.stamp != before.stamp


def test_missing_is_an_answer_to_stat_delete_and_list_and_an_error_to_read(root: Location) -> None:
    assert (root / "none").stat() is None
    assert (root / "none").expand() == []
    assert list((root / "none").list()) == []
    (root / "none").delete()
    with pytest.raises(Unreachable, match="there is no such object"):
        (root / "none").read()
    with pytest.raises(Unreachable, match="there is no such object"):
        (root / "none").open()


def test_not_there_costs_one_request_and_what_is_fetched_is_whole_or_asked_for_again(
    root: Location, proxy: Proxy
) -> None:
    content = {"a": b"abcdefgh" * 1000, "empty": b""}
    for name, data in content.items():
        (root / name).write(data)
    known = [(root / name).stat() for name in content]
    for name, stat in (*zip(content, known, strict=True), ("none", None)):
        with counted(proxy) as found:
            assert (root / name).stat() == stat
        assert found.by_operation == {"HEAD": 1}
    for fault in ("500", "lost answer"):
        proxy.rules = [Rule(fault, operation="GET")]
        assert (root / "a").fetch() == (known[0], content["a"])
        assert proxy.met(fault)


def test_list_and_expand_answer_as_on_a_disk(root: Location, tmp_path: Path) -> None:
    for place in (root, locate(tmp_path)):
        for name in ("b.x", "a.x", "c/z.x", "c/y/x.x", "c-1", ".hidden.x"):
            (place / name).write(name.encode())
        assert [name for name, _ in place.list()] == [".hidden.x", "a.x", "b.x", "c-1"]
        assert [name for name, _ in place.list(recursive=True)][3:] == ["c-1", "c/y/x.x", "c/z.x"]
        for pattern, expected in {
            "*.x": "a.x b.x",
            "?.x": "a.x b.x",
            "[b-z].x": "b.x",
            "*/*.x": "c/z.x",
            "c/**": "c/y/x.x c/z.x",
        }.items():
            found = [found.url for found, _ in (place / pattern).expand()]
            assert found == [(place / name).url for name in expected.split()]


def test_a_list_goes_on_over_pages(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        (root / str(i)).write(b"x")
    page = s3._page
    monkeypatch.setattr(s3, "_page", lambda wanted, client: page({**wanted, "MaxKeys": 2}, client))
    assert [name for name, _ in root.list()] == list("01234")


def test_many_objects_go_in_one_request_or_one_by_one(
    root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_DELETED_AT_ONCE", 3)
    for fault, asked in (("", {"POST": 1}), ("501 NotImplemented", {"POST": 1, "DELETE": 3})):
        for name in "abcde":
            (root / name).write(b"1")
        proxy.rules = [Rule(fault, "POST", times=99)] if fault else []
        with counted(proxy) as found:
            root.delete_all("abd")
            root.delete_all(())
        assert found.by_operation == asked
        assert [name for name, _ in root.list()] == ["c", "e"]


def test_a_large_object_is_one_request_and_is_copied_inside_the_store(
    root: Location, tmp_path: Path, proxy: Proxy
) -> None:
    data = os.urandom(20 << 20)
    (root / "large").write(data[:1000], data[1000 : 7 << 20], data[7 << 20 :])
    (root / "large").copy_to(root / "copy")
    assert [request.operation for request in proxy.requests] == ["PUT", "PUT"]
    (root / "copy").copy_to(locate(tmp_path) / "down")
    (locate(tmp_path) / "down").copy_to(root / "up")
    assert (root / "up").read() == data


REFUSALS = {
    "a missing bucket": ({}, "no-such-bucket", "the bucket does not exist"),
    "a bucket name of two letters": ({}, "ab", "at least 3 letters"),
    "a wrong secret": ({"AWS_SECRET_ACCESS_KEY": "WRONG-SECRET"}, None, "secret key is wrong"),
    "an unknown key": ({"AWS_ACCESS_KEY_ID": "UNKNOWN-KEY"}, None, "does not know this access key"),
    "no scheme": ({"S3_ENDPOINT_URL": "127.0.0.1:9000"}, None, "does not start with http://"),
    "an unknown profile": ({"AWS_PROFILE": "nobody"}, None, "the profile that AWS_PROFILE names"),
}


def test_a_refusal_is_one_sentence_that_holds_no_key(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case, (settings, other_bucket, expected) in REFUSALS.items():
        place = locate(f"s3://{other_bucket or bucket}/x")
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            # A HEAD does not tell a missing bucket from a missing object.
            asks = [place.read, place.write, lambda place=place: list(place.list())]
            for ask in asks if case == "a missing bucket" else [*asks, place.stat]:
                with pytest.raises(Unreachable) as refusal:
                    ask()
                message = str(refusal.value)
                assert (expected in message, place.url in message) == (True, True), message
                for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                    assert os.environ[name] not in message


def test_without_credentials_the_sentence_says_which_to_set(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(Unreachable, match="no credentials were found; set AWS_ACCESS_KEY_ID"):
        locate(f"s3://{bucket}/x").stat()


def test_an_endpoint_that_does_not_answer_is_given_up_soon_and_its_password_is_not_shown(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://user:PASSWORD@127.0.0.1:1")
    monkeypatch.setattr("mdsmix.storage.s3_client._FIRST_SECONDS", 0)
    with pytest.raises(Unreachable, match="nothing answers there") as refusal:
        locate(f"s3://{bucket}/x").stat()
    assert "PASSWORD" not in str(refusal.value)


def test_a_body_that_breaks_is_taken_up_where_it_broke(root: Location, proxy: Proxy) -> None:
    data = os.urandom(10_000_000)
    (root / "x").write(data)
    for fault in ("reset in the answer", "cut short"):
        proxy.rules = [Rule(fault, "GET", times=4)]
        proxy.requests.clear()
        assert (root / "x").read() == data
        assert not any(rule.times for rule in proxy.rules), fault
        if fault == "cut short":  # a reset may take with it what had come
            asked = [request.headers.get("range") for request in proxy.requests]
            halves = (5_000_000, 7_500_000, 8_750_000, 9_375_000)
            assert asked == [None, *(f"bytes={start}-" for start in halves)]
        proxy.rules = [Rule(fault, "GET", times=2)]
        assert (root / "x").read(1_000_000, 8_000_000) == data[1_000_000:9_000_000]
        assert not any(rule.times for rule in proxy.rules), fault
        proxy.rules = [Rule(fault, "GET")]
        assert (root / "x").fetch() == ((root / "x").stat(), data)
        assert not any(rule.times for rule in proxy.rules), fault


def test_a_broken_read_never_goes_on_in_another_version(root: Location, proxy: Proxy) -> None:
    (root / "x").write(b"a" * 10_000_000)
    proxy.rules = [Rule("reset in the answer", "GET")]
    with (root / "x").open() as file:
        file.read(1000)
        (root / "x").write(b"b" * 10_000_000)
        with pytest.raises(Unreachable, match="replaced while it was being read"):
            file.read()
    rewrite = Rule("none", "GET", then=lambda: (root / "x").write(b"c" * 10_000_000))
    proxy.rules = [Rule("reset in the answer", "GET"), rewrite]
    with pytest.raises(Unreachable, match="replaced while it was being read"):
        (root / "x").fetch()


def test_an_answer_that_is_none_of_s3_is_a_sentence(
    root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.rules = [Rule("a login page", "GET list")]
    assert list(root.list()) == [], "it may have been the last of a server that went"
    monkeypatch.setattr(s3_client, "_LATER_SECONDS", 0.1)
    proxy.rules = [Rule("a login page", "GET list", times=99)]
    with pytest.raises(Unreachable, match="; run the same command again"):
        list(root.list())


def test_a_404_whose_words_are_broken_is_final(root: Location, proxy: Proxy) -> None:
    """One store answers so of a key such as ü, and a HEAD of it has no words at all."""
    proxy.rules = [Rule("a 404 in broken XML", times=99)]
    assert (root / "ü").stat() is None
    assert (root / "ü").fetch() is None
    with pytest.raises(Unreachable, match="there is no such object"):
        (root / "ü").read()
    assert len(proxy.requests) <= 4


def test_a_listing_without_etags_has_sizes_and_sources_have_stamps_all_the_same(
    root: Location, proxy: Proxy
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (root / name).write(name.encode() * 3)
    wanted = (root / "*.jsonl").expand()
    proxy.rules = [Rule("no ETags", "GET list", times=99)]
    assert [(name, stat.size) for name, stat in root.list()] == [("a.jsonl", 21), ("b.jsonl", 21)]
    assert (root / "*.jsonl").expand() == wanted
    assert all(stat.stamp for _, stat in wanted)


def test_of_many_that_create_one_does(root: Location) -> None:
    together = threading.Barrier(4)

    def create(number: int) -> bool:
        together.wait(SECONDS)
        return (root / "a").create(b"%d" % number) is not None

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(create, range(4))) == 1


@pytest.mark.parametrize("fault", [IGNORES, RACES, "501 NotImplemented"])
def test_a_store_that_does_not_keep_conditions_is_found_out_once(
    fault: str, root: Location, proxy: Proxy
) -> None:
    has_condition = Rule(
        fault, "PUT", times=10**9, when=lambda r: bool(CONDITIONS & r.headers.keys())
    )
    proxy.rules = [has_condition]
    assert not (root / "x").keeps_conditions()
    asked = len(proxy.requests)
    assert asked <= 1 + 6 * 3, "three of each, at most with a look before them and a write behind"
    assert not (root / "y").keeps_conditions()
    assert len(proxy.requests) == asked
    assert list(root.list(recursive=True)) == []
    first = (root / "a").create(b"one")
    assert first is not None
    assert (root / "a").create(b"two") is None
    assert (root / "a").replace("another", b"two") is None
    assert (root / "a").replace(first.stamp, b"two") == (root / "a").stat()
    (root / "a").delete()
    assert (root / "a").replace(first.stamp, b"three") is None


def test_a_store_that_keeps_conditions_is_believed_after_7_requests(
    root: Location, proxy: Proxy
) -> None:
    assert (root / "x").keeps_conditions()
    assert len(proxy.requests) == 7
    assert (root / "x").keeps_conditions()
    assert len(proxy.requests) == 7
    assert (root / "none").replace("stamp", b"one") is None
    proxy.rules = [Rule("409 ConditionalRequestConflict", "PUT")]
    assert (root / "a").create(b"one") is None, "another one writes it at this moment"


def test_a_store_that_takes_etags_without_their_quotes_alone_is_given_them_so(
    root: Location, proxy: Proxy
) -> None:
    """As Ceph, which refused every replacement; found out by three writes more."""
    is_quoted = Rule(
        "412", "PUT", times=10**9, when=lambda r: r.headers.get("if-match", "").startswith('"')
    )
    proxy.rules = [is_quoted]
    assert (root / "x").keeps_conditions()
    assert len(proxy.requests) == 10
    first = (root / "a").create(b"one")
    assert first is not None
    second = (root / "a").replace(first.stamp, b"two")
    assert second == (root / "a").stat()
    assert (root / "a").replace(first.stamp, b"three") is None
    assert (root / "a").read() == b"two"


def test_a_store_that_refuses_conditions_that_hold_keeps_none(root: Location, proxy: Proxy) -> None:
    for condition in ("if-match", "if-none-match"):
        refuses = Rule("412", "PUT", times=10**9, when=lambda r, c=condition: c in r.headers)
        proxy.rules = [refuses]
        assert not (root / condition).keeps_conditions()
        first = (root / condition).create(b"one")
        assert first is not None
        assert (root / condition).replace(first.stamp, b"two") is not None
        assert (root / condition).replace(first.stamp, b"three") is None
        (root / condition).delete()
        assert list(root.list(recursive=True)) == []
        s3_conditions._kept.clear()
