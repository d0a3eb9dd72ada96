"""Where the path of an image leads, and which paths lead nowhere or out of the folder of the images."""

from pathlib import Path

import pytest

from mdsmix.images.fetching import find
from mdsmix.images.judge import Bad
from mdsmix.storage import locate

HUB = "hf://datasets/org/name@v2/talks"


def test_a_path_begins_at_its_folder_or_stands_for_itself_or_is_bad() -> None:
    for base, path, url in (
        ("/data", "img/0.jpg", "/data/img/0.jpg"),
        ("/data", "../0.jpg", "/0.jpg"),
        ("/data", "/x/0.jpg", "/x/0.jpg"),
        ("/data", "file:///x/a%20b.jpg", "/x/a b.jpg"),
        ("/data", "a%20b.jpg", "/data/a%20b.jpg"),
        ("/data", "s3://bucket/0.jpg", "s3://bucket/0.jpg"),
        ("s3://bucket/a", "img//./0.jpg", "s3://bucket/a/img/0.jpg"),
        ("s3://bucket/a", "../0.jpg", "s3://bucket/0.jpg"),
        ("s3://bucket", "0.jpg", "s3://bucket/0.jpg"),
        ("s3://bucket/a", "/x/0.jpg", "/x/0.jpg"),
        (HUB, "img/0.jpg", f"{HUB}/img/0.jpg"),
        (HUB, "../0.jpg", "hf://datasets/org/name@v2/0.jpg"),
    ):
        assert find(path, locate(base)) == locate(url), (base, path)
    for base, path, why in (
        ("s3://bucket/a", "../../0.jpg", "it leads out of the bucket bucket"),
        ("s3://bucket", "../0.jpg", "it leads out of the bucket bucket"),
        (HUB, "../../x/0.jpg", "it leads out of the data set datasets/org/name@v2"),
        ("/data", "a\0.jpg", "no path holds a NUL character"),
        ("/data", "a\ud800.jpg", "surrogates not allowed"),
    ):
        with pytest.raises(Bad, match=why):
            find(path, locate(base))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`img` with an image, with a link to one beside it, and one to a folder outside; itself behind a link."""
    (tmp_path / "real/img").mkdir(parents=True)
    (tmp_path / "img").symlink_to(tmp_path / "real/img")
    for name in ("real/img/0.jpg", "secret.jpg", "real/img2.jpg"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "real/img/link.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "real/img/up").symlink_to(tmp_path)
    return tmp_path / "img"


def test_where_nothing_may_be_outside_what_leads_out_is_bad(folder: Path) -> None:
    real = folder.resolve()
    within = ["0.jpg", "./up/img/0.jpg", f"{folder}/0.jpg", f"{real}/0.jpg", f"file://{real}/0.jpg", "gone.jpg", "http://a/x.jpg"]  # fmt: skip
    for path in within:
        assert find(path, locate(folder), inside=True)
    out = ["../secret.jpg", "link.jpg", "up/secret.jpg", f"{real}2.jpg", "/etc/passwd", "file:///etc/passwd", "s3://bucket/0.jpg", "hf://datasets/a/b/c"]  # fmt: skip
    for path in out:
        assert find(path, locate(folder))
        with pytest.raises(Bad, match=r"images\.outside is refuse") as bad:
            find(path, locate(folder), inside=True)
        assert bad.value.reason == "bad_image_path"


def test_in_a_bucket_the_same_is_told_by_names_alone() -> None:
    base = locate("s3://bucket/a")
    assert find("b/../0.jpg", base, inside=True) == locate("s3://bucket/a/0.jpg")
    for path in ("../0.jpg", "s3://bucket/ab/0.jpg", "s3://bucket/a/../0.jpg", "s3://other/a/0.jpg", "/etc/passwd"):  # fmt: skip
        with pytest.raises(Bad, match="does not lie below"):
            find(path, base, inside=True)
