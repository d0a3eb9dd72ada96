"""A credential of the environment reaches no manifest, no YAML, no message: a recipe that holds one is refused.

Other variables are a fine place for a bucket's or a folder's name.
"""

from typing import Any

import pytest

from mdsmix.errors import RecipeError
from mdsmix.recipe import load_recipe
from tests.abuse.conftest import Arena
from tests.converting import documents, write_jsonl

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
ASKED = "${oc.env:AWS_SECRET_ACCESS_KEY}"
PLACES: dict[str, dict[str, Any]] = {
    "local": {"local": f"out/{ASKED}"},
    "a stream's name": {"streams": {SECRET: {"remote": "s3://b/x"}}},
    "a source": {"streams": {"web": documents(f"data/{ASKED}.jsonl")}},
    "a loader key": {"train_loader": {"name": "text", "dataset": {"note": ASKED}}},
    "an unknown key": {"note": ASKED},
    "a weight": {"mix": {"web": {"repeat": ASKED}}},
    "a number": {"max_seq_len": ASKED},
    "the tokenizer's token": {"tokenizer": {"name": "org/name", "kwargs": {"token": ASKED}}},
    "through another": {"local": "${oc.env:${oc.env:NAME_OF_IT}}"},
    "with spaces": {"local": "out/${ oc.env : AWS_SECRET_ACCESS_KEY }"},
    "with a default": {"local": "${oc.env:AWS_SECRET_ACCESS_KEY,none}"},
    "decoded": {"max_seq_len": f"${{oc.decode:{ASKED}}}"},
    "written out": {"local": SECRET},
}
SHORT = ("HF_TOKEN", "WANDB_API_KEY", "MINIO_ROOT_PASSWORD", "azure_secret", "R2_ACCESS_KEY")
"Known by their names, whatever they hold."


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("NAME_OF_IT", "AWS_SECRET_ACCESS_KEY")
    for name in SHORT:
        monkeypatch.setenv(name, "short")


def test_a_credential_is_refused_by_its_name(arena: Arena) -> None:
    streams = {"web": documents("a.jsonl")}
    named = {name: {"local": f"out/${{oc.env:{name}}}"} for name in SHORT}
    for place, settings in (PLACES | named).items():
        recipe = arena.recipe(**{"streams": streams, "tokenizer": {"name": "x"}} | settings)
        with pytest.raises(RecipeError) as refusal:
            load_recipe(recipe)
        name = place if place in SHORT else "AWS_SECRET_ACCESS_KEY"
        assert f"{name}, a credential" in str(refusal.value), place
        assert SECRET not in str(refusal.value), place


def test_every_command_refuses_it_and_on_the_command_line_too(arena: Arena) -> None:
    recipe = arena.recipe(streams={"web": documents("a.jsonl")}, local=f"out/{ASKED}")
    for command in ("convert", "check", "render-yaml"):
        assert "AWS_SECRET_ACCESS_KEY, a credential" in arena.refused(command, recipe)
    recipe = arena.recipe(streams={"web": documents("a.jsonl")})
    for local in (ASKED, f"out/{SECRET}"):
        assert "a credential" in arena.refused("convert", recipe, f"local={local}")


def test_a_folder_may_come_from_the_environment(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIX_FOLDER", str(arena.out))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    source = write_jsonl(arena.home / "a.jsonl", [{"text": "one two three four five " * 9}] * 9)
    recipe = arena.recipe(streams={"web": documents(source)}, local="${oc.env:MIX_FOLDER}")
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    assert (arena.out / "web" / "train" / "index.json").exists()
