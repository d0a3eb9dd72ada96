"""Folders in the form that transformers 5 saves open to the same processor and tokenizer as in the
form of transformers 4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.processor.loaded import LoadedProcessor
from mdsmix.tokenizer.describe import describe_tokenizer
from mdsmix.tokenizer.transformers_five import open_readable_folder
from tests.processors import FAMILIES

Folders = dict[str, tuple[Path, Path]]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.exists() else {}


def convert_to_five(old: Path, new: Path) -> Path:
    """Rewrite the folder as transformers 5.24 would save it. Written by hand, after the files that
    it saved.
    """
    shutil.copytree(old, new)
    processor = _read(new / "processor_config.json")
    files = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
    for section, file in files.items():
        path = new / file
        if settings := _read(path):
            processor["processor_class"] = settings.pop("processor_class")
            processor[f"{section}_processor"] = settings
            path.unlink()
    if processor:
        (new / "processor_config.json").write_text(json.dumps(processor))
    tokenizer = _read(new / "tokenizer_config.json")
    named = tokenizer.pop("extra_special_tokens", {})
    tokenizer |= {key: tokenizer[key] for key in named if key in tokenizer}
    tokenizer["backend"] = "tokenizers"
    tokenizer["model_specific_special_tokens"] = named
    tokenizer["extra_special_tokens"] = tokenizer.pop("additional_special_tokens", [])
    tokenizer.pop("added_tokens_decoder", None)
    if tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast":
        tokenizer["tokenizer_class"] = "TokenizersBackend"
    else:
        del tokenizer["extra_special_tokens"]
    (new / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for file in ("special_tokens_map.json", "added_tokens.json"):
        (new / file).unlink(missing_ok=True)
    return new


@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_in_the_form_of_transformers_5_is_the_same(
    family: str, tmp_path: Path, processors: Folders
) -> None:
    _, folder = processors[family]
    new = convert_to_five(folder, tmp_path / "five")
    assert not (new / "preprocessor_config.json").exists()
    before = {path.name for path in new.iterdir()}
    old, five = LoadedProcessor(str(folder)), LoadedProcessor(str(new))
    assert (five.digest, five.token_id, five.around) == (old.digest, old.token_id, old.around)
    assert five.count_by_trying((100, 333)) == old.count_by_trying((100, 333))
    saved = five.card()["files"]
    assert "preprocessor_config.json" in saved, "so that a loader opens it by any transformers 4"
    own = json.loads(saved.get("processor_config.json", "{}"))
    assert not {"image_processor", "video_processor"} & own.keys(), "4.51 takes it for an argument"
    assert {path.name for path in new.iterdir()} == before, "the user's folder stays as it is"
    if not (folder / "preprocessor_config.json").exists():  # made by transformers 5
        return
    with open_readable_folder(str(new)) as copy:
        settings = _read(Path(copy.name) / "preprocessor_config.json")
        assert settings == _read(folder / "preprocessor_config.json")


def test_a_tokenizer_is_the_same_and_other_names_stay(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    new = convert_to_five(tokenizer_folder, tmp_path / "five")
    assert _read(new / "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    old, five = describe_tokenizer(str(tokenizer_folder), {}), describe_tokenizer(str(new), {})
    assert five["hash"] == old["hash"]
    assert {key: five[key] for key in five.keys() - {"files", "read_as"}} == {
        key: old[key] for key in old.keys() - {"files", "read_as"}
    }
    for name in (str(tokenizer_folder), "some/hub-name"):
        with open_readable_folder(name) as same:
            assert same == (name, "")
