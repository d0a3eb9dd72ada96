"""Streams of images: what is stored of a record, from every shape, and that a bad image is a bad record."""

from __future__ import annotations

import base64
import struct
import warnings
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash

from mdsmix.images import reader
from mdsmix.kinds.pictured import _frames
from mdsmix.record import Conversation, canonical
from mdsmix.shapes import SHAPES as SHAPES_OF
from mdsmix.shapes.image_parts import images_of, with_images
from mdsmix.shards.codecs import codec_of
from mdsmix.shards.index import read_index
from mdsmix.shards.shard_samples import columns_of, read_whole
from mdsmix.storage import locate
from tests.converting import (
    manifest_of,
    mdsmix,
    run_recipe,
    samples,
    write_jsonl,
    write_recipe,
)
from tests.corpus import CHATML
from tests.pictures import (
    LLAVA,
    TOKEN,
    drawing,
    record,
    seeing_tokenizer,
    stream,
    write_drawings,
)


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "tokenizer"
    return seeing_tokenizer(tokenizer_folder, folder)


def convert(folder: Path, tokenizer: Path, records: list[Any], **settings: Any) -> Path:
    path = write_jsonl(folder / "a.jsonl", records)
    settings = {"shape": "llava", **settings}
    recipe = write_recipe(
        folder,
        tokenizer,
        max_seq_len=400,
        compression="zstd",
        streams={"see": stream(path, **settings)},
    )
    run_recipe(recipe)
    return folder / "out/see/train"


def text_of(sample: Any, tokenizer: Path) -> str:
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = [t for turn in sample["turns"] for t in (*turn["input_ids"], *turn["labels"])]
    return str(model.decode(ids, skip_special_tokens=False))


def sizes_of_column(out: Path) -> list[int]:
    """Bytes of the column `images` of each row."""
    folder = locate(str(out))
    (shard,) = read_index(folder).shards
    assert shard.compression is None
    return next(
        cells.lengths.tolist()
        for name, cells in columns_of(shard, read_whole(folder, shard))
        if name == "images"
    )


def test_the_bytes_of_every_image_are_stored_as_they_are(tmp_path: Path, seeing: Path) -> None:
    paths = write_drawings(tmp_path / "img")
    names = [f"img/{path.name}" for path in paths]
    out = convert(tmp_path, seeing, [record(names[0]), record(), record(*names)])
    found = samples(out)
    assert [sample["images"] for sample in found] == [
        [paths[0].read_bytes()],
        [],
        [path.read_bytes() for path in paths],
    ]
    assert [sample["sizes"] for sample in found] == [[[30, 40]], [], [[30, 40]] * 3]
    assert [text_of(sample, seeing).count(TOKEN) for sample in found] == [1, 0, 3]
    assert text_of(found[0], seeing) == (
        f"<|im_start|>user\n<|vision_start|>{TOKEN}<|vision_end|>\nWhat is it?<|im_end|>\n<|im_start|>assistant\nA drawing.<|im_end|>\n"
    )
    totals = manifest_of(out).totals
    assert (totals.samples, totals.images) == (3, 4)
    assert totals.image_bytes == sum(len(path.read_bytes()) for path in [paths[0], *paths])
    for sample, column in zip(found, sizes_of_column(out), strict=True):
        files = sum(map(len, sample["images"]))
        assert column - files <= 16 * max(1, len(sample["images"]))


def test_a_recipe_without_an_image_token_is_told_of_it(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_drawings(tmp_path / "img")
    path = write_jsonl(tmp_path / "a.jsonl", [record("img/0.jpg")])
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"see": stream(path)})
    answer = mdsmix("convert", recipe)
    assert answer.code == 2
    assert "declares no image_token" in answer.err


