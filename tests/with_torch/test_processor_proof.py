"""A processor is used only where it is equal: what a loader makes of stored rows is what transformers makes of whole conversations."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mdsmix.encode.loaded_processor import LoadedProcessor
from mdsmix.encode.pretrained import open_processor, open_tokenizer
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.kinds.encodings import make_encoding
from mdsmix.kinds.processor_proof import difference
from mdsmix.load import build_loader
from tests.converting import mdsmix, run_recipe, write_jsonl, write_recipe
from tests.pictures import record, stream, write_drawings
from tests.processors import FAMILIES, look_here, made

EQUAL = (*FAMILIES, "llava", "pixtral")
UNEQUAL = {
    "mllama": "of one image MllamaProcessor makes cross_attention_mask",
    "paligemma": "of one image PaliGemmaProcessor makes input_ids",
}
OF_ONE_IMAGE = {
    "idefics2": "of two images side by side Idefics2Processor makes input_ids",
    "llava_onevision": "LlavaOnevisionProcessor makes another number of tokens",
    "lfm2": "of two images side by side Lfm2VlProcessor makes input_ids",
}
"Processors that are equal on rows of one image."


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    look_here(monkeypatch)


def recipe_of(folder: Path, tokenizer: Path, family: str, **images: Any) -> tuple[Path, Path]:
    """A recipe of three records for the family's processor, and that processor."""
    words, processor = made(family, tokenizer, folder)
    names = [f"img/{path.name}" for path in write_drawings(folder / "img", 2, (70, 40))]
    data = write_jsonl(folder / "a.jsonl", [record(names[0]), record(), record(names[1])])
    loader = {"num_workers": 0, "dataset": {"shuffle": False}}
    more = {"max_seq_len": 160, "processor": str(processor), "train_loader": loader}
    streams = {"see": stream(data, images=images)}
    return write_recipe(folder, words, streams=streams, **more), processor


@pytest.mark.parametrize("family", [*EQUAL, *UNEQUAL, *OF_ONE_IMAGE])
def test_a_family_is_equal_or_refused_with_the_row_and_the_key(
    tmp_path: Path, tokenizer_folder: Path, family: str
) -> None:
    if family == "lfm2" and not hasattr(transformers, "Lfm2VlProcessor"):
        pytest.skip("this transformers has none")
    path, processor = recipe_of(tmp_path, tokenizer_folder, family)

    def found(*overrides: str) -> str | None:
        recipe = open_recipe(path, overrides)
        tokenizer = open_tokenizer(recipe.tokenizer)
        encoding = make_encoding(recipe, recipe.streams["see"], tokenizer)
        return difference(processor, encoding, tokenizer, [])

    if sentence := (UNEQUAL | OF_ONE_IMAGE).get(family):
        assert sentence in str(found())
    else:
        assert found() is None
    if family in OF_ONE_IMAGE:
        assert found("streams.see.images.max_images=1") is None


def test_one_that_differs_is_refused_by_convert_doctor_and_check(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe, processor = recipe_of(tmp_path, tokenizer_folder, "idefics2")
    with pytest.raises(RecipeError, match=OF_ONE_IMAGE["idefics2"]) as refusal:
        run_recipe(recipe)
    sentence = str(refusal.value)
    assert str(processor) in sentence
    assert not (tmp_path / "out/see/train/index.json").exists()
    diagnosed = mdsmix("doctor", recipe)
    assert (diagnosed.code, sentence in " ".join(diagnosed.out.split())) == (4, True)
    assert run_recipe(recipe, "processor=null")[0].manifest.records.written == 3
    checked = mdsmix("check", recipe, "--json")
    assert checked.code == 3
    assert "images-processor" in checked.out
    assert OF_ONE_IMAGE["idefics2"] in checked.out


@pytest.mark.parametrize("key", ["input_ids", "token_type_ids", "pixel_values"])
def test_a_difference_in_any_key_is_seen(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    recipe, _ = recipe_of(tmp_path, tokenizer_folder, "gemma3")
    see = LoadedProcessor.see

    def other(self: LoadedProcessor, images: Any) -> Any:
        rows, pixels = see(self, images)
        if key == "pixel_values":
            return rows, pixels | {key: pixels[key] + torch.eye(pixels[key].shape[-1])}
        return [[{**piece, key: piece[key] + 1} for piece in row] for row in rows], pixels

    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    open_processor.cache_clear()
    open_processor(str(tmp_path / "gemma3"))
    monkeypatch.setattr(LoadedProcessor, "see", other)
    with pytest.raises(RecipeError, match=f"of one image Gemma3Processor makes {key}"):
        run_recipe(recipe)


def test_rows_without_the_text_around_an_image_are_not_loaded(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Gemma 3 prints blank lines around an image, which become one token with those that stand there."""
    recipe, processor = recipe_of(tmp_path, tokenizer_folder, "gemma3")
    run_recipe(recipe, "processor=null")
    config = tmp_path / "train.yaml"
    dataset = {"streams": {"see": {"local": str(tmp_path / "out/see"), "split": "train"}}}
    dataset |= {"max_seq_len": 160, "processor": str(processor)}
    loader = {"name": "mdsmix", "dataset": dataset, "num_workers": 0, "drop_last": False}
    words = {"name": str(tmp_path / "gemma3-tokenizer")}
    config.write_text(str({"tokenizer": words, "max_seq_len": 160, "train_loader": loader}))
    with pytest.raises(MixRefused, match="prints text around each image, which its rows lack"):
        build_loader(str(config), 2)
