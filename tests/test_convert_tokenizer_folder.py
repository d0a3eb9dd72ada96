"""The tokenizer lies beside the streams once, whole or not visible as whole, and goes when no stream names it."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from mdsmix.convert import garbage as gc
from mdsmix.convert import run, unit
from mdsmix.convert.garbage import delete_garbage, find_garbage
from mdsmix.convert.job import Job
from mdsmix.convert.planning import Options, plan_streams
from mdsmix.convert.pretrained_folders import at_hand, publish_pretrained
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    chats,
    documents,
    files,
    manifest_of,
    mdsmix,
    run_recipe,
    write_jsonl,
    write_recipe,
)

WEEK = 7 * 86_400.0


@pytest.fixture
def cache(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache, to be taken away."""
    plan_streams(open_recipe(recipe), Options())
    shutil.copytree(Path(os.environ["MDSMIX_CACHE"]) / "tokenizers", tmp_path / "cache/tokenizers")
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"text number {n}"} for n in range(30)])
    streams = {"web": documents(tmp_path / "a.jsonl"), "too": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


@pytest.fixture
def job(recipe: Path) -> Job:
    return plan_streams(open_recipe(recipe), Options())[0].job


def home(folder: Path) -> Path:
    (found,) = (folder / "out").glob("tokenizer-*")
    return found


CARD = "mdsmix.tokenizer"
ANOTHER = "tokenizer.kwargs.bos_token=<|im_start|>"
"Makes another tokenizer of the recipe's."


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 86_400
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def test_streams_of_a_recipe_share_one_and_every_manifest_leads_to_it(
    recipe: Path, tmp_path: Path
) -> None:
    run_recipe(recipe)
    for stream in ("web", "too"):
        card = manifest_of(tmp_path / "out" / stream / "train").tokenizer
        assert home(tmp_path).name == card.folder_name
    said = json.loads((home(tmp_path) / CARD).read_text())
    assert said["hash"] == card.hash
    assert files(home(tmp_path)).keys() == {CARD, *said["files"]}
    assert "tokenizer.json" in said["files"]
    before = {path: path.stat() for path in home(tmp_path).iterdir()}
    run_recipe(recipe, f"streams.web.source.path=[{tmp_path / 'a.jsonl'}, {tmp_path / 'a.jsonl'}]")
    assert {path: path.stat() for path in home(tmp_path).iterdir()} == before, "nothing written"


def test_another_chat_template_is_another_folder(recipe: Path, tmp_path: Path) -> None:
    run_recipe(recipe)
    run_recipe(recipe, 'tokenizer.kwargs.chat_template="{{ messages }}"')
    assert len(list((tmp_path / "out").glob("tokenizer-*"))) == 2


def test_a_first_look_has_its_tokenizer_too(recipe: Path, tmp_path: Path) -> None:
    run_recipe(recipe, limit=20, only=["web"])
    assert (home(tmp_path) / CARD).is_file()
    age(tmp_path / "out", 100)
    assert find_garbage(locate(tmp_path / "out/web/limit-20"), 0) == []


def test_nothing_is_written_where_a_run_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        run_recipe(recipe, only=["none"])
    assert not (tmp_path / "out").exists()
    assert mdsmix("convert", recipe, "--dry-run").code == 0
    assert not (tmp_path / "out").exists()


def test_one_that_is_half_written_is_written_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card comes last, whatever is killed before."""
    write, written = LocalPath.write, list[str]()

    def failing(self: LocalPath, *parts: bytes) -> None:
        if self.name == CARD and not written.count(CARD):
            written.append(CARD)
            raise Unreachable("killed")
        written.append(self.name)
        write(self, *parts)

    monkeypatch.setattr(LocalPath, "write", failing)
    with pytest.raises(Unreachable, match="killed"):
        publish_pretrained([job])
    half = files(home(tmp_path))
    assert CARD not in half
    assert written[-1] == CARD
    publish_pretrained([job])
    assert files(home(tmp_path)).items() > half.items()
    assert written[-1] == CARD


def test_a_run_of_hours_sees_before_it_publishes_that_the_tokenizer_is_there_still(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_units, taken = run.do_units, list[Path]()
    monkeypatch.setattr(run, "LOOK_AGAIN_SECONDS", -1)

    def deleting(work: object) -> object:
        taken.append(home(tmp_path).rename(tmp_path / f"taken-{len(taken)}"))
        return do_units(work)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "do_units", deleting)
    run_recipe(recipe)
    assert len(taken) == 2
    assert files(home(tmp_path)) == files(taken[0])


def test_a_machine_without_the_snapshot_fetches_it_once(
    cache: Path, job: Job, tmp_path: Path
) -> None:
    assert at_hand(job) is job.tokenizer
    publish_pretrained([job])
    shutil.rmtree(cache / "tokenizers")
    fetched = at_hand(job)
    assert Path(fetched.path).is_relative_to(cache)
    assert fetched == replace(job.tokenizer, path=fetched.path)
    shutil.rmtree(home(tmp_path))
    assert at_hand(job) == fetched


@pytest.mark.parametrize("content", [b"{}", b"half of it", b""])
def test_a_tokenizer_that_is_not_what_it_was_is_refused(
    cache: Path, job: Job, tmp_path: Path, content: bytes
) -> None:
    publish_pretrained([job])
    shutil.rmtree(cache / "tokenizers")
    (home(tmp_path) / "tokenizer.json").write_bytes(content)
    with pytest.raises(Unreachable, match="does not hold the tokenizer as it was published"):
        at_hand(job)
    assert not (cache / "tokenizers").exists()


def test_a_machine_without_the_cache_encodes_by_the_reference_where_the_parent_would(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the fast backend differs on this tokenizer stands in the parent's cache alone."""
    publish_pretrained([job])
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(unit, "_backends", {})
    fast = unit.open_tokenizer_backend(job).label
    assert fast.startswith("fastokens")
    told = replace(job, unequal=fast)
    assert unit.open_tokenizer_backend(told).label.startswith("tokenizers ")
    assert (job.trusts(fast), told.trusts(fast)) == (True, False)


def test_gc_keeps_a_tokenizer_while_any_stream_beside_names_it(
    recipe: Path, tmp_path: Path
) -> None:
    run_recipe(recipe)
    first, web = home(tmp_path), locate(tmp_path / "out/web/train")
    run_recipe(recipe, ANOTHER, only=["web"])
    age(tmp_path / "out", 8)
    before = files(first)
    assert "tokenizer" not in {item.kind for item in find_garbage(web, WEEK)}
    run_recipe(recipe, ANOTHER, only=["too"])
    (found,) = [item for item in find_garbage(web, WEEK) if item.kind == "tokenizer"]
    assert (found.name, found.bytes) == (first.name, sum(map(len, before.values())))
    assert WEEK < found.age < 9 * 86_400
    assert "tokenizer" not in {item.kind for item in find_garbage(web, 9 * 86_400)}
    assert mdsmix("gc", recipe).out.count(first.name) == 1, "told once for all streams beside it"
    assert files(first) == before, "finding deletes nothing"
    delete_garbage(web, WEEK, print)
    assert not first.exists()
    assert home(tmp_path).name == manifest_of(tmp_path / "out/too/train").tokenizer.folder_name
    run_recipe(recipe, ANOTHER, only=["web"])
    assert (home(tmp_path) / CARD).is_file()


def test_gc_keeps_a_processor_while_a_stream_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"processor-{digit * 8}" for digit in "01"]
    for name in (*names, "web/train"):
        (tmp_path / name).mkdir(parents=True)
    found = partial(gc.Garbage, kind="processor", bytes=1, age=9 * 86_400.0, discard=print)
    monkeypatch.setattr(gc, "_kept", lambda home: found(name=home.name))
    card = SimpleNamespace(folder_name="tokenizer-00000000")
    manifest = SimpleNamespace(tokenizer=card, processor_folder=names[0])
    monkeypatch.setattr(gc.manifest_file, "read_manifest", lambda _: manifest)
    left = gc.needless(locate(tmp_path), WEEK)
    assert [(each.name, each.kind) for each in left] == [(names[1], "processor")]