@pytest.mark.parametrize(
    ("shape", "images", "hint"),
    [
        ("qwen_vl", {}, "shape: llava reads <image>"),
        ("openai", {}, "the other shapes read the parts of messages"),
        ("openai", None, "images: {} in the stream reads them"),
        ("alpaca", None, "shape: qwen_vl reads the image whose path stands between <img> and"),
    ],
)
def test_a_placeholder_that_is_text_is_told_with_what_would_read_it(
    tmp_path: Path, seeing: Path, shape: str, images: Any, hint: str
) -> None:
    parts = [{"type": "text", "text": "<image>"}, {"type": "image_url", "image_url": URI}]
    talk = {"messages": [user("<image>" if images is None else parts), ANSWER]}
    if shape == "qwen_vl":
        talk = {"input": "<image>?", "output": "A drawing."}
    if shape == "alpaca":
        talk = {"instruction": "<img>a.jpg</img>?", "output": "A drawing."}
    recipe = write_recipe(
        tmp_path,
        seeing,
        max_seq_len=400,
        streams={"see": stream(write_jsonl(tmp_path / "a.jsonl", [talk]), shape, images=images)},
    )
    told = mdsmix("convert", recipe).out
    mark = "</img>" if shape == "alpaca" else "<image>"
    assert f"WARNING: {mark} of 1 record is trained as text" in told
    assert hint in told


def test_a_template_that_takes_parts_alone_is_given_parts_of_every_message(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_drawings(tmp_path / "img")
    tokenizer = seeing_tokenizer(
        tokenizer_folder, tmp_path / "t", ["<image>"], LLAVA, {"image_token": "<image>"}
    )
    out = convert(tmp_path, tokenizer, [record("img/0.jpg"), record()])
    assert [text_of(sample, tokenizer) for sample in samples(out)] == [
        "USER: <image>\n\nWhat is it? ASSISTANT: A drawing. ",
        "USER: What is it? ASSISTANT: A drawing. ",
    ]


def test_a_template_of_texts_is_given_the_token_in_them(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_drawings(tmp_path / "img")
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "t", [TOKEN], CHATML, {})
    out = convert(tmp_path, tokenizer, [record("img/0.jpg")], images={"token": TOKEN})
    (sample,) = samples(out)
    assert text_of(sample, tokenizer).startswith(
        f"<|im_start|>user\n{TOKEN}\nWhat is it?<|im_end|>"
    )
    assert manifest_of(out).encoding.images["token"] == TOKEN


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "A drawing."}
URI = "data:image/png;base64," + base64.b64encode(drawing("PNG")).decode()
LINES = "data:image/png;base64," + base64.encodebytes(drawing("PNG")).decode()
SHAPES: list[tuple[str, dict[str, Any], Any]] = [
    (
        "qwen_vl",
        {
            "conversations": [
                {"from": "user", "value": "Picture 1: <img>img/0.jpg</img>\nWhat?"},
                {"from": "assistant", "value": "A drawing."},
            ]
        },
        ["Picture 1: ", None, "\nWhat?"],
    ),
    (
        "qwen_vl",
        {"input": "<img> img/0.jpg\n</img><img>img/1.png</img>Which?", "output": "Both."},
        [None, None, "Which?"],
    ),
    ("llava", record("img/0.jpg", "img/1.png"), [None, "\n", None, "\nWhat is it?"]),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "a <image> b"},
                {"from": "gpt", "value": "c"},
            ],
            "images": ["img/0.jpg"],
        },
        ["a ", None, " b"],
    ),
    (
        "messages",
        {
            "messages": [user("<image>What?"), ANSWER],
            "images": [{"bytes": None, "path": "img/0.jpg"}],
        },
        [None, "What?"],
    ),
    (
        "messages",
        {
            "messages": [
                user([{"type": "text", "text": "A <image> is"}, {"type": "image", "text": None}]),
                ANSWER,
            ],
            "image": "img/0.jpg",
        },
        ["A <image> is", None],
    ),
    (
        "openai",
        {
            "messages": [
                user(
                    [
                        {"type": "image_url", "image_url": {"url": "img/0.jpg", "detail": "low"}},
                        {"type": "text", "text": "and"},
                        {"type": "image_url", "image_url": URI},
                    ]
                ),
                ANSWER,
            ]
        },
        [None, "and", None],
    ),
    (
        "messages",
        {
            "messages": [user([{"type": "text", "text": "<image>Q", "image": None}]), ANSWER],
            "image": "img/0.jpg",
        },
        [None, "Q"],
    ),
    (
        "llava",
        record("img/0.jpg", "img/1.png") | {"image": '["img/0.jpg", "img/1.png"]'},
        [None, "\n", None, "\nWhat is it?"],
    ),
    (
        "llava",
        record("img/0.jpg", "img/1.png") | {"image": "['img/0.jpg', 'img/1.png']"},
        [None, "\n", None, "\nWhat is it?"],
    ),
    ("llava", record("img/0.jpg") | {"image": LINES}, [None, "\nWhat is it?"]),
    ("llava", record() | {"image": ""}, ["What is it?"]),
    ("llava", record() | {"image": {"bytes": None, "path": None}}, ["What is it?"]),
    ("llava", record("img/0.jpg") | {"images": ""}, [None, "\nWhat is it?"]),
]


