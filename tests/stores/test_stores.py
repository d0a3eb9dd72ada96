"""Each store meets the requirements of mdsmix: objects, conditions, and whole commands. Kills and
stalls are tried on MinIO (`tests/e2e`).
"""

from __future__ import annotations

from typing import Any

import pytest

from mdsmix.conversion.gc import delete_garbage, find_garbage
from mdsmix.errors import Unreachable
from mdsmix.shards.index import read_index
from mdsmix.storage import Location, azure, gcs, s3
from tests.converting import Project, mdsmix, read_location, run_ok
from tests.stores.servers import STORES, Store

pytestmark = pytest.mark.parametrize("running", STORES, indirect=True)
TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(60)]
CHANGED = [{"text": TEXTS[0]["text"].upper()}, *TEXTS[1:], {"text": 5}]
ODD = ["a b", "ü", "a+b", "50%", "x=1&y", "#", "中文", "it's", "(1)", "~", "a;b,c", "z" * 200]


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of a listing has two entries."""
    list_s3, list_gcs, list_azure = s3._list_page, gcs._list_page, azure._list_page

    def list_page_of_s3(request: dict[str, Any], client: Any) -> Any:
        return list_s3({**request, "MaxKeys": 2}, client)

    def list_page_of_gcs(bucket: str, parameters: dict[str, str], session: Any) -> Any:
        return list_gcs(bucket, {**parameters, "maxResults": "2"}, session)

    def list_page_of_azure(container: str, query: dict[str, str], client: Any) -> Any:
        return list_azure(container, {**query, "maxresults": "2"}, client)

    monkeypatch.setattr(azure, "_list_page", list_page_of_azure)
    monkeypatch.setattr(s3, "_list_page", list_page_of_s3)
    monkeypatch.setattr(gcs, "_list_page", list_page_of_gcs)


def test_objects_of_any_name_are_written_listed_read_and_deleted(root: Location) -> None:
    folder = root / "a folder"
    for name in ODD:
        (folder / name).write(name.encode(), b"-1234")
    listed = dict(folder.list())
    assert sorted(listed) == list(listed) == sorted(ODD, key=lambda name: name.encode())
    for name in ODD:
        file = folder / name
        content = name.encode() + b"-1234"
        size = len(content)
        stat = file.stat()
        assert (file.read(), file.read(size - 3, 2)) == (content, b"23")
        assert (file.read(size), file.read(size + 9, 5), file.read(2, 0)) == (b"", b"", b"")
        assert file.fetch() == (stat, content)
        assert (stat.size, listed[name].size) == (size, size)
        assert listed[name].stamp in ("", stat.stamp)
        assert (file / "below").stat() is None
        file.delete()
        file.delete()
        assert (file.stat(), file.fetch()) == (None, None)
        with pytest.raises(Unreachable, match=r"there is no such (object|blob)"):
            file.read()
        file.write(b"again")
    folder.delete_all([*ODD, "not there"])
    assert list(folder.list()) == []
    large = bytes(range(256)) * 4 * 11_000
    (root / "large ü").write(large[:1000], large[1000:])
    (root / "large ü").copy_to(root / "copy")
    assert (root / "copy").read() == large
    no_bucket = type(root)(f"{root.path.removesuffix(root.name)}no-such-bucket-of-ours/x")
    for act in (lambda: no_bucket.write(b"1"), lambda: list(no_bucket.list())):
        with pytest.raises(Unreachable, match=root.container_noun):
            act()


@pytest.mark.usefixtures("small_pages")
def test_a_listing_has_many_pages_and_patterns_find_files_with_stamps_that_change(
    root: Location,
) -> None:
    for i in range(5):
        (root / "f" / str(i)).write(b"x")
        (root / "f" / f"d{i}" / "below").write(b"x")
    assert [name for name, _ in (root / "f").list()] == list("01234")
    assert list((root / "f").folders()) == [f"d{i}" for i in range(5)]
    assert len(list((root / "f").list(recursive=True))) == 10
    (root / "raw/a.jsonl").write(b"one")
    ((file, stat),) = (root / "raw/*.jsonl").expand()
    assert stat == file.stat()
    assert stat.stamp
    (root / "raw/a.jsonl").write(b"two")
    assert (root / "raw/*.jsonl").expand() != [(file, stat)]


def test_create_and_replace_keep_their_conditions(root: Location, store: Store) -> None:
    """Writes at the same moment are tried first, since not every store keeps conditions then."""
    assert (root / "x").try_conditions() is store.keeps_conditions
    assert list(root.list(recursive=True)) == [], "the trial leaves nothing"
    file = root / "a"
    first = file.create(b"one")
    assert file.create(b"two") is None
    second = file.replace(first.stamp, b"three")
    assert second == file.stat()
    assert file.replace(first.stamp, b"four") is None
    assert file.read() == b"three"
    file.delete()
    assert file.replace(second.stamp, b"five") is None
    assert file.stat() is None


def test_a_stream_is_converted_mixed_repaired_changed_and_tidied(
    project: Project, store: Store, root: Location
) -> None:
    """A bucket gets the bytes that a disk gets, from two workers, and nothing twice."""
    recipe = project.recipe
    split = root / "mix ü/web/train"
    project.set_window_size(1500)
    project.configure(remote=f"{root}/mix ü").write_source([*TEXTS, {"text": 5}])
    project.run("remote=null")
    expected = read_location(project.out / "web")
    answer = run_ok("convert", recipe, "--workers", "2")
    assert (
        "not support conditional writes" in answer.out + answer.err
    ) is not store.keeps_conditions
    assert read_location(split.parent) == expected
    assert project.run().state == "up to date"
    for command in ("verify", "check", "inspect"):
        run_ok(command, split.parent)

    run_ok("mix", recipe, "--out", f"{root}/all")
    run_ok("verify", f"{root}/all")
    mixed = read_location(root / "all")
    assert "up to date" in run_ok("mix", recipe, "--out", f"{root}/all").out
    assert read_location(root / "all") == mixed

    shards = [split / shard.stored.basename for shard in read_index(split).shards]
    shards[0].write(shards[0].read()[:-1] + b"\0")
    shards[1].delete()
    assert mdsmix("verify", split).code == 3
    run_ok("repair", split.parent, "--recipe", recipe, "--workers", "1")
    assert read_location(split.parent) == expected

    project.write_source(CHANGED)
    outcome = project.run()
    assert 0 < outcome.done < outcome.units
    kinds = {item.kind for item in find_garbage(split, 0)}
    assert {"shard", "unit record", "old index"} <= kinds
    before = read_location(split)
    deleted = delete_garbage(split, 0, lambda _: None)
    assert before.keys() - read_location(split).keys() == {item.name for item in deleted}
    assert find_garbage(split, 0) == []
    run_ok("verify", split)
    assert project.run().state == "up to date"