def test_gc_takes_nothing_that_mdsmix_did_not_write(recipe: Path, tmp_path: Path) -> None:
    """A tokenizer of the user's own may bear such a name, by its date; what somebody has put into ours stays there."""
    run_recipe(recipe)
    own, stale = tmp_path / "out/tokenizer-20240101", tmp_path / "out/tokenizer-00000000"
    for copy in (stale, own):
        shutil.copytree(next((tmp_path / "out").glob("tokenizer-*")), copy)
    (own / CARD).unlink()
    (stale / CARD).write_text('{"files": ["../../recipe.yaml"], "tokenizer": {}}')
    age(tmp_path / "out", 100)
    before = files(tmp_path)
    assert delete_garbage(locate(tmp_path / "out/web/train"), 0, print) == []
    assert files(tmp_path) == before


def test_gc_keeps_all_where_a_manifest_beside_cannot_be_read(recipe: Path, tmp_path: Path) -> None:
    run_recipe(recipe)
    run_recipe(recipe, ANOTHER)
    (tmp_path / "out/too/train/mdsmix.manifest").write_bytes(b"{")
    age(tmp_path / "out", 100)
    found = find_garbage(locate(tmp_path / "out/web/train"), WEEK)
    assert "tokenizer" not in {item.kind for item in found}


def test_a_stream_of_such_a_name_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    streams = {"tokenizer-0123abcd": documents(tmp_path / "a.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    answer = mdsmix("convert", recipe)
    assert answer.code == 2
    assert "streams.tokenizer-0123abcd: a stream's name becomes a folder" in answer.err
    streams = {"tokenizer-0123abcde": documents(tmp_path / "a.jsonl")}
    open_recipe(write_recipe(tmp_path, tokenizer_folder, streams=streams))


def test_no_path_of_this_machine_and_nothing_else_of_the_folder_is_published(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / ".env").write_text("HF_TOKEN=hf_0123456789abcdef")
    (folder / "notes.json").write_text('{"password": "hf_0123456789abcdef"}')
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    streams = {"chat": chats(write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}]))}
    kwargs = {"token": "hf_0123456789abcdef", "padding_side": "left"}
    tokenizer = {"name": str(folder), "kwargs": kwargs}
    recipe = write_recipe(tmp_path, folder, streams=streams, max_seq_len=64)
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"tokenizer": tokenizer}))
    run_recipe(recipe)
    published = files(home(tmp_path))
    assert published.keys() <= {
        CARD,
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
    text = b"".join(published.values())
    assert str(tmp_path).encode() not in text
    assert b"hf_0123456789abcdef" not in text
