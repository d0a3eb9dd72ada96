"""What stands at the target is replaced by a new version of itself, and by nothing else unless the user says so."""

import pytest

from mdsmix.errors import RecipeError
from tests.converting import Web, documents, list_in_parts
from tests.published import CONCAT, TOKEN_ROW, publish

COLUMNS, DOCUMENT = "train_loader.name=finetuning", "streams.web.layout=document"


@pytest.fixture
def web(web: Web) -> Web:
    for name, end in (("a", ""), ("b", "!")):  # of other sizes
        web.holds((f"{name} {n} a text of some words{end}" for n in range(9)), f"{name}.jsonl")
    return web.says(documents("a.jsonl"))


def refused(web: Web, *overrides: str, match: str) -> None:
    """The run is refused in a sentence, changes nothing, and `--reencode` does it all the same."""
    before = web.files
    with pytest.raises(RecipeError, match=match):
        web.run(*overrides)
    assert web.files == before
    web.run(*overrides, reencode=True)
    assert web.files["index.json"] != before["index.json"]
    assert web.run(*overrides).state == "up to date"


def test_what_is_another_stream_is_refused(web: Web) -> None:
    """One that mdsmix did not make; other columns, with how much is to be done again; none of the sources of before."""
    publish(web.train.parent, CONCAT, [TOKEN_ROW])
    refused(web, match="stream web: .*/web/train holds a stream without an mdsmix manifest")
    columns = (
        r"for the text loader with the columns tokens; the recipe now wants input_ids, labels "
        rf"for the finetuning loader: all 9 records, {web.manifest.totals.tokens} tokens, .* pass --reencode"
    )
    refused(web, COLUMNS, match=columns)
    none = r"a\.jsonl is no longer among its sources: about 9 of the 9 records published, 100\.0% of their bytes; bring back"
    refused(web, COLUMNS, "streams.web.source.path=b.jsonl", match=none)


def test_one_more_file_or_a_wider_pattern_is_a_new_version(web: Web) -> None:
    """And so is another layout with the same columns."""
    web.run()
    assert web.run(DOCUMENT).manifest.totals.samples == 9
    (web.folder / "b").mkdir()
    (web.folder / "b.jsonl").rename(web.folder / "b" / "b.jsonl")
    for wider in ("[a.jsonl,b/b.jsonl]", "[a.jsonl,b/*.jsonl]", "./**/*.jsonl"):
        manifest = web.run(f"streams.web.source.path={wider}", DOCUMENT).manifest
        assert (manifest.records.read, len(manifest.sources)) == (18, 2)


def test_the_quarantine_is_no_source(web: Web) -> None:
    """It would grow with every run: what is set aside there is no document."""
    web.holds(["a text", {"body": 1}])
    everything = "streams.web.source.path=./**/*.jsonl*"
    web.run(everything)
    for settings in ({}, {"limit": 3}, {"reencode": True}):
        match = r"finds files in .*/web/train/quarantine, .*narrow the pattern"
        with pytest.raises(RecipeError, match=match):
            web.run(everything, **settings)


def vanishing(web: Web, kept: int, gone: int) -> None:
    """The second of two files of records of one length vanishes after it was published."""
    for name, count in (("a", kept), ("b", gone)):
        web.holds((f"{name} {n:04} a text of some words" for n in range(count)), f"g/{name}.jsonl")
    web.says(documents("g/*.jsonl")).run()
    (web.folder / "g/b.jsonl").rename(web.folder / "b.jsonl")


def test_a_source_file_that_has_vanished_is_told_up_to_a_tenth_of_the_stream(web: Web) -> None:
    words = "g/b.jsonl is no longer among its sources: about 5 of the 100 records published, 5.0% of their bytes"
    vanishing(web, kept=95, gone=5)
    assert words in web.convert("--dry-run").out
    outcome = web.run()
    assert outcome.manifest.records.read == 95
    assert [note for note in outcome.notes if note.startswith("WARNING: ") and words in note]
    assert not any("no longer" in note for note in web.run().notes)


def test_a_file_of_the_size_of_one_that_stays_has_not_been_moved(web: Web) -> None:
    vanishing(web, kept=9, gone=9)
    with pytest.raises(RecipeError, match=r"about 9 of the 18 records published, 50\.0%"):
        web.run()


def test_more_than_a_tenth_that_has_vanished_is_refused_and_what_was_moved_has_not(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_in_parts(monkeypatch)
    vanishing(web, kept=30, gone=300)
    refusal = (
        r"stream web: g/b.jsonl is no longer among its sources: about 300 of the 330 records published, 90.9% of their bytes; "
        r"bring back what is gone, publish elsewhere, or pass --reencode to replace .*/web/train by a stream without it"
    )
    before = web.files
    with pytest.raises(RecipeError, match=refusal) as refused:
        web.run()
    assert refused.value.exit_code == 2
    assert web.files == before
    (web.folder / "b.jsonl").rename(web.folder / "g/c.jsonl")
    outcome = web.run()
    assert outcome.manifest.records.read == 330
    assert not any("no longer" in note for note in outcome.notes)
    (web.folder / "g/c.jsonl").unlink()
    assert web.run(reencode=True).manifest.records.read == 30
