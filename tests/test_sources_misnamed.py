"""A file that is of another sort than its name says, or that its library cannot open, is one
sentence: what it is, and what to do.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
import zstandard

from mdsmix.errors import MdsmixError
from mdsmix.ragged import Ragged
from mdsmix.shards.index import make_index
from mdsmix.shards.shard_files import ShardLayout, lay_out_samples, store_shards
from mdsmix.sources import find_files
from mdsmix.storage import locate
from tests.converting import documents, mdsmix, refused, write_recipe
from tests.formats import WRITTEN, bad, read_file, records, tar_of

LINE = b'{"text": "one"}\n'
TEXT = LINE.decode()
MISNAMED: list[tuple[str, bytes, str, str]] = [
    ("a.jsonl", TEXT.encode("utf-16"), "UTF-16", "iconv"),
    ("a.jsonl", b"\xfe\xff" + TEXT.encode("utf-16-be"), "UTF-16", "iconv"),
    ("a.json", TEXT.encode("utf-16-le"), "UTF-16", "iconv"),
    ("a.csv", TEXT.encode("utf-16-be"), "UTF-16", "iconv"),
    ("a.jsonl.gz", gzip.compress(TEXT.encode("utf-16")), "UTF-16", "iconv"),
    ("a.jsonl", gzip.compress(LINE), "gzip", "add that suffix"),
    ("a.jsonl", zstandard.compress(LINE), "Zstandard", "add that suffix"),
    ("a.csv", bz2.compress(LINE), "bzip2", "add that suffix"),
    ("a.json", lzma.compress(LINE), "xz", "add that suffix"),
    ("a.tar", gzip.compress(tar_of([("a.txt", b"x")])), "gzip", "add that suffix"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(LINE)), "packed a second time, by gzip", "unpack"),
    ("a.jsonl", b"PK\x03\x04" + LINE * 9, "zip archive", "unpack"),
    ("a.jsonl", WRITTEN["parquet"]([{"text": "one"}]), "parquet", "source.format: parquet"),
    ("a.json", WRITTEN["feather"]([{"text": "one"}]), "arrow", "source.format: arrow"),
]


NUMBERS = [str(number) for number in range(len(MISNAMED))]
"Names of the cases: packed bytes have the time in them."


@pytest.mark.parametrize(("name", "content", "what", "cure"), MISNAMED, ids=NUMBERS)
def test_a_file_of_another_sort_is_named_by_what_it_is(
    tmp_path: Path, tokenizer_folder: Path, name: str, content: bytes, what: str, cure: str
) -> None:
    (tmp_path / name).write_bytes(content)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"a": documents(name)})
    refused(mdsmix("convert", recipe), 4, name, what, cure)


@pytest.mark.parametrize("split_by", ["file", "line", "paragraph"])
def test_plain_text_in_utf_16_too(tmp_path: Path, split_by: str) -> None:
    with pytest.raises(MdsmixError, match="UTF-16"):
        read_file(tmp_path, "a.txt", "one\n\ntwo".encode("utf-16"), split_by=split_by)


@pytest.mark.parametrize("text", ["", "a", "BZh", "PAR", "\ufeff{}", "é\n", "\0\0\0\0\0\0\0\0x"])
def test_short_and_odd_texts_are_texts(tmp_path: Path, text: str) -> None:
    found = read_file(tmp_path, "a.txt", text.encode(), split_by="file")
    assert [record["text"] for record in records(found)] == [text.lstrip("\ufeff")] * bool(text)


def test_a_frame_that_wants_a_dictionary(tmp_path: Path) -> None:
    samples = [b"some text %d and more of it " % number * 3 for number in range(200)]
    dictionary = zstandard.train_dictionary(1000, samples)
    packed = zstandard.ZstdCompressor(dict_data=dictionary).compress(LINE * 20)
    with pytest.raises(MdsmixError, match=r"a\.jsonl\.zst .* dictionary.* zstd -d -D"):
        read_file(tmp_path, "a.jsonl.zst", packed)


@pytest.mark.parametrize("name", ["*.jsonl", "b.jsonl"])
@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_path_that_only_packed_files_match(tmp_path: Path, name: str, packing: str) -> None:
    (tmp_path / f"b.jsonl{packing}").touch()
    with pytest.raises(MdsmixError, match=f"matches no file, but {name}{packing} does".replace("*", r"\*")):  # fmt: skip
        find_files([name], tmp_path)


# polars 2.1: pl.DataFrame({"a": [1], "wide": [2**100]}, schema={"a": pl.Int64, "wide": pl.Int128})
PARQUET = (
    "H4sIAAAAAAACA3VSzU7CQBCerg3xYEwPzKabcOiFRmOjsKKAkcOiJhIRoZp48VItBSJaAyrqQ3jiIYwv5N0n8BGcbf"
    "Hv4KSZ3+/7ZppsW/lFNNFCq4kMAcCA1BB006OmhRnMADBqMgPm0BQbkLGEbQQInPEzfuZKd14TPPQ0Af4QfpmldRdF"
    "HjLCNieDsJsItHjLnRogclyi5AShbGpgS6fIxPa+OYrjWzQBzTyjrSSBDrJUgQRETnjus5H77zA+ZZgF950Q/+3mLw"
    "w58FeDM3eeQlYfYS8o3z863Rpf9LtXgf1hrGnbjBXZnnaVe6ofOrM6aR0oNVY7SeyolTbNJxPdbyjVm+EaOpa0q2vX"
    "fCJQpfctmuLqadDzE5qvpHnny9XXg1N/mPSOEn5ptoRGP3zSO9Z4iv5M9zAV2i3oX0nk0q1EvdT3NNK63leqVgO71Y"
    "6HwWjsLN083vbj62XnvjsaD+JrR64WVwvO0vndYBg65ahakOfhehSFshxFFRkWS7JcCQrVQFY3okhG5aAbVuWy8HIA"
    "9MEbPYs2vbxPqRyNEn4CAAA="
)
IPC = (
    "H4sIAAAAAAACA81SIQ7CQBCclooDThxQgeQLOGT7ApIaDIYEBC/A9kkIBIJ38AhSRRC4Y/a6TZomhAQM22T3dmZnu9"
    "1eXhTL1RxIANy99ynkHNEPMIShT/AkbokYPsLG9AvUmgu5GaMLPBAJSTsRLyXXusN+uxO8Ii5a0Uy13mHMGodR6GCD"
    "/sG6TPUGffImnDd1e5D2R+1d6bvE6vl77DIJfS2zG/lI+bXOKt+XkrPMErw3ozHr4E3uWlis87btU/6LuS80sje09p"
    "bpv0wVs9yZC9u2Ydaz6ppYdvr919240ufhRr8AyPs6bNgCAAA="
)


@pytest.mark.parametrize(("name", "text", "which"), [("a.parquet", PARQUET, "the column wide"), ("a.arrow", IPC, "a column")])  # fmt: skip
def test_integers_of_128_bits_are_named_with_the_cure(
    tmp_path: Path, tokenizer_folder: Path, name: str, text: str, which: str
) -> None:
    (tmp_path / name).write_bytes(gzip.decompress(base64.b64decode(text)))
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"a": documents(name)})
    refused(mdsmix("convert", recipe), 4, name, which, "Int128", "cast the column to Int64")


MAC = [("./._1.jpg", b"m"), ("1.jpg", b"\xff"), ("._1.txt", b"m"), ("1.txt", b"t"), ("__MACOSX/._1.txt", b"x"), ("__MACOSX/1.txt", b"x"), (".DS_Store", b"\0"), ("1.cls", b"5"), ("2.txt", b"u")]  # fmt: skip


def test_what_a_mac_adds_to_an_archive_splits_no_record(tmp_path: Path) -> None:
    """The oracle is the archive without these members. WebDataset passes them over too."""
    own = [(name, data) for name, data in MAC if data not in (b"m", b"x", b"\0")]
    plain = records(read_file(tmp_path, "b.tar", tar_of(own)))
    assert plain == [{"__key__": "1", "jpg": b"\xff", "txt": "t", "cls": "5"}, {"__key__": "2", "txt": "u"}]  # fmt: skip
    found = read_file(tmp_path, "a.tar", tar_of(MAC))
    assert records(found) == plain
    assert not bad(found)


BAD_SAMPLES = {
    b'{"text": "\\ud800"}': "lone_surrogate",
    b'{"text": ': "not_json",
    b'{"text": "\xff"}': "invalid_utf8",
    b"[" * 100_000 + b"]" * 100_000: "too_deep",
}


def test_a_bad_sample_of_a_stream_is_one_bad_record(tmp_path: Path) -> None:
    cells = [b'{"text": "a"}', *BAD_SAMPLES, b'{"n": 1000000000000000000001}']
    layout = ShardLayout({"it": "json", "t": "str"})
    good = [{"it": {"text": "a"}, "t": "x"}, {"it": {"n": 10**21 + 1}, "t": "x"}]
    for last, of_last in ((b"x", []), (b"\xff", ["invalid_utf8"])):
        texts = [*[b"x"] * len(BAD_SAMPLES), b"x", last]
        columns = {"it": Ragged.from_rows(cells, np.uint8), "t": Ragged.from_rows(texts, np.uint8)}
        folder = tmp_path / str(len(of_last))
        folder.mkdir()
        shards = store_shards(locate(folder), layout, lay_out_samples(layout, columns))
        (folder / "index.json").write_bytes(make_index(shards).content)
        found = read_file(tmp_path, folder.name)
        assert records(found) == (good[:1] if of_last else good)
        assert [why for why, _ in bad(found)] == [*BAD_SAMPLES.values(), *of_last]
        places = [origin.place["sample"] for _, origin in bad(found)]
        assert places == [*range(1, 1 + len(places))]
