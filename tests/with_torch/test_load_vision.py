"""Batches of images: what the processor makes of a stored row, for three families, and a tiny model that learns from them."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from io import BytesIO
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageOps

from mdsmix.encode import pretrained, transformers_process
from mdsmix.encode.loaded_processor import LoadedProcessor
from mdsmix.encode.pretrained import image_tokens, open_processor
from mdsmix.engines.memory import held
from mdsmix.errors import MixRefused, RecipeError, Unreachable
from mdsmix.load import build_loader
from mdsmix.load.plugin import prepare, rows_of
from mdsmix.load.training_rows import RowImages
from mdsmix.load.vision import decoded, opened
from mdsmix.mix.render import render
from mdsmix.storage import locate
from tests.converting import manifest_of, mdsmix, quarantined, run_recipe, write_jsonl, write_recipe
from tests.pictures import drawing, record, stream, write_drawings
from tests.processors import FAMILIES, IMAGE_TOKEN, look_here, made, tiny_model
from tests.with_torch.load_streams import IDS, config, write_tokens

LENGTH = 160
SIZES = [(30, 40), (200, 120), (57, 333)]
asked = transformers_process.answered


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        look_here(patch)
        yield


@pytest.fixture(scope="session")
def processors(
    tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Family -> folders of tokenizer and processor."""
    home = tmp_path_factory.mktemp("processors")
    return {family: made(family, tokenizer_folder, home) for family in FAMILIES}


def written(folder: Path, of: tuple[Path, Path], records: list[Any], **settings: Any) -> Path:
    data = write_jsonl(folder / "a.jsonl", records)
    loader = {"num_workers": 0, "dataset": {"shuffle": False, **settings.pop("dataset", {})}}
    given = {"max_seq_len": LENGTH, "processor": str(of[1]), "train_loader": loader} | settings
    streams = settings.get("streams", {"see": stream(data)})
    return write_recipe(folder, of[0], **(given | {"streams": streams}))


def rendered(recipe: Path) -> str:
    path = recipe.with_name("train.yaml")
    path.write_text(render(recipe, [], None)[1])
    return str(path)


def unnamed(recipe: Path) -> str:
    """The rendered YAML without the processor's name."""
    tree = yaml.safe_load(Path(rendered(recipe)).read_text())
    del tree["train_loader"]["dataset"]["processor"]
    path = recipe.with_name("unnamed.yaml")
    path.write_text(yaml.safe_dump(tree))
    return str(path)


Published = tuple[tuple[Path, Path], Path, list[Path]]
"The folders of a tokenizer and processor, a recipe, and the images of its rows: one, none, two, one that its EXIF turns."


