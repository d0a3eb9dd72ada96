"""Which files are one stream, what it is called, and by which pattern the recipe finds just these."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.init.data_files import find_data
from mdsmix.init.drafts import name_apart, paths_of, sort_out
from mdsmix.recipe.rules import STREAM_NAME
from mdsmix.sources import SourceFile
from mdsmix.storage import Stat, locate
from tests.converting import write_jsonl

TEXT, PAIR = {"text": "some words"}, {"prompt": "a", "response": "b"}


Found = dict[str, tuple[list[str], str | None, list[str]]]


def streams(folder: Path, files: dict[str, Any]) -> Found:
    """Stream -> its paths, split and fields, of a folder with these files of one record each."""
    for name, record in files.items():
        write_jsonl(folder / name, [record])
    said: list[Any] = []
    drafts = sort_out(find_data([str(folder)], folder, said), said)
    assert not said
    name_apart(drafts)
    return {
        draft.name: (draft.source["path"], draft.keys.get("split"), list(draft.guess.fields))
        for draft in drafts
    }


GROUPS: list[tuple[dict[str, Any], Found]] = [
    (
        {f"web/part-{n:04}.jsonl": TEXT for n in range(12)} | {"web/faq.jsonl": PAIR},
        {
            "web": (["web/part-*.jsonl"], None, ["text"]),
            "faq": (["web/faq.jsonl"], None, ["prompt", "response"]),
        },
    ),
    (  # a-*.jsonl would find the pairs too
        {"a-1.jsonl": TEXT, "a-2.jsonl": TEXT, "a-x.jsonl": PAIR},
        {
            "a": (["a-1.jsonl", "a-2.jsonl"], None, ["text"]),
            "a_x": (["a-x.jsonl"], None, ["prompt", "response"]),
        },
    ),
    (
        {f"few/{word}.jsonl": TEXT for word in ("news", "law")} | {f"many/{word}.jsonl": TEXT for word in "abcdefghijk"},
        {
            "law": (["few/law.jsonl"], None, ["text"]),
            "news": (["few/news.jsonl"], None, ["text"]),
            "many": (["many/*.jsonl"], None, ["text"]),
        },
    ),
    (
        dict.fromkeys(("chat/train.jsonl", "chat/test.jsonl", "valid_qa.jsonl", "protest.jsonl"), TEXT),
        {
            "chat": (["chat/train.jsonl"], None, ["text"]),
            "chat-test": (["chat/test.jsonl"], "test", ["text"]),
            "qa-validation": (["valid_qa.jsonl"], "validation", ["text"]),
            "protest": (["protest.jsonl"], None, ["text"]),
        },
    ),
    ({"test.jsonl": TEXT}, {"data": (["test.jsonl"], None, ["text"])}),
]  # fmt: skip
"Files with their records -> streams with their paths, split and fields. Where all is a test, it is trained."


def test_alike_files_are_one_stream_under_a_name_that_tells_and_no_pattern_finds_another(
    tmp_path: Path,
) -> None:
    for number, (names, found) in enumerate(GROUPS):
        assert streams(tmp_path / str(number), names) == found


def test_names_are_apart_and_fit_a_recipe(tmp_path: Path) -> None:
    files = {"a/x.jsonl": TEXT, "b/x.jsonl": TEXT, "c/数据.jsonl": TEXT, "1.jsonl": TEXT}
    found = streams(tmp_path, files)
    assert len(found) == len(files)
    assert {"x", "x-2"} <= found.keys()
    assert all(STREAM_NAME.fullmatch(name) for name in found)


NAMES = st.lists(st.from_regex(r"[ab\[\]*?]{1,2}[0-9]{0,2}\.jsonl", fullmatch=True), unique=True, min_size=2, max_size=6)  # fmt: skip


@settings(max_examples=25)
@given(NAMES, st.integers(1, 6))
def test_the_paths_of_files_find_them_and_no_other_that_is_known(
    names: list[str], count: int
) -> None:
    known = [SourceFile(location=locate(name), stat=Stat(1, ""), name=name) for name in names]
    own = known[:count]
    for folder in ("", "in/"):
        files = [SourceFile(location=f.location, stat=f.stat, name=folder + f.name) for f in known]
        paths = paths_of(files[: len(own)], files)
        found = {f.name for f in files if any(fnmatchcase(f.name, path) for path in paths)}
        assert found == {f.name for f in files[: len(own)]}
