"""The tokenizer lies beside the streams once, whole or not visible as whole, and goes when no
stream names it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mdsmix.conversion import unit
from mdsmix.conversion.gc import delete_garbage, find_garbage
from mdsmix.conversion.planning import Options, plan_streams
from mdsmix.conversion.publish_pretrained import fetch_tokenizer, publish_pretrained
from mdsmix.encode.backends import Unequal, store_difference
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.shards.manifest import Manifest
from mdsmix.storage import locate
from tests.converting import (
    Project,
    assert_refused,
    chats,
    documents,
    manifest_of,
    read_files,
    run_recipe,
    set_age,
)

CARD = "mdsmix.tokenizer"
ANOTHER = "tokenizer.kwargs.bos_token=<|im_start|>"
"Makes another tokenizer of the recipe's."
SECRET = "hf_0123456789abcdef"


@pytest.fixture
def project(project: Project) -> Project:
    project.write_source(f"text number {n}" for n in range(30))
    return project.configure(streams={"web": documents("a.jsonl"), "too": documents("a.jsonl")})


def home(project: Project) -> Path:
    (found,) = project.out.glob("tokenizer-*")
    return found


def test_streams_of_a_recipe_share_one_and_every_manifest_leads_to_it(project: Project) -> None:
    project.run()
    for stream in ("web", "too"):
        card = manifest_of(project.out / stream / "train").tokenizer
        assert home(project).name == card.folder_name
    said = json.loads((home(project) / CARD).read_text())
    assert said["hash"] == card.hash
    assert read_files(home(project)).keys() == {CARD, *said["files"]} >= {"tokenizer.json"}
    before = {path: path.stat() for path in home(project).iterdir()}
    project.run("max_seq_len=8")
    assert {path: path.stat() for path in home(project).iterdir()} == before, "nothing written"
    project.run('tokenizer.kwargs.chat_template="{{ messages }}"')
    assert len(list(project.out.glob("tokenizer-*"))) == 2


def test_a_refused_run_writes_nothing_and_a_first_look_has_its_tokenizer(project: Project) -> None:
    with pytest.raises(RecipeError):
        project.run(only=["none"])
    project.convert_ok("--dry-run")
    assert not project.out.exists()
    project.run(limit=20)
    assert (home(project) / CARD).is_file()
    set_age(project.out, 100)
    assert find_garbage(locate(project.out / "web/limit-20"), 0) == []


def test_gc_takes_a_tokenizer_that_no_stream_beside_names(project: Project) -> None:
    """A tokenizer of the user's own may bear such a name, and what somebody has put into ours stays
    there.
    """

    def found(days: float = 7) -> list[tuple[str, str]]:
        return [
            (each.kind, each.name) for each in find_garbage(locate(project.train), days * 86_400)
        ]

    project.run()
    first, own = home(project), project.out / "tokenizer-20240101"
    shutil.copytree(first, own)
    (own / CARD).unlink()
    processor = project.out / "processor-00000000"
    processor.mkdir()
    card = json.loads((first / CARD).read_text()) | {"folder": processor.name}
    (processor / "mdsmix.processor").write_text(json.dumps(card))
    set_age(project.out, 8)
    assert found() == [("processor", processor.name)]
    with project.patch.context() as patch:
        patch.setattr(Manifest, "processor_folder", processor.name)
        assert not found()
    project.run(ANOTHER, only=["web"])
    set_age(project.out, 8)
    assert ("tokenizer", first.name) not in found(), "the other stream names it"
    run_recipe(project.recipe, ANOTHER, only=["too"])
    manifest = project.out / "too/train/mdsmix.manifest"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    assert not {name for _, name in found()} & {first.name, processor.name}, "it may name any"
    manifest.write_bytes(whole)
    assert not found(9)
    (first / "notes.txt").write_text("theirs")
    (second,) = set(project.out.glob("tokenizer-*")) - {first, own}
    before = read_files(own) | read_files(second)
    gone = {each.name for each in delete_garbage(locate(project.train), 7 * 86_400, print)}
    assert {first.name, processor.name} <= gone
    assert (read_files(first).keys(), processor.exists()) == ({"notes.txt"}, False)
    assert read_files(own) | read_files(second) == before


def test_a_machine_without_the_snapshot_fetches_it_once(project: Project) -> None:
    cache = project.switch_machine("cache")
    job = plan_streams(open_recipe(project.recipe), Options())[0].job
    assert fetch_tokenizer(job) is job.tokenizer
    publish_pretrained([job])
    shutil.rmtree(cache / "tokenizers")
    whole = (home(project) / "tokenizer.json").read_bytes()
    for content in (b"{}", b"half of it", b""):
        (home(project) / "tokenizer.json").write_bytes(content)
        with pytest.raises(Unreachable, match="have changed since the tokenizer was published"):
            fetch_tokenizer(job)
        assert not (cache / "tokenizers").exists()
    (home(project) / "tokenizer.json").write_bytes(whole)
    fetched = fetch_tokenizer(job)
    assert Path(fetched.path).is_relative_to(cache)
    assert fetched == replace(job.tokenizer, path=fetched.path)
    (home(project) / "tokenizer.json").unlink()
    assert fetch_tokenizer(job) == fetched


def test_a_machine_without_a_cache_uses_the_reference_where_the_parent_would(
    project: Project,
) -> None:
    """That the fast backend differs on this tokenizer stands in the parent's cache alone."""
    job = plan_streams(open_recipe(project.recipe), Options())[0].job
    publish_pretrained([job])
    project.patch.setenv("MDSMIX_CACHE", str(project.folder / "empty"))
    project.patch.setattr(unit, "_backends", {})
    fast = unit.open_tokenizer_backend(job).label
    assert fast.startswith("fastokens")
    told = replace(job, unequal=fast)
    assert unit.open_tokenizer_backend(told).label.startswith("tokenizers ")
    assert (job.trusts(fast), told.trusts(fast)) == (True, False)
    store_difference(job.tokenizer, Unequal("fastokens 1", "text"))
    assert (job.trusts("fastokens 1"), job.trusts("fastokens 2")) == (False, True)


def test_a_stream_of_such_a_name_is_refused(project: Project) -> None:
    answer = project.configure(streams={"tokenizer-0123abcd": documents("a.jsonl")}).convert()
    assert_refused(answer, 2, "streams.tokenizer-0123abcd: a stream's name becomes a folder")
    open_recipe(project.configure(streams={"tokenizer-0123abcde": documents("a.jsonl")}).recipe)


def test_no_path_of_this_machine_and_nothing_else_of_the_folder_is_published(
    project: Project,
) -> None:
    folder = shutil.copytree(project.tokenizer, project.folder / "model")
    theirs = {"model.safetensors": "weights", ".env": SECRET, "notes.json": f'"{SECRET}"'}
    for name, text in theirs.items():
        (folder / name).write_text(text)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    project.write_source([{"messages": turns}], "chat.jsonl")
    project.tokenizer = folder
    kwargs = [f"tokenizer.kwargs.token={SECRET}", "tokenizer.kwargs.padding_side=left"]
    project.configure(chats("chat.jsonl"), max_seq_len=64).run(*kwargs)
    published = read_files(home(project))
    named = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert published.keys() <= {CARD, "chat_template.jinja"} | named
    text = b"".join(published.values())
    assert str(project.folder).encode() not in text
    assert SECRET.encode() not in text