@pytest.fixture(scope="module")
def published(
    processors: dict[str, tuple[Path, Path]],
    tmp_path_factory: pytest.TempPathFactory,
    _in_this_process: None,
) -> Callable[[str], Published]:
    """Converts the rows for a family, once."""
    exif = Image.Exif()
    exif[0x0112] = 6

    @cache
    def of(family: str) -> Published:
        folders, folder = processors[family], tmp_path_factory.mktemp(family)
        paths = [*write_drawings(folder / "img", 3, (70, 40)), folder / "img/turned.jpg"]
        paths[3].write_bytes(drawing("JPEG", (120, 60), exif=exif))
        names = [str(path.relative_to(folder)) for path in paths]
        records = [record(names[0]), record(), record(*names[1:3]), record(names[3])]
        recipe = written(folder, folders, records, dataset={"dummy_image": True})
        run_recipe(recipe)
        return folders, recipe, paths

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_what_the_processor_makes_of_texts_and_images(
    family: str, published: Callable[[str], Published]
) -> None:
    folders, recipe, paths = published(family)
    loader = build_loader(rendered(recipe), 4)
    (batch,) = loader
    seeing = opened(str(folders[1]))
    texts = [
        seeing.tokenizer.decode(row[mask.bool()])
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    images = [
        [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in of]
        for of in (paths[:1], paths[1:3], paths[3:])
    ]
    token, pictured = IMAGE_TOKEN[family], [0, 2, 3]
    bare = [_bare(texts[row], of, seeing, token) for row, of in zip(pictured, images, strict=True)]
    wanted = seeing.processor(
        text=bare, images=images, padding=True, return_tensors="pt", add_special_tokens=False
    )
    for row, ids, mask in zip(pictured, wanted["input_ids"], wanted["attention_mask"], strict=True):
        found = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        assert torch.equal(found, ids[mask.bool()])
    of_types = {"token_type_ids"} if family == "gemma3" else set()
    for key in wanted.keys() - {"input_ids", "attention_mask", "token_type_ids"} | of_types:
        is_of_tokens = wanted[key].shape == wanted["input_ids"].shape
        shown = batch[key][pictured, : wanted[key].shape[1]] if is_of_tokens else batch[key]
        assert torch.equal(shown, wanted[key]), key
    assert batch.keys() & {"token_type_ids"} == of_types
    trained = batch["labels"] != -100
    assert not trained[batch["input_ids"] == seeing.token_id].any()
    assert trained.any(dim=1).all()
    assert torch.equal(batch["labels"][trained], batch["input_ids"][trained])
    totals = manifest_of(recipe.parent / "out/see/train").totals
    grown = int(batch["attention_mask"].sum()) - totals.tokens
    assert totals.image_tokens - totals.images == grown - 4, "each row gets an EOS"
    assert totals.seen_tokens == int(batch["attention_mask"].sum()) - 4

    # Microbatches are what the loader makes of their rows, but for zeros up to the largest image of the whole batch.
    rows, collate = list(loader.dataset), loader.collate_fn
    alone = replace(collate, vision=replace(collate.vision))
    split = prepare(collate)
    for whole, size in product((rows, [rows[1]] * 2), (1, 2, 3, 4)):
        batch = collate(whole)
        parts = split(batch, size)
        drawn = [whole[n : n + size] for n in range(0, len(whole), size)]
        assert [*map(rows_of, parts)] == [*map(len, drawn)]
        for part, own in zip(parts, map(alone, drawn), strict=True):
            assert part.keys() == own.keys()
            for key, tensor in own.items():
                assert torch.equal(part[key][tuple(map(slice, tensor.shape))], tensor), (size, key)
                assert part[key].abs().sum() == tensor.abs().sum()
    with pytest.raises(RecipeError, match="a whole number of rows"):
        split(batch, 0.5)


def _bare(text: str, images: list[Any], seeing: LoadedProcessor, token: str) -> str:
    """The text with one placeholder for each run of tokens that stand for an image."""
    for image in images:
        (row,), _ = seeing.see([[image]])
        run = seeing.tokenizer.decode(row[0]["input_ids"]).join(seeing.around)
        assert text.count(run)
        text = text.replace(run, "\0", 1)
    return text.replace("\0", token)


def test_a_preview_has_the_lengths_of_the_loaders_rows_and_shows_one_token_an_image(
    published: Callable[[str], Published],
) -> None:
    folders, recipe, _ = published("idefics")
    (batch,) = build_loader(rendered(recipe), 4)
    asked = ("preview", rendered(recipe), "--batch", "4", "--steps", "1", "--samples", "4")
    answer = mdsmix(*asked, "--json")
    assert answer.code == 0, answer.err
    (step,) = json.loads(answer.out)["steps"]
    assert step["streams"][0]["tokens"] == batch["attention_mask"].sum()
    assert step["streams"][0]["trained"] == (batch["labels"][:, 1:] != -100).sum()
    tokens = opened(str(folders[1])).count((40, 70))
    assert step["shown"][0]["images"] == [{"height": 40, "width": 70, "tokens": tokens}]
    assert [len(shown.get("images", [])) for shown in step["shown"]] == [1, 0, 2, 1]
    text = "".join(part["text"] for part in step["shown"][2]["sample"])
    assert text.count("<image>") == 2
    assert f"\nimage 1: height: 40, width: 70, tokens: {tokens}\n" in mdsmix(*asked).out
    short = Path(unnamed(recipe))
    short.write_text(short.read_text().replace(f"max_seq_len: {LENGTH}", "max_seq_len: 30"))
    answer = mdsmix("preview", short, "--batch", "4")
    assert answer.code == 3
    assert re.search(r"Step 0, .*, row 0: its images end at token \d+ of at most 30", answer.err)


def test_a_model_learns_nothing_of_a_masked_image(published: Callable[[str], Published]) -> None:
    """That stands where a batch has none: a loader trains with text alone too."""
    folders, recipe, _ = published("qwen")
    loader, seeing = build_loader(rendered(recipe), 4), opened(str(folders[1]))
    model = tiny_model(len(seeing.tokenizer), seeing)
    row, collate = next(row for row in loader.dataset if not row.pictures), loader.collate_fn
    for side in ("right", "left"):
        ids = replace(collate.rules.ids, padding_side=side)
        rules = replace(collate.rules, ids=ids)
        batch = replace(collate, rules=rules, pad_to_longest=True)([row] * 2)
        is_image = batch["input_ids"] == seeing.token_id
        assert is_image.sum() == batch["image_grid_thw"].prod() // 4
        assert not batch["attention_mask"][is_image].any()
        assert (batch["labels"][is_image] == -100).all()
        assert batch["attention_mask"].sum() == 2 * row.input_ids.size
        batch.pop("sequence_id")
        alone = {k: batch[k] for k in ("labels", "attention_mask")}
        alone["input_ids"] = batch["input_ids"].masked_fill(is_image, 1)
        with torch.no_grad():
            assert float(model(**batch).loss) == pytest.approx(float(model(**alone).loss), abs=1e-4)


def test_records_that_do_not_fit_with_their_images_have_a_reason_and_the_loader_cuts_none(
    tmp_path: Path, processors: dict[str, tuple[Path, Path]]
) -> None:
    (tmp_path / "img").mkdir()
    for name, size in {"56": (56, 56), "224": (224, 224), "wide": (3000, 10)}.items():
        (tmp_path / f"img/{name}.png").write_bytes(drawing("PNG", size))
    small, large, wide = (f"img/{name}.png" for name in ("56", "224", "wide"))
    long = [record(large), record(large, question="What is it? " * 60), record()]
    records = {
        "cut": (long, {"images_too_long": 1, "no_loss_tokens": 1}),
        "filter": (long, {"images_too_long": 1, "too_long": 1}),
        "fit": ([record(small), record(large), record(small, small)], {"images_too_long": 1}),
        "refused": ([record(small), record(small, wide), record()], {}),
    }
    streams = {
        name: stream(
            write_jsonl(tmp_path / f"{name}.jsonl", of), too_long=name if of is long else "cut"
        )
        for name, (of, _) in records.items()
    }
    recipe = written(tmp_path, processors["qwen"], [], max_seq_len=64, streams=streams)
    run_recipe(recipe)
    for name, (_, filtered) in records.items():
        assert manifest_of(tmp_path / "out" / name / "train").records.filtered == filtered, name
    totals = manifest_of(tmp_path / "out/fit/train").totals
    assert (totals.images, totals.image_tokens) == (3, 12)
    (bad,) = quarantined(tmp_path / "out/refused/train")
    assert (bad["reason"], bad["detail"]["image"]) == ("image_refused", wide)
    assert "Qwen2_5_VLProcessor refuses it: absolute aspect ratio" in bad["detail"]["why"]
    config = yaml.safe_load(Path(rendered(recipe)).read_text())
    mixed = config["train_loader"]["dataset"]["streams"]
    config["train_loader"]["dataset"]["streams"] = {"fit": mixed["fit"]}
    (batch,) = build_loader(config, 2)
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4]] * 3
    run_recipe(recipe, "processor=null", "local=blind")
    config["train_loader"]["dataset"]["streams"]["fit"]["local"] = str(tmp_path / "blind/fit")
    named = r"Stream fit, shard .*, row 1: its images end at token .* of at most 64"
    with pytest.raises(MixRefused, match=named):
        list(build_loader(config, 3))


