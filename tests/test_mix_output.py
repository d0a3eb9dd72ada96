"""A file that a user named stays what it is: a link, a FIFO, a device, a mode; and is whole or as it was."""

import os
import threading
from pathlib import Path

import pytest

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.mix.render import require_place, write


def test_a_symlink_is_followed_and_the_mode_is_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    link.symlink_to("real.yaml")
    write(str(link), "of a file that was not there")
    (tmp_path / "other").touch()
    assert real.stat().st_mode == (tmp_path / "other").stat().st_mode
    real.chmod(0o640)
    write(str(link), "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "other", "real.yaml"]


def test_a_fifo_is_written_into_and_stays_one(tmp_path: Path) -> None:
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()), daemon=True)
    reader.start()
    write(str(fifo), "new" * 100_000)
    reader.join()
    assert got == ["new" * 100_000]
    assert fifo.is_fifo()


def test_a_folder_is_neither_made_nor_written_over(tmp_path: Path) -> None:
    for target in (tmp_path / "no/x.yaml", tmp_path):
        for refuse in (require_place, lambda target: write(target, "new")):
            with pytest.raises(RecipeError, match="it is a folder, or there is no folder"):
                refuse(str(target))
    assert os.listdir(tmp_path) == []


def test_what_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.yaml"
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unreachable, match="the disk is full"):
        write(str(target), "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.yaml"]
