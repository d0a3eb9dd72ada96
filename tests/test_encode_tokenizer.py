"""The snapshot holds what AutoTokenizer would do; it is taken once, and again when anything that shapes ids changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.encode import tokenizer as module
from mdsmix.encode.snapshot import take
from mdsmix.encode.tokenizer import Tokenizer, find_decoder, open_tokenizer
from mdsmix.errors import Unreachable
from mdsmix.recipe import TokenizerSpec
from tests.styles import train_style


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokenizers of which a snapshot was taken: here, since a process for each would take seconds to start."""
    names = []

    def take_here(spec: TokenizerSpec) -> dict[str, Any]:
        names.append(spec.name)
        return take(spec.name, dict(spec.kwargs))

    monkeypatch.setattr(module, "_ask", take_here)
    return names


def opened(name: object, **kwargs: Any) -> Tokenizer:
    return open_tokenizer(TokenizerSpec(name=str(name), kwargs=kwargs))


def test_a_snapshot_is_taken_once_for_each_content(
    tokenizer_folder: Path, tmp_path: Path, cache: Path, asked: list[str]
) -> None:
    first = opened(tokenizer_folder)
    assert (first.eos_id, first.pad_id, first.bos_id) == (0, 1, None)
    assert (first.prefix_ids, first.suffix_ids, first.dtype) == ([], [], "uint16")
    assert first.chat_template is not None
    assert first.vocab_size == 2000
    assert opened(tokenizer_folder) == first
    assert asked == [str(tokenizer_folder)]

    shutil.copytree(tokenizer_folder, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"weights shape no token")
    copy = opened(tmp_path / "copy")
    assert (copy.hash, len(asked)) == (first.hash, 2)

    tree = json.loads((tmp_path / "copy" / "tokenizer.json").read_text())
    tree["model"]["merges"].pop()
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(tree))
    assert opened(tmp_path / "copy").hash != first.hash


def test_keyword_arguments_are_the_tokenizers(
    tokenizer_folder: Path, cache: Path, asked: list[str]
) -> None:
    changed = opened(tokenizer_folder, eos_token="<|im_end|>", padding_side="left")
    assert (changed.eos_id, changed.padding_side) == (3, "left")
    assert changed.hash != opened(tokenizer_folder).hash


def test_what_a_tokenizer_adds_by_itself_is_read_off(
    tmp_path: Path, cache: Path, asked: list[str]
) -> None:
    both = opened(train_style(tmp_path / "t", "adds_both"))
    assert (both.prefix_ids, both.suffix_ids, both.bos_id, both.eos_id) == ([0], [1], 0, 1)


def test_a_moved_cache_still_decodes(
    tokenizer_folder: Path, cache: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(tokenizer_folder)
    cache.rename(cache.with_name("moved"))
    monkeypatch.setenv("MDSMIX_CACHE", str(cache.with_name("moved")))
    after = opened(tokenizer_folder)
    assert len(asked) == 1
    assert Path(after.path).exists()
    assert after.hash == before.hash
    decode = find_decoder(None, before.hash)
    assert decode is not None
    assert decode([2, 3]) == "<|im_start|><|im_end|>"


def test_a_hash_that_no_snapshot_has_decodes_nothing(cache: Path) -> None:
    assert find_decoder(None, "0" * 32) is None
    assert find_decoder(None, None) is None


def test_what_is_no_tokenizer_is_one_sentence(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(Unreachable) as caught:
        opened(tmp_path / "folder")
    sentence = str(caught.value)
    assert str(tmp_path / "folder") in sentence
    assert "could not be loaded" in sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert not list(cache.glob("tokenizers/*/card.json"))


def test_code_that_a_tokenizer_brings_is_not_run(
    tmp_path: Path, cache: Path, tokenizer_folder: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(tokenizer_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | own))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(Unreachable, match="contains custom code"):
        opened(folder)
    assert not (tmp_path / "ran").exists()


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDSMIX_CACHE", "/one")
    assert module.cache_folder() == Path("/one")
    monkeypatch.delenv("MDSMIX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert module.cache_folder() == Path("/two/mdsmix")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert module.cache_folder() == Path(os.environ["HOME"]) / ".cache" / "mdsmix"