@pytest.mark.parametrize(("shape", "data", "parts"), SHAPES)
def test_every_way_to_write_an_image_gives_it_in_its_place(
    shape: str, data: Any, parts: list[str | None]
) -> None:
    """The path reaches no text."""
    reads = with_images(SHAPES_OF[shape], ())
    found = reads.read(data, {key: key for key in (*reads.fields, *reads.optional)})
    content = found.messages[0]["content"]
    whole = [{"type": "text", "text": content}] if isinstance(content, str) else content
    assert [part.get("text") for part in whole] == parts
    assert {part["type"] for part in whole if "text" not in part} <= {"image"}
    assert len(found.images) == parts.count(None)
    for image, path in zip(found.images, ("img/0.jpg", "img/1.png"), strict=False):
        assert image in (path, drawing("PNG"))


def test_a_part_that_says_the_number_of_its_image_gets_that_one() -> None:
    """The next one would be another picture, without a word."""
    talk = [user([{"type": "image", "index": 1}, {"type": "image", "index": 0}]), ANSWER]
    read = with_images(SHAPES_OF["messages"], ()).read
    fields = {"messages": "messages"}
    assert read({"messages": talk, "images": ["a", "b"]}, fields).images == ["b", "a"]
    assert read({"messages": talk, "images": ["a", "b", "c"]}, fields) == "image_count"
    assert read({"messages": talk, "images": ["a"]}, fields) == "bad_image"
    for index, found in (
        (1.0, ["b", "a"]),
        (0.5, "bad_image"),
        ("1", "bad_image"),
        (-1, "bad_image"),
    ):
        talk[0]["content"][0]["index"] = index
        answer = read({"messages": talk, "images": ["a", "b"]}, fields)
        assert getattr(answer, "images", answer) == found


@pytest.mark.parametrize(
    ("shape", "more", "said"),
    [("llava", {"images": ["img/0.jpg"]}, "images.field"), ("qwen_vl", {}, "shape: llava reads")],
)
def test_a_field_of_images_that_nothing_looks_into_is_told(
    tmp_path: Path, seeing: Path, shape: str, more: dict[str, Any], said: str
) -> None:
    write_drawings(tmp_path / "img")
    talk = record("img/0.jpg")["conversations"] if more else record()["conversations"]
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"image": "img/1.png", "conversations": talk, **more}]
    )
    streams = {"see": stream(path, shape)}
    told = mdsmix("convert", write_recipe(tmp_path, seeing, max_seq_len=400, streams=streams)).out
    assert "WARNING: the field image of 1 record is not read" in told
    assert said in told


