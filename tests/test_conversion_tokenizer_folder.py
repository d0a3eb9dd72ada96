"""The tokenizer is stored once next to the streams, its card last. `gc` deletes it when no stream
refers to it.
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
"An override that changes the recipe's tokenizer."
SECRET = "hf_0123456789abcdef"


@pytest.fixture
def project(project: Project) -> Project:
    project.write_source(f"text number {n}" for n in range(30))
    return project.configure(streams={"web": documents("a.jsonl"), "too": documents("a.jsonl")})


def tokenizer_home(project: Project) -> Path:
    (folder,) = project.out.glob("tokenizer-*")
    return folder


def test_streams_of_a_recipe_share_one_tokenizer_folder(project: Project) -> None:
    project.run()
    for stream in ("web", "too"):
        card = manifest_of(project.out / stream / "train").tokenizer
        assert tokenizer_home(project).name == card.folder_name
    published_card = json.loads((tokenizer_home(project) / CARD).read_text())
    assert published_card["hash"] == card.hash
    assert (
        read_files(tokenizer_home(project)).keys()
        == {CARD, *published_card["files"]}
        >= {"tokenizer.json"}
    )
    before = {path: path.stat() for path in tokenizer_home(project).iterdir()}
    project.run("max_seq_len=8")
    assert {path: path.stat() for path in tokenizer_home(project).iterdir()} == before, (
        "nothing written"
    )
    project.run('tokenizer.kwargs.chat_template="{{ messages }}"')
    assert len(list(project.out.glob("tokenizer-*"))) == 2


def test_a_refused_run_writes_no_tokenizer_and_a_limited_run_does(project: Project) -> None:
    with pytest.raises(RecipeError):
        project.run(only=["none"])
    project.convert_ok("--dry-run")
    assert not project.out.exists()
    project.run(limit=20)
    assert (tokenizer_home(project) / CARD).is_file()
    set_age(project.out, 100)
    assert find_garbage(locate(project.out / "web/limit-20"), 0) == []


def test_gc_deletes_a_tokenizer_to_which_no_stream_refers(project: Project) -> None:
    """A folder of the user's with such a name is kept, and so are other files in the folder."""

    def list_garbage(days: float = 7) -> list[tuple[str, str]]:
        items = find_garbage(locate(project.train), days * 86_400)
        return [(item.kind, item.name) for item in items]

    project.run()
    first = tokenizer_home(project)
    own = project.out / "tokenizer-20240101"
    shutil.copytree(first, own)
    (own / CARD).unlink()
    processor = project.out / "processor-00000000"
    processor.mkdir()
    card = json.loads((first / CARD).read_text()) | {"folder": processor.name}
    (processor / "mdsmix.processor").write_text(json.dumps(card))
    set_age(project.out, 8)
    assert list_garbage() == [("processor", processor.name)]
    with project.patch.context() as patch:
        patch.setattr(Manifest, "processor_folder", processor.name)
        assert not list_garbage()
    project.run(ANOTHER, only=["web"])
    set_age(project.out, 8)
    assert ("tokenizer", first.name) not in list_garbage(), "the other stream refers to it"
    run_recipe(project.recipe, ANOTHER, only=["too"])
    manifest = project.out / "too/train/mdsmix.manifest"
    content = manifest.read_bytes()
    manifest.write_bytes(b"{")
    assert not {name for _, name in list_garbage()} & {first.name, processor.name}, (
        "it may refer to any"
    )
    manifest.write_bytes(content)
    assert not list_garbage(9)
    (first / "notes.txt").write_text("theirs")
    (second,) = set(project.out.glob("tokenizer-*")) - {first, own}
    before = read_files(own) | read_files(second)
    deleted = {item.name for item in delete_garbage(locate(project.train), 7 * 86_400, print)}
    assert {first.name, processor.name} <= deleted
    assert (read_files(first).keys(), processor.exists()) == ({"notes.txt"}, False)
    assert read_files(own) | read_files(second) == before


def test_a_machine_without_the_snapshot_fetches_it_once(project: Project) -> None:
    cache = project.switch_machine("cache")
    job = plan_streams(open_recipe(project.recipe), Options())[0].job
    assert fetch_tokenizer(job) is job.tokenizer
    publish_pretrained([job])
    shutil.rmtree(cache / "tokenizers")
    intact = (tokenizer_home(project) / "tokenizer.json").read_bytes()
    for content in (b"{}", b"half of it", b""):
        (tokenizer_home(project) / "tokenizer.json").write_bytes(content)
        with pytest.raises(Unreachable, match="have changed since the tokenizer was published"):
            fetch_tokenizer(job)
        assert not (cache / "tokenizers").exists()
    (tokenizer_home(project) / "tokenizer.json").write_bytes(intact)
    fetched = fetch_tokenizer(job)
    assert Path(fetched.path).is_relative_to(cache)
    assert fetched == replace(job.tokenizer, path=fetched.path)
    # A damaged copy in the cache is fetched again.
    for content in (b"{}", intact[:-1], b"\0" * len(intact)):
        Path(fetched.path).write_bytes(content)
        assert fetch_tokenizer(job) == fetched
        assert Path(fetched.path).read_bytes() == intact
    (tokenizer_home(project) / "tokenizer.json").unlink()
    assert fetch_tokenizer(job) == fetched


def test_a_worker_without_the_cache_uses_the_reference_if_the_run_does(project: Project) -> None:
    """Only the cache of the run's machine has the note that the fast backend differs."""
    job = plan_streams(open_recipe(project.recipe), Options())[0].job
    publish_pretrained([job])
    project.patch.setenv("MDSMIX_CACHE", str(project.folder / "empty"))
    project.patch.setattr(unit, "_backends", {})
    fast = unit.open_tokenizer_backend(job).label
    assert fast.startswith("fastokens")
    job_with_note = replace(job, unequal=fast)
    assert unit.open_tokenizer_backend(job_with_note).label.startswith("tokenizers ")
    assert (job.trusts(fast), job_with_note.trusts(fast)) == (True, False)
    store_difference(job.tokenizer, Unequal("fastokens 1", "text"))
    assert (job.trusts("fastokens 1"), job.trusts("fastokens 2")) == (False, True)


def test_a_stream_cannot_have_the_name_of_a_tokenizer_folder(project: Project) -> None:
    answer = project.configure(streams={"tokenizer-0123abcd": documents("a.jsonl")}).convert()
    assert_refused(
        answer, 2, "streams.tokenizer-0123abcd: this name cannot be used, since it becomes a folder"
    )
    open_recipe(project.configure(streams={"tokenizer-0123abcde": documents("a.jsonl")}).recipe)


def test_no_other_file_secret_or_local_path_is_published(project: Project) -> None:
    folder = shutil.copytree(project.tokenizer, project.folder / "model")
    other_files = {"model.safetensors": "weights", ".env": SECRET, "notes.json": f'"{SECRET}"'}
    for name, text in other_files.items():
        (folder / name).write_text(text)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    project.write_source([{"messages": turns}], "chat.jsonl")
    project.tokenizer = folder
    kwargs = [f"tokenizer.kwargs.token={SECRET}", "tokenizer.kwargs.padding_side=left"]
    project.configure(chats("chat.jsonl"), max_seq_len=64).run(*kwargs)
    published = read_files(tokenizer_home(project))
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert published.keys() <= {CARD, "chat_template.jinja"} | names
    text = b"".join(published.values())
    assert str(project.folder).encode() not in text
    assert SECRET.encode() not in text
