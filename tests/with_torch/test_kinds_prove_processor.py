"""A processor is used only if it is proved equal: the batch that a loader makes of stored rows is
the batch that transformers makes of whole conversations.

One process counts the tokens of images for a run, and a loader finds the published processor.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mdsmix.engines.memory import measure_pss
from mdsmix.errors import MdsmixError, MixRefused, RecipeError, Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.prove_processor import find_difference
from mdsmix.load import build_loader
from mdsmix.load.vision import load_processor
from mdsmix.processor import counts, server
from mdsmix.processor.card import open_processor
from mdsmix.processor.counts import count_image_tokens
from mdsmix.processor.loaded import LoadedProcessor
from mdsmix.storage import locate
from mdsmix.tokenizer.card import open_tokenizer
from tests.converting import mdsmix, run_ok, run_recipe
from tests.pictures import record, write_drawings
from tests.processors import FAMILIES, IMAGE_TOKEN, write_processor
from tests.versions import IS_TRANSFORMERS_4
from tests.with_torch.load_streams import loaded
from tests.with_torch.seeing import LENGTH, Folders, rendered, unnamed, written

EQUAL = (*FAMILIES, "llava", "pixtral")
UNEQUAL = {
    "mllama": "for one image, MllamaProcessor makes other cross_attention_mask",
    "paligemma": "for one image, PaliGemmaProcessor makes other input_ids",
    "idefics2": "for two images side by side, Idefics2Processor makes other input_ids",
    "llava_onevision": "pixels, but its count for this size is",
    "lfm2": "for two images side by side, Lfm2VlProcessor makes input_ids by a rule",
}
OF_ONE_IMAGE = ("idefics2", "llava_onevision", "lfm2")
if not IS_TRANSFORMERS_4:
    del UNEQUAL["lfm2"]
    OF_ONE_IMAGE = ("llava_onevision", "lfm2")
"Processors that are equal on rows of one image."


def write_recipe_of(folder: Path, pretrained: tuple[Path, Path], **settings: Any) -> Path:
    """Write a recipe with two drawings and a text for a tokenizer and a processor."""
    paths = write_drawings(folder / "img", 2, (70, 40))
    records = [record(f"img/{path.name}") for path in paths] + [record()]
    return written(folder, pretrained, records, **settings)


asked = server.try_to_ask
pytestmark = pytest.mark.usefixtures("_looks_here")


@pytest.mark.parametrize("family", [*EQUAL, *UNEQUAL])
def test_a_processor_is_equal_or_refused(
    tmp_path: Path, tokenizer_folder: Path, family: str
) -> None:
    """The refusal names the row and the key that differs."""
    if family == "lfm2" and not hasattr(transformers, "Lfm2VlProcessor"):
        pytest.skip("this transformers has none")
    pretrained = write_processor(family, tokenizer_folder, tmp_path)
    path = write_recipe_of(tmp_path, pretrained)

    def find(*overrides: str) -> str | None:
        recipe = open_recipe(path, overrides)
        tokenizer = open_tokenizer(recipe.tokenizer)
        encoding = resolve_stream(recipe, recipe.streams["see"], tokenizer).encoding
        return find_difference(pretrained[1], encoding, tokenizer, [])

    if family == "paligemma" and not IS_TRANSFORMERS_4:
        with pytest.raises(MdsmixError, match="replaces neither a boi_token nor an image_token"):
            find()
        return
    assert UNEQUAL.get(family, "None") in str(find())
    if family in OF_ONE_IMAGE:
        assert find("streams.see.images.max_images=1") is None


def test_every_command_refuses_a_processor_that_differs(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    pretrained = write_processor("idefics2", tokenizer_folder, tmp_path)
    recipe = write_recipe_of(tmp_path, pretrained)
    with pytest.raises(RecipeError, match=UNEQUAL["idefics2"]) as refusal:
        run_recipe(recipe)
    sentence = str(refusal.value)
    assert str(pretrained[1]) in sentence
    assert not (tmp_path / "out/see/train/index.json").exists()
    diagnosed = mdsmix("doctor", recipe)
    assert (diagnosed.code, sentence in " ".join(diagnosed.out.split())) == (4, True)
    assert run_recipe(recipe, "processor=null")[0].manifest.records.written == 3
    checked = mdsmix("check", recipe, "--json")
    assert (checked.code, "images-processor" in checked.out) == (3, True)
    assert UNEQUAL["idefics2"] in checked.out


@pytest.mark.parametrize("key", ["input_ids", "token_type_ids", "pixel_values"])
def test_a_difference_in_any_key_is_found(
    tmp_path: Path, processors: Folders, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    recipe, see = write_recipe_of(tmp_path, processors["gemma3"]), LoadedProcessor.process_images

    def other(self: LoadedProcessor, images: Any) -> Any:
        rows, pixels = see(self, images)
        if key == "pixel_values":
            return rows, pixels | {key: pixels[key] + torch.eye(pixels[key].shape[-1])}
        return [[{**piece, key: piece[key] + 1} for piece in row] for row in rows], pixels

    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    open_processor.cache_clear()
    open_processor(str(processors["gemma3"][1]))
    monkeypatch.setattr(LoadedProcessor, "process_images", other)
    with pytest.raises(RecipeError, match=f"for one image, Gemma3Processor makes other {key}"):
        run_recipe(recipe)


def test_rows_without_the_text_around_images_are_refused(
    tmp_path: Path, processors: Folders
) -> None:
    """Gemma 3 prints blank lines around an image, which merge with those next to them."""
    run_recipe(write_recipe_of(tmp_path, processors["gemma3"]), "processor=null")
    processor = str(processors["gemma3"][1])
    streams = {"see": {"local": str(tmp_path / "out/see"), "split": "train"}}
    with pytest.raises(MixRefused, match="so its rows lack the text that"):
        loaded(streams, 2, "mdsmix", max_seq_len=LENGTH, processor=processor)


SIZES = [(30, 40), (200, 120), (57, 333)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_of_an_image_equals_its_tokens_or_it_is_refused(
    family: str, processors: Folders
) -> None:
    """The counting functions of LLaVA-NeXT and Idefics3 are wrong for images with a height of 1 or
    3.
    """
    seeing = load_processor(str(processors[family][1]))
    assert seeing.has_function == (family != "gemma3"), "Gemma 3 counts no token around an image"
    assert seeing.token == IMAGE_TOKEN[family]
    for size in [*SIZES, (1, 1), (3, 7), (4, 799), (10, 3000)]:
        if isinstance(count := seeing.count(size), int):
            assert count == seeing.count_by_trying(size)
        else:
            assert "refuses it" in count
            assert min(size) < 28


def test_a_run_has_one_counting_process_and_its_counts_are_kept(
    processors: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    monkeypatch.setattr(server, "try_to_ask", asked)
    open_processor.cache_clear()
    folder = str(processors["qwen"][1])
    expected = dict(zip(SIZES, map(load_processor(folder).count, SIZES), strict=True))
    with server.share_server(), server.share_server():
        card = open_processor(folder)
        with ThreadPoolExecutor(3) as workers:
            counts_of_workers = list(
                workers.map(lambda size: count_image_tokens(card.hash, [size]), SIZES)
            )
        assert counts_of_workers == [{size: expected[size]} for size in SIZES]
        (pid,) = server.list_server_pids()
        assert 100 << 20 < measure_pss(pid) < server.SERVER_BYTES * 1.2
        assert count_image_tokens(card.hash, SIZES) == expected
        answers = count_image_tokens(card.hash, [(10, 3000), SIZES[0]])
        assert answers[SIZES[0]] == expected[SIZES[0]]
        assert "refuses it: absolute aspect ratio" in str(answers[10, 3000]), "the others are told"
        (stored,) = (tmp_path / "processors").glob("*.counts")
        assert [10, 3000] not in [size for *size, _ in json.loads(stored.read_text())]
        with pytest.raises(MdsmixError, match="the processor fails"):
            server.ask_processor(Path(folder), {"sizes": 1})
    assert server.list_server_pids() == []
    with pytest.raises(ProcessLookupError):  # it ends with the run
        os.kill(pid, 0)
    monkeypatch.setattr(server.sys, "executable", "false")
    monkeypatch.setattr(counts, "_counts", {})
    assert count_image_tokens(card.hash, SIZES) == expected, "they are kept"
    with server.share_server(), pytest.raises(Unreachable, match="has ended, most likely"):
        count_image_tokens(card.hash, [(1000, 1000)])
    open_processor.cache_clear()  # what it knows lies in a folder of this test


def test_a_loader_finds_the_published_processor_next_to_the_streams(
    tmp_path: Path, processors: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, folder = (shutil.copytree(of, tmp_path / of.name) for of in processors["llava_next"])
    recipe = write_recipe_of(tmp_path, (words, folder))
    run_recipe(recipe)
    (named,) = build_loader(rendered(recipe), 3)
    path = unnamed(recipe)
    (home,) = (tmp_path / "out").glob("processor-*")
    assert str(tmp_path).encode() not in b"".join(f.read_bytes() for f in home.iterdir())
    before = {file: file.stat() for file in home.iterdir()}
    run_recipe(recipe, "streams.see.images={max_images: 5}")
    assert {file: file.stat() for file in home.iterdir()} == before, "nothing written"
    shutil.rmtree(folder)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "another"))
    (batch,) = build_loader(path, 3)
    assert batch.keys() == named.keys()
    assert all(torch.equal(batch[key], named[key]) for key in named)
    run_ok("check", path)
    with monkeypatch.context() as patched:
        patched.setattr(LoadedProcessor, "digest", property(lambda _: "0" * 32))
        with pytest.raises(
            MixRefused, match=r"makes a processor whose hash begins with 00000000: install the"
        ):
            build_loader(path, 3)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "third"))
    (home / "tokenizer.json").write_text("{}")
    with pytest.raises(Unreachable, match="have changed since the processor was published"):
        build_loader(path, 3)
    (home / "mdsmix.processor").unlink()
    with pytest.raises(MixRefused, match="this row has images, but the loader has no processor"):
        list(build_loader(path, 3))
    assert (
        "the processor of see is unknown"
        in mdsmix("preview", path, "--gpus", "1", "--batch", "3").err
    )


def test_the_processor_is_fetched_from_a_store(
    tmp_path: Path, processors: Folders, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"remote": f"s3://{bucket}/mix", "local": str(tmp_path / "node")}
    recipe = write_recipe_of(tmp_path, processors["qwen"], **places)
    run_recipe(recipe)
    path, root = rendered(recipe), locate(places["remote"])
    (home,) = [name for name in root.folders() if name.startswith("processor-")]
    assert f"processor: {tmp_path}/node/{home}" in Path(path).read_text()
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "another"))
    (batch,) = build_loader(path, 3)
    assert batch["pixel_values"].shape[0] == batch["image_grid_thw"].prod(dim=1).sum()
    for name, _ in (root / home).list(recursive=True):
        (root / home / name).delete()
    answer = mdsmix("check", path)
    assert (answer.code, "(not found here)" in answer.out) == (3, True)
