"""What a recipe's paths name, each file once; units that cover every file once; and hashes that follow exactly the bytes that a unit owns."""

import random
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.errors import RecipeError
from mdsmix.sources import Digests, RecordBatch, SourceFile, content_of, find, plan, read
from mdsmix.storage import Stat, locate
from tests.formats import PACKED, digests, units


def names(paths: list[str], base: Path) -> list[str]:
    return [file.name for file in find(paths, base)]


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1\n")


def test_names_are_relative_to_the_recipe_so_that_both_may_be_moved(tmp_path: Path) -> None:
    for folder in (tmp_path / "here", tmp_path / "there [1]"):
        make(folder, "data/a.jsonl", "data/sub/b.jsonl.gz", "recipes/none")
        assert names(["data/**/*.jsonl*"], folder) == ["data/a.jsonl", "data/sub/b.jsonl.gz"]
        assert names([f"{folder}/data/a.jsonl"], folder) == ["data/a.jsonl"]
        assert names(["../data/a.jsonl"], folder / "recipes") == ["../data/a.jsonl"]


def test_a_file_is_found_once_and_no_entry_has_a_part_in_its_name(tmp_path: Path) -> None:
    make(tmp_path, "a/x.jsonl", "a/y.jsonl", "b/x.jsonl", "c/x~1/x.jsonl")
    paths = ["a/y.jsonl", "a/*.jsonl", "b/x.jsonl", "c/x~1/*", f"{tmp_path}/a/../a/x.jsonl"]
    found = names(paths, tmp_path)
    assert found == ["a/y.jsonl", "a/x.jsonl", "b/x.jsonl", "c/x~1/x.jsonl"]
    assert [*dict.fromkeys(n for path in paths for n in names([path], tmp_path))] == found
    assert sorted(names(["**/*.jsonl"], tmp_path)) == sorted(found)


REFUSED = {
    "data/*.jsonl": ["matches no file: there is none at /", "/data/*.jsonl"],
    "data": ["is a folder", "data/*.jsonl"],
    "data/": ["is a folder", "data/*.jsonl"],
    "other/*.xlsx": ["a.xlsx has no suffix that mdsmix reads", ".jsonl", "also with .gz"],
    "other/*.gz": ["unpack it"],
    "other/*.jl": ["say what it is by source.format, rename"],
    "ftp://host/x.jsonl": ["cannot be opened"],
    "\udcff*": ["not valid UTF-8"],
}


def test_a_path_that_names_no_source_says_why(tmp_path: Path) -> None:
    make(tmp_path, "data/a.csv", "other/a.xlsx", "other/a.zip.gz", "other/a.jl", "\udcff.jsonl")
    for path, expected in REFUSED.items():
        with pytest.raises(RecipeError) as refusal:
            find([path], tmp_path)
        assert all(words in str(refusal.value) for words in expected), path


def file(name: str, size: int) -> SourceFile:
    return SourceFile(location=locate(f"/data/{name}"), stat=Stat(size, "stamp"), name=name)


FEW = settings(max_examples=40)
SIZES = st.integers(0, 250)
NAMES = st.from_regex(r"[a-d]{1,6}\.jsonl(\.gz)?", fullmatch=True)
TREES = st.dictionaries(NAMES, SIZES, max_size=60)


@FEW
@given(TREES, st.randoms())
def test_every_byte_is_planned_once_in_order_whatever_the_order_of_listing(
    tree: dict[str, int], shuffled: random.Random
) -> None:
    files = [file(name, size) for name, size in tree.items()]
    units = plan(files, window_bytes=100)
    shuffled.shuffle(files)
    assert plan(files, window_bytes=100) == units
    assert units == sorted(units, key=lambda unit: (unit.name, unit.start))
    planned: dict[str, int] = {}
    for unit in units:
        for part in unit.files:
            begin, end = unit.start, unit.end or part.stat.size
            assert planned.get(part.name, 0) == begin
            planned[part.name] = end
        if all(part.name.endswith(".jsonl") for part in unit.files):
            size = sum((unit.end or part.stat.size) - unit.start for part in unit.files)
            assert size <= 100, "a plain unit holds at most a window"
        assert unit.end is None or unit.start % 100 == 0
    assert planned == {name: size for name, size in tree.items() if size}


