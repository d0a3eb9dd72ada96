"""With an S3 remote the rendered YAML names no folder of the machine that converted: its tokenizer is fetched from the mix's root."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from mdsmix.encode.published_folders import at_hand, with_tokenizer_fetched
from mdsmix.errors import Unreachable
from mdsmix.load import build_loader
from mdsmix.recipe import TokenizerSpec
from tests.converting import mdsmix, write_jsonl, write_recipe


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, minio: str, bucket: str) -> Path:
    """A converted mix, its tokenizer given as a folder with a keyword of its own."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"one two three {n} " * 9} for n in range(40)])
    source = {"path": str(tmp_path / "a.jsonl"), "text": "text"}
    path = write_recipe(
        tmp_path,
        tokenizer_folder,
        remote=f"s3://{bucket}/mix",
        local=str(tmp_path / "node"),
        streams={"web": {"kind": "pretraining", "source": source}},
        train_loader={"num_workers": 0},
    )
    tree = json.loads(path.read_text())
    tree["tokenizer"]["kwargs"] = {"bos_token": "<|im_start|>"}
    path.write_text(json.dumps(tree))
    assert mdsmix("convert", path).code == 0
    return path


@pytest.fixture
def elsewhere(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The YAML on another machine: it has neither the converting machine's cache nor its tokenizer."""
    rendered = tmp_path / "train.yaml"
    assert mdsmix("render-yaml", recipe, "-o", rendered).code == 0
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "other cache"))
    return rendered


def read(rendered: Path) -> Any:
    return yaml.safe_load(rendered.read_text())


def test_the_yaml_names_a_folder_of_the_node_and_the_line_that_fetches_it(
    elsewhere: Path, tokenizer_folder: Path, tmp_path: Path, bucket: str, minio: str
) -> None:
    text, name = elsewhere.read_text(), read(elsewhere)["tokenizer"]["name"]
    assert str(tokenizer_folder) not in text
    assert Path(name).parent == tmp_path / "node"
    assert read(elsewhere)["tokenizer"]["kwargs"] == {"model_max_length": "${max_seq_len}"}
    (line,) = [line for line in text.splitlines() if "aws s3 cp" in line]
    *command, source, target = shlex.split(line.removeprefix("# mdsmix:"))
    assert command == ["aws", "s3", "cp", "--recursive", "--endpoint-url", minio]
    client = boto3.client("s3", endpoint_url=minio)
    prefix = source.removeprefix(f"s3://{bucket}/")
    for found in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        client.download_file(
            bucket, found["Key"], _made(target + found["Key"].removeprefix(prefix))
        )
    from transformers import AutoTokenizer

    assert target == name
    assert AutoTokenizer.from_pretrained(name).bos_token == "<|im_start|>"