def test_no_token_of_an_image_is_trained_or_counted_as_trained_wherever_it_stands(
    tmp_path: Path, processors: dict[str, tuple[Path, Path]]
) -> None:
    write_drawings(tmp_path / "img")
    drawn = record(question="Draw it.", answer="<image> and <image>.")
    records = [record("img/0.jpg"), drawn | {"image": ["img/1.png"] * 2}, record()]
    policies = {"target_prompts": "all", "target_responses": "all"}
    recipe = written(tmp_path, processors["qwen"], records, **policies)
    run_recipe(recipe)
    (batch,) = build_loader(rendered(recipe), 3)
    manifest = manifest_of(tmp_path / "out/see/train")
    trained = batch["labels"] != -100
    assert not (trained & (batch["input_ids"] == manifest.encoding.images["id"])).any()
    assert manifest.totals.loss_tokens == int(trained[:, 1:].sum())
    answer = mdsmix("mix", recipe, "--out", tmp_path / "drawn")
    assert answer.code == 0, answer.err
    assert manifest_of(tmp_path / "drawn/train").totals == manifest.totals


def test_packing_and_an_image_that_is_not_what_was_stored_are_refused(tmp_path: Path) -> None:
    content = drawing("JPEG", (400, 300))
    image = Image.open(BytesIO(content[: len(content) // 2]))
    pictures = RowImages([image], [[300, 400]], np.zeros(1, np.int64), "row 3")
    with pytest.raises(MixRefused, match=r"row 3: image 0 does not decode \(image file is trunc"):
        decoded(pictures, 0)
    web = {"local": str(write_tokens(tmp_path, 4))}
    for keys in ({"packing_ratio": 2}, {"decoder_only_format": False}):
        # Before the processor is opened, which is not there.
        made = config({"web": web}, "mdsmix", processor="none", **keys)
        with pytest.raises(RecipeError, match="in rows of their own alone"):
            build_loader(made, 1, ids=IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_counted_as_it_is_made_or_refused(
    family: str, processors: dict[str, tuple[Path, Path]]
) -> None:
    """What the functions of LLaVA-NeXT and Idefics3 say of images 1 or 3 high is not what they then do."""
    seeing = opened(str(processors[family][1]))
    assert seeing.has_function == (family != "gemma3"), "Gemma 3 counts no token around an image"
    assert seeing.token == IMAGE_TOKEN[family]
    for size in [*SIZES, (1, 1), (3, 7), (4, 799), (10, 3000)]:
        if isinstance(told := seeing.count(size), int):
            assert told == seeing.learned(size)
        else:
            assert "refuses it: " in told
            assert min(size) < 28


def test_a_run_has_one_process_that_counts_and_what_it_says_is_kept(
    processors: dict[str, tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(open_processor.cache_clear)  # what it knows lies in a folder of this test
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers_process, "answered", asked)
    open_processor.cache_clear()
    folder = str(processors["qwen"][1])
    told = dict(zip(SIZES, map(opened(folder).count, SIZES), strict=True))
    with transformers_process.shared():
        card = open_processor(folder)
        with ThreadPoolExecutor(3) as workers:
            each = list(workers.map(lambda size: image_tokens(card.hash, [size]), SIZES))
        assert each == [{size: told[size]} for size in SIZES]
        (pid,) = transformers_process.processes()
        assert 100 << 20 < held(pid) < transformers_process.BYTES * 1.2
        assert image_tokens(card.hash, SIZES) == told
        said = image_tokens(card.hash, [(10, 3000), SIZES[0]])
        assert said[SIZES[0]] == told[SIZES[0]]
        assert "refuses it: absolute aspect ratio" in str(said[10, 3000]), "the others are told"
        (kept,) = (tmp_path / "processors").glob("*.counts")
        assert [10, 3000] not in [size for *size, _ in json.loads(kept.read_text())]
    assert transformers_process.processes() == []
    monkeypatch.setattr(transformers_process.sys, "executable", "false")
    monkeypatch.setattr(pretrained, "_known", {})
    assert image_tokens(card.hash, SIZES) == told, "they are kept"
    with transformers_process.shared(), pytest.raises(Unreachable, match="has ended, most likely"):
        image_tokens(card.hash, [(1000, 1000)])


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(one, other, strict=True)
    )


def test_a_loader_finds_the_processor_beside_the_streams_and_nothing_but_what_was_published(
    tmp_path: Path, processors: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"img/{path.name}" for path in write_drawings(tmp_path / "img", 2, (70, 40))]
    words, folder = (shutil.copytree(of, tmp_path / of.name) for of in processors["llava_next"])
    recipe = written(tmp_path, (words, folder), [record(name) for name in names] + [record()])
    run_recipe(recipe)
    named = list(build_loader(rendered(recipe), 3))
    path = unnamed(recipe)
    (home,) = (tmp_path / "out").glob("processor-*")
    assert str(tmp_path).encode() not in b"".join(f.read_bytes() for f in home.iterdir())
    before = {file: file.stat() for file in home.iterdir()}
    run_recipe(recipe, "streams.see.images={max_images: 5}")
    assert {file: file.stat() for file in home.iterdir()} == before, "nothing written"
    shutil.rmtree(folder)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "another"))
    assert same(list(build_loader(path, 3)), named)
    assert mdsmix("check", path).code == 0
    with monkeypatch.context() as patched:
        patched.setattr(LoadedProcessor, "digest", property(lambda _: "0" * 32))
        with pytest.raises(MixRefused, match=r"makes another of it \(00000000\): install the"):
            build_loader(path, 3)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "third"))
    (home / "tokenizer.json").write_text("{}")
    with pytest.raises(Unreachable, match="does not hold the processor as it was published"):
        build_loader(path, 3)
    (home / "mdsmix.processor").unlink()
    with pytest.raises(MixRefused, match="no processor turns them into what a model sees"):
        list(build_loader(path, 3))
    assert "name the processor" in mdsmix("preview", path, "--batch", "3").err