def groups(tree: dict[str, int]) -> set[tuple[str, ...]]:
    units = plan([file(name, size) for name, size in tree.items()], window_bytes=10_000)
    return {tuple(f"{f.name} {f.stat.size}" for f in unit.files) for unit in units}


def test_one_file_among_a_thousand_changes_only_the_units_near_it() -> None:
    """Of about 95 units; the largest of 1,000 such changes was 3. Fixed cutting changes half of them."""
    rng = random.Random(7)
    tree = {f"{rng.getrandbits(40):010x}.jsonl": rng.randint(1, 999) for _ in range(1000)}
    before, added = groups(tree), list[int]()
    assert len(before) > 50
    for number in range(40):
        name, other = rng.choice([*tree]), f"{rng.getrandbits(40):010x}.jsonl"
        without = {each: size for each, size in tree.items() if each != name}
        changed = (tree | {other: 500}, without, tree | {name: rng.randint(1, 999)}, tree | {name: 25_000})[number % 4]  # fmt: skip
        after = groups(changed)
        added.append(len(after - before))
        assert len(before - after) <= 6
    assert max(added) <= 6
    assert sum(added) / len(added) < 2


LINES = st.lists(
    st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=20
)


def test_a_digest_is_of_format_length_and_bytes_and_follows_an_edit_alone(tmp_path: Path) -> None:
    """An edit changes that of its unit, more text that of the last, and a touch none."""
    path, text = tmp_path / "x.jsonl", b'"0123456789"\n' * 40
    path.write_bytes(b"1\n2")
    part = f"jsonl 4 {xxhash.xxh3_128_hexdigest(b'1' + bytes([10]) + b'2' + bytes([10]))}\n"
    assert digests(tmp_path) == [xxhash.xxh3_128_hexdigest(part)]
    path.write_bytes(text)
    before = digests(tmp_path, window=100)
    path.touch()
    assert digests(tmp_path, window=100) == before
    path.write_bytes(text[:250] + b"X" + text[251:])
    after = digests(tmp_path, window=100)
    assert [old == new for old, new in zip(before, after, strict=True)].count(False) == 1
    path.write_bytes(text + b'"more"\n')
    *same, _ = digests(tmp_path, window=100)
    assert same == before[:-1]


@settings(max_examples=60)
@given(LINES, st.integers(20, 60))
def test_packing_changes_no_digest(tmp_path: Path, texts: list[bytes], window: int) -> None:
    """Of no window: windows are counted in the bytes that are packed."""
    data, found = b"\n".join(texts) + b"\n", []
    for packing in ("", ".gz", ".zst"):
        name = f"x.jsonl{packing}"
        (tmp_path / name).write_bytes(PACKED[packing](data) if packing else data)
        known = digests(tmp_path, name, window=window)
        found.append([each for each in known if each != xxhash.xxh3_128_hexdigest("")])
    assert found == found[:1] * 3


def test_windows_of_grouped_packed_files_are_counted_in_what_they_hold(tmp_path: Path) -> None:
    """In a group of files as one window after another, whatever the sizes in which they are stored; what is hashed while it is read
    is what is found by hashing alone."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(b'"text"\n' * 300))
    [unit] = units(tmp_path, "*", 1000)
    content, sizes = content_of(unit), dict.fromkeys(range(7), 0)
    assert [window.number for window in content.windows] == list(sizes)
    assert content.files == (xxhash.xxh3_128_hexdigest(b'"text"\n' * 300),) * 3
    for done in (set(), {0}, {*range(7)}):
        found, batches = Digests(unit), list[RecordBatch]()
        batches += read(unit, digests=found, done=done)
        assert not done & {batch.window for batch in batches}
        assert found.content() == content
        for batch in batches if not done else ():
            sizes[batch.window] += batch.size
    assert sum(sizes.values()) == 3 * 2100
    assert max(sizes.values()) <= 1007
    assert min(sizes.values()) == sizes[6]