@pytest.mark.parametrize(
    ("cell", "held"),
    [
        ("[{[]: 1}]", ["[{[]: 1}]"]),
        ("[x].jpg", ["[x].jpg"]),
        ("['img' '", ["['img' '"]),
        (r"['C:\data\img.jpg']", [r"C:\data\img.jpg"]),
    ],
)
def test_a_cell_that_begins_as_a_list_is_a_path_where_it_is_none(
    cell: str, held: list[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(images_of(cell)) == held


def test_a_list_of_images_is_laid_out_as_streaming_lays_it_out() -> None:
    """A number for later, how many, their bytes, the images: what `test_images_streaming` opens."""
    images = [reader.Image(size=len(data), data=data) for data in (b"abc", b"defg")]
    assert b"".join(_frames(images)) == struct.pack("<4I", 0, 2, 3, 4) + b"abcdefg"
    assert b"".join(_frames([])) == bytes(8)
    assert codec_of("list[jpeg]").decode(struct.pack("<4I", 0, 2, 3, 4) + b"abcdefg") == [
        b"abc",
        b"defg",
    ]
    with pytest.raises(ValueError, match="does not fill"):
        codec_of("list[jpeg]").decode(struct.pack("<4I", 0, 2, 3, 5) + b"abcdefg")


def test_what_a_conversation_without_images_says_is_what_it_said_before_there_were_any() -> None:
    """A holdout and duplicates go by it; images that stand in the record are said by their hash, others by their paths."""
    messages = [user("Hi"), ANSWER]
    assert canonical(Conversation(messages)) == orjson.dumps(
        [messages, None, None], option=orjson.OPT_SORT_KEYS
    )
    said = canonical(Conversation(messages, None, None, ["a.jpg", drawing()]))
    assert b'"a.jpg"' in said
    assert xxhash.xxh3_128_hexdigest(drawing()).encode() in said


def test_images_are_mixed_byte_for_byte_and_counted(tmp_path: Path, seeing: Path) -> None:
    """No run reads a mix yet, so it wants no processor; compression is for tokens."""
    paths = write_drawings(tmp_path / "img")
    names = [f"img/{path.name}" for path in paths]
    here = write_jsonl(tmp_path / "a.jsonl", [record(names[0]), record(*names[1:])])
    there = write_jsonl(tmp_path / "b.jsonl", [record(names[1], question="Where?"), record()])
    text = write_jsonl(tmp_path / "c.jsonl", [record()])
    streams = {
        "a": stream(here),
        "b": stream(there, images={"decode": "header", "max_images": 9}),
        "c": stream(text, shape="sharegpt", split="other"),
    }
    settings = {"max_seq_len": 400, "compression": "zstd", "mix": {"a": {"repeat": 2}}}
    recipe = write_recipe(tmp_path, seeing, streams=streams, **settings)
    run_recipe(recipe)
    mixed = mdsmix("mix", recipe, "--out", tmp_path / "mixed")
    assert mixed.code == 0, mixed.err
    wanted = samples(tmp_path / "out/a/train") * 2 + samples(tmp_path / "out/b/train")
    assert sorted(map(repr, samples(tmp_path / "mixed/train"))) == sorted(map(repr, wanted))
    manifest = manifest_of(tmp_path / "mixed/train")
    assert manifest.encoding.compression is None
    assert manifest.encoding.images.keys() == {"token", "id"}
    files = [path.stat().st_size for path in paths]
    assert manifest.totals.images == 7
    assert manifest.totals.image_bytes == 2 * sum(files) + files[1]
    other = mdsmix("mix", recipe, "streams.c.split=train", "--out", tmp_path / "none")
    assert other.code == 4
    run_recipe(recipe, "streams.c.split=train")
    other = mdsmix("mix", recipe, "streams.c.split=train", "--out", tmp_path / "none")
    assert other.code == 3
    assert "and c columns: {'turns': 'json'}, and one stream can have only one" in other.err
    assert "images: {} those of streams with images" in other.err
    token = "streams.b.images.token=<|vision_start|>"
    run_recipe(recipe, token)
    other = mdsmix("mix", recipe, token, "--out", tmp_path / "none")
    assert "images.token: <|image_pad|>, and b images.token: <|vision_start|>" in other.err
