"""`mdsmix preview` of converted streams: the whole way from a recipe, for people and for programs."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mdsmix.load import build_loader
from tests.converting import chats, documents, mdsmix, run_recipe, write_jsonl, write_recipe
from tests.corpus import docstrings

CHAT = {"role": "user", "content": "Which \x1b[31mone?"}, {"role": "assistant", "content": "This."}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("previewed")
    docs = write_jsonl(folder / "docs.jsonl", list(docstrings(30)))
    talks = write_jsonl(folder / "chat.jsonl", [{"messages": CHAT}] * 40)
    path = write_recipe(
        folder,
        tokenizer_folder,
        streams={"docs": documents(docs), "chat": chats(talks)},
        max_seq_len=32,
        train_loader={"name": "finetuning", "num_workers": 0, "dataset": {"shuffle": True}},
    )
    run_recipe(path)
    return path


def told(*arguments: object) -> dict[str, Any]:
    answer = mdsmix("preview", *arguments, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


def test_people_see_steps_samples_and_the_epoch(recipe: Path) -> None:
    answer = mdsmix("preview", recipe, "--batch", 8, "--gpus", 2, "--workers", 2, "--ids")
    assert answer.code == 0, answer.err
    assert re.search(r"^  rows_a_step +8$", answer.out, re.MULTILINE)
    assert answer.out.count("step 2: 8 samples drawn") == 1
    assert "⟦This.⟨<|im_end|>⟩" in answer.out
    assert "\x1b" not in answer.out, "nothing in a sample steers a terminal"
    assert "node 0 rank 1 worker 0: " in answer.out
    assert re.search(r"^  chat .* ~[\d,]+ ", answer.out, re.MULTILINE)
    (shard,) = (recipe.parent / "out/chat/train").glob("*.mds")
    moved = shard.rename(shard.with_suffix(".away"))
    answer = mdsmix("preview", recipe, "--batch", 8)
    moved.rename(shard)
    assert (answer.code, len(answer.err.splitlines())) == (4, 1)
    assert shard.name in answer.err


def test_programs_get_the_ids_and_a_state_of_the_loader_goes_on_from_there(
    recipe: Path, tmp_path: Path
) -> None:
    def ids(answer: dict[str, Any]) -> list[list[int]]:
        return [[s["id"] for s in step["ranks"][0]["samples"]] for step in answer["steps"]]

    whole = told(recipe, "--batch", 8, "--steps", 5, "--windows", 3)
    assert [*map(len, ids(whole))] == [8] * 5
    assert sum(row["samples"] for row in whole["epoch"]["rows"]) == 8 * whole["steps_an_epoch"]
    assert len(whole["epoch"]["windows"]) == 3
    rendered = recipe.with_name("train.yaml")
    assert mdsmix("render-yaml", recipe, "-o", rendered).code == 0
    loader = build_loader(rendered, 8)
    for _, _ in zip(range(2), batches := iter(loader), strict=False):
        state = loader.state_dict()
    (tmp_path / "state.json").write_text(json.dumps(state))
    del loader, batches
    gc.collect()
    rest = told(rendered, "--batch", 8, "--steps", 3, "--state", tmp_path / "state.json")
    assert [step["step"] for step in rest["steps"]] == [2, 3, 4]
    assert ids(rest) == ids(whole)[2:]
    assert rest["steps"] == told(rendered, "--batch", 8, "--from-step", 2)["steps"]
    seed, epoch = (told(recipe, "--batch", 8, *more) for more in (("--seed", 5), ("--epoch", 1)))
    assert (seed["shuffle_seed"], epoch["epoch"]["epoch"]) == (5, 1)
    assert ids(whole)[:3] not in (ids(seed), ids(epoch))


def test_a_page_names_its_parts_apart(recipe: Path, tmp_path: Path) -> None:
    """Who listens to a page goes from part to part by their names."""
    few = ("mix.docs.choose=4", "mix.chat.choose=4", "--batch", 8, "--gpus", 1, "-n", 1)
    answer = mdsmix("report", recipe, *few, "-o", tmp_path / "r.html")
    assert answer.code == 0, answer.err
    regions = re.findall(r'role="region"[^>]*aria-label="([^"]+)"|aria-label="([^"]+)"[^>]*role="region"', (tmp_path / "r.html").read_text("utf-8"))  # fmt: skip
    names = ["".join(each) for each in regions]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    assert sum(name.startswith("The first batches, ") for name in names) > 3