def test_the_processor_is_fetched_from_a_store_and_goes_when_no_stream_names_it(
    tmp_path: Path,
    processors: dict[str, tuple[Path, Path]],
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"img/{path.name}" for path in write_drawings(tmp_path / "img", 2, (70, 40))]
    at = {"remote": f"s3://{bucket}/mix", "local": str(tmp_path / "node")}
    recipe = written(tmp_path, processors["qwen"], [record(name) for name in names], **at)
    run_recipe(recipe)
    path = rendered(recipe)
    root = locate(at["remote"])
    (home,) = [name for name in root.folders() if name.startswith("processor-")]
    assert f"processor: {tmp_path}/node/{home}" in Path(path).read_text()
    assert mdsmix("check", recipe).code == 0
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "another"))
    (found,) = list(build_loader(path, 2))
    assert found["pixel_values"].shape[0] == found["image_grid_thw"].prod(dim=1).sum()
    for name, _ in (root / home).list(recursive=True):
        (root / home / name).delete()
    answer = mdsmix("check", path)
    assert answer.code == 3
    assert "(not to be found here)" in answer.out


def test_an_epoch_of_images_goes_on_where_it_was(published: Callable[[str], Published]) -> None:
    config = yaml.safe_load(Path(rendered(published("qwen")[1])).read_text())
    config["train_loader"]["dataset"]["shuffle"] = True
    whole = list(build_loader(config, 1))
    stopped = build_loader(config, 1)
    before = list(islice(stopped, 2))
    resumed = build_loader(config, 1)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert same(before + list(resumed), whole)
    assert len({tuple(batch["input_ids"][0].tolist()) for batch in whole}) == 4