def test_the_terminal_says_the_same_line(recipe: Path, tmp_path: Path) -> None:
    answer = mdsmix("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    (line,) = [line for line in answer.err.splitlines() if "aws s3 cp" in line]
    command = line.partition(": ")[2]
    assert f"# mdsmix:   {command}\n" in (tmp_path / "train.yaml").read_text()
    assert json.loads(mdsmix("render-yaml", recipe, "--json").out)["before_training"] == command


def test_fetch_takes_the_words_of_the_line(
    elsewhere: Path, tmp_path: Path, minio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a variable for the store."""
    (line,) = [line for line in elsewhere.read_text().splitlines() if "aws s3 cp" in line]
    words = shlex.split(line.removeprefix("# mdsmix:"))[4:]
    monkeypatch.delenv("S3_ENDPOINT_URL")
    monkeypatch.setenv("S3_ENDPOINT_URL", "")  # put back at the end
    answer = mdsmix("fetch", *words)
    assert answer.code == 0, answer.err
    name = read(elsewhere)["tokenizer"]["name"]
    assert answer.out.startswith(f"{name}: ")
    assert (Path(name) / "tokenizer.json").is_file()
    assert "error tokenizer" not in mdsmix("check", elsewhere).out


def test_fetch_says_what_is_not_there(bucket: str, minio: str, tmp_path: Path) -> None:
    answer = mdsmix("fetch", f"s3://{bucket}/mix/tokenizer-00000000", tmp_path / "to")
    assert answer.code == 4
    assert "holds no tokenizer and no processor" in answer.err


OWN = "train_loader={name: mdsmix, num_workers: 0}"


@pytest.mark.parametrize("key", [OWN, "mdsmix_on_nodes=true"])
def test_where_mdsmix_is_on_the_nodes_the_yaml_names_the_bucket(
    key: str, recipe: Path, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = tmp_path / "train.yaml"
    answer = mdsmix("render-yaml", recipe, key, "-o", rendered)
    assert answer.code == 0, answer.err
    name = read(rendered)["tokenizer"]["name"]
    assert name.startswith(f"s3://{bucket}/mix/tokenizer-")
    assert "aws s3 cp" not in rendered.read_text() + answer.err
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "other cache"))
    assert "error" not in mdsmix("check", rendered).out
    assert next(iter(build_loader(str(rendered), 2)))["input_ids"].shape == (2, 16)
    config = {"tokenizer": {"name": name, "kwargs": {"a": 1}}, "seed": 7}
    made = with_tokenizer_fetched(config)
    assert Path(made["tokenizer"].pop("name"), "tokenizer.json").is_file()
    assert made == {"tokenizer": {"kwargs": {"a": 1}}, "seed": 7}
    with pytest.raises(Unreachable, match="no tokenizer is published at"):
        with_tokenizer_fetched({"tokenizer": {"name": f"s3://{bucket}/mix/tokenizer-00000000"}})


@pytest.mark.parametrize("name", ["gpt2", "/a/folder", "s3://b/other", None, 7])
def test_any_other_config_is_left_as_it_is(name: Any) -> None:
    """No store is asked: there is none at this name."""
    config = {"tokenizer": {"name": name}}
    assert with_tokenizer_fetched(config) is config
    assert with_tokenizer_fetched({"seed": 1}) == {"seed": 1}


def _made(path: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path


def test_check_and_the_loader_fetch_it_themselves_once(elsewhere: Path, tmp_path: Path) -> None:
    answer = mdsmix("check", elsewhere)
    assert "tokenizer-" not in answer.out.replace(str(tmp_path), "")
    assert "may be mixed" in answer.out
    assert not Path(read(elsewhere)["tokenizer"]["name"]).exists()
    batch = next(iter(build_loader(str(elsewhere), 2)))
    assert batch["input_ids"].shape == (2, 16)
    assert len(list((tmp_path / "other cache/fetched").rglob("mdsmix.tokenizer"))) == 1


def test_a_tokenizer_that_nobody_published_is_a_finding(
    recipe: Path, minio: str, bucket: str
) -> None:
    client = boto3.client("s3", endpoint_url=minio)
    for found in client.list_objects_v2(Bucket=bucket, Prefix="mix/tokenizer-")["Contents"]:
        client.delete_object(Bucket=bucket, Key=found["Key"])
    answer = mdsmix("render-yaml", recipe)
    assert answer.code == 3
    assert "error tokenizer-unpublished: " in answer.err
    assert mdsmix("convert", recipe).code == 0
    assert mdsmix("render-yaml", recipe).code == 0


def test_one_that_is_not_what_was_published_is_refused(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = read(elsewhere)
    name = given["tokenizer"]["name"]
    remote = given["train_loader"]["dataset"]["streams"]["web"]["remote"]
    fetched = Path(at_hand(TokenizerSpec(name=name), [remote]).name)
    copy = tmp_path / "mix" / fetched.name
    shutil.copytree(fetched, copy)
    tree = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(tree | {"normalizer": {"type": "NFC"}}))
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "third cache"))
    with pytest.raises(Unreachable, match="does not hold the tokenizer as it was published"):
        at_hand(TokenizerSpec(name=name), [str(tmp_path / "mix/web")])
    other = TokenizerSpec(name="tokenizer-00000000")
    assert at_hand(other, [str(tmp_path / "mix/web")]) == other


def test_a_hub_name_stays(recipe: Path, tokenizer_folder: Path) -> None:
    recipe.write_text(recipe.read_text().replace(str(tokenizer_folder), "hub/name"))
    answer = mdsmix("render-yaml", recipe)
    assert "  name: hub/name\n" in answer.out
    assert "aws s3 cp" not in answer.out
