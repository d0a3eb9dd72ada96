"""Images in records: a path, bytes and base64 in all forms in which they are found, from every
shape; what a stream stores of them, and what is told of images that nothing reads.
"""

from __future__ import annotations

import base64
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_from_bytes

import orjson
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mdsmix.record import Conversation, RecordRefused, canonical
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import read_image, read_images, with_images
from tests.alarm import fail_after
from tests.converting import manifest_of, mdsmix, run_recipe, samples, write_jsonl, write_recipe
from tests.corpus import CHATML
from tests.pictures import LLAVA, TOKEN, drawing, record, seeing_tokenizer, stream, write_drawings

ANSWER = {"role": "assistant", "content": "A drawing."}
PNG = drawing("PNG", (41, 30))
SAID, URL = base64.b64encode(PNG).decode(), base64.urlsafe_b64encode(PNG).decode()
URI = f"data:image/png;base64,{SAID}"
LINES = f"data:image/png;base64,{base64.encodebytes(PNG).decode()}"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def recipe_of(folder: Path, tokenizer: Path, *records: Any, **settings: Any) -> Path:
    streams = {"see": stream(write_jsonl(folder / "a.jsonl", records), **settings)}
    return write_recipe(folder, tokenizer, max_seq_len=400, compression="zstd", streams=streams)


def text_of(sample: Any, tokenizer: Path) -> str:
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = [t for turn in sample["turns"] for t in (*turn["input_ids"], *turn["labels"])]
    return str(model.decode(ids, skip_special_tokens=False))


def test_images_are_given_as_a_template_takes_them(tmp_path: Path, tokenizer_folder: Path) -> None:
    """As parts of every message, or as the token in the text; without a token the recipe is
    refused.
    """
    write_drawings(tmp_path / "img")
    declared, chatml = {"image_token": "<image>"}, "<|im_start|>user\n"
    for name, words, template, says, token, question in (
        ("parts", ["<image>"], LLAVA, declared, None, "USER: <image>\n\nWhat is it? ASSISTANT: A"),
        ("text", [TOKEN], CHATML, {}, TOKEN, f"{chatml}{TOKEN}\nWhat is it?<|im_end|>"),
    ):
        folder = seeing_tokenizer(tokenizer_folder, tmp_path / name, words, template, says)
        images = {"token": token} if token else None
        recipe = recipe_of(tmp_path, folder, record("img/0.jpg"), record(), images=images)
        run_recipe(recipe, f"local={tmp_path}/of-{name}")
        out = tmp_path / f"of-{name}/see/train"
        seen, plain = (text_of(sample, folder) for sample in samples(out))
        assert seen.startswith(question)
        assert plain.startswith(("USER: What is it? ", f"{chatml}What is it?"))
        assert manifest_of(out).encoding.images["token"] == (token or "<image>")
    answer = mdsmix("convert", recipe_of(tmp_path, tokenizer_folder, record("img/0.jpg")))
    assert (answer.code, "declares no image_token" in answer.err) == (2, True)


def openai(content: Any) -> dict[str, Any]:
    return {"messages": [user(content), ANSWER]}


PARTS = [{"type": "text", "text": "<image>"}, {"type": "image_url", "image_url": URI}]
TYPED = {"input": "<image>?", "output": "A drawing."}
PATH = {"instruction": "<img>a.jpg</img>?", "output": "A drawing."}
RIVALS = record("img/0.jpg") | {"image": "img/1.png", "images": ["img/0.jpg"]}
UNREAD = "the field image of 1 record is not read"
TOLD: list[tuple[str, Any, Any, str, str]] = [
    # shape, the stream's images, the record, what is warned of, what would read it
    ("qwen_vl", {}, TYPED, "<image> of 1 record is trained as text", "shape: llava reads <image>"),
    ("openai", {}, openai(PARTS), "<image> of 1", "the other shapes read the parts of messages"),
    ("openai", None, openai("<image>"), "<image> of 1", "set images: {} on the stream"),
    ("alpaca", None, PATH, "</img> of 1", "shape: qwen_vl reads the path between"),
    ("llava", None, RIVALS, UNREAD, "images.field"),
    ("qwen_vl", None, record() | {"image": "img/1.png"}, UNREAD, "shape: llava reads"),
]


def test_an_image_that_nothing_reads_is_told(tmp_path: Path, seeing: Path) -> None:
    write_drawings(tmp_path / "img")
    for number, (shape, images, data, warned, hint) in enumerate(TOLD):
        recipe = recipe_of(tmp_path, seeing, data, shape=shape, images=images)
        told = mdsmix("convert", recipe, f"local={tmp_path}/{number}").out
        assert f"WARNING: {warned}" in told, (shape, images)
        assert hint in told


def talk(question: str, of: str = "human", by: str = "gpt") -> dict[str, Any]:
    return {"conversations": [{"from": of, "value": question}, {"from": by, "value": "A drawing."}]}


QUESTION, FIRST = "\nWhat is it?", "img/0.jpg"
ONE, TWO, TWICE = record(FIRST), record(FIRST, "img/1.png"), [None, "\n", None, QUESTION]
NAMED = talk("Picture 1: <img>img/0.jpg</img>\nWhat?", of="user", by="assistant")
TAGGED = {"input": "<img> img/0.jpg\n</img><img>img/1.png</img>Which?", "output": "Both."}
LOW = {"type": "image_url", "image_url": {"url": FIRST, "detail": "low"}}
AND = [LOW, {"type": "text", "text": "and"}, {"type": "image_url", "image_url": URI}]
BEHIND = [{"type": "text", "text": "A <image> is"}, {"type": "image", "text": None}]
NULL = [{"type": "text", "text": "<image>Q", "image": None}]
NO_BYTES = {"bytes": None, "path": FIRST}
WRITTEN: list[tuple[str, dict[str, Any], Any]] = [
    # shape, record, its first content: None for each image
    ("qwen_vl", NAMED, ["Picture 1: ", None, "\nWhat?"]),
    *(("qwen_vl", TAGGED, [None, None, "Which?"]), ("llava", TWO, TWICE)),
    ("sharegpt", talk("a <image> b") | {"images": [FIRST]}, ["a ", None, " b"]),
    ("messages", openai("<image>What?") | {"images": [NO_BYTES]}, [None, "What?"]),
    ("messages", openai(BEHIND) | {"image": FIRST}, ["A <image> is", None]),
    ("openai", openai(AND), [None, "and", None]),
    ("messages", openai(NULL) | {"image": FIRST}, [None, "Q"]),
    ("llava", TWO | {"image": '["img/0.jpg", "img/1.png"]'}, TWICE),
    ("llava", TWO | {"image": "['img/0.jpg', 'img/1.png']"}, TWICE),
    ("llava", ONE | {"image": LINES}, [None, QUESTION]),
    ("llava", record() | {"image": ""}, ["What is it?"]),
    ("llava", record() | {"image": {"bytes": None, "path": None}}, ["What is it?"]),
    ("llava", ONE | {"images": ""}, [None, QUESTION]),
]


def test_every_way_to_write_an_image_gives_it_in_its_place() -> None:
    """The path reaches no text."""
    for shape, data, parts in WRITTEN:
        reads = with_images(SHAPES[shape], ())
        found = reads.read(data, {key: key for key in (*reads.fields, *reads.optional)})
        content = found.messages[0]["content"]
        whole = [{"type": "text", "text": content}] if isinstance(content, str) else content
        assert [part.get("text") for part in whole] == parts, data
        assert {part["type"] for part in whole if "text" not in part} <= {"image"}
        assert len(found.images) == parts.count(None)
        for image, path in zip(found.images, ("img/0.jpg", "img/1.png"), strict=False):
            assert image in (path, PNG)


def test_a_part_that_says_the_number_of_its_image_gets_that_one() -> None:
    """The next one would be another picture, without a word."""
    read = with_images(SHAPES["messages"], ()).read
    for images, index, found in (
        *(("ab", 1, ["b", "a"]), ("ab", 1.0, ["b", "a"]), ("abc", 1, "image_count")),
        *(("a", 1, "bad_image"), *(("ab", odd, "bad_image") for odd in (0.5, "1", -1))),
    ):
        parts = [{"type": "image", "index": index}, {"type": "image", "index": 0}]
        data = openai(parts) | {"images": [*images]}
        answer = read(data, {"messages": "messages"})
        assert getattr(answer, "images", answer) == found, (images, index)


def test_a_cell_that_begins_as_a_list_is_a_path_where_it_is_none() -> None:
    path = r"['C:\data\img.jpg']"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cell in ("[{[]: 1}]", "[x].jpg", "['img' '"):
            assert list(read_images(cell)) == [cell]
        assert list(read_images(path)) == [r"C:\data\img.jpg"]


def test_what_a_conversation_without_images_says_is_what_it_said_before_there_were_any() -> None:
    """A holdout and duplicates go by it; images that stand in the record are said by their hash,
    others by their paths.
    """
    messages = [user("Hi"), ANSWER]
    plain = orjson.dumps([messages, None, None], option=orjson.OPT_SORT_KEYS)
    assert canonical(Conversation(messages)) == plain
    said = canonical(Conversation(messages, None, None, ["a.jpg", drawing()]))
    assert b'"a.jpg"' in said
    assert xxhash.xxh3_128_hexdigest(drawing()).encode() in said


def test_images_are_mixed_byte_for_byte_and_counted(tmp_path: Path, seeing: Path) -> None:
    """No run reads a mix yet, so it wants no processor; compression is for tokens."""
    paths = write_drawings(tmp_path / "img")
    names = [f"img/{path.name}" for path in paths]
    here = write_jsonl(tmp_path / "a.jsonl", [record(names[0]), record(*names[1:])])
    there = write_jsonl(tmp_path / "b.jsonl", [record(names[1], question="Where?"), record()])
    streams = {"a": stream(here), "b": stream(there, images={"decode": "header", "max_images": 9})}
    settings = {"max_seq_len": 400, "compression": "zstd", "mix": {"a": {"repeat": 2}}}
    recipe = write_recipe(tmp_path, seeing, streams=streams, **settings)
    run_recipe(recipe)
    assert manifest_of(tmp_path / "out/a/train").encoding.compression is None
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


IMAGES: list[Any] = [
    *(PNG, SAID, URI, LINES, f"DATA:;charset=utf-8;BASE64, {SAID}\n", URI.rstrip("=")),
    *(f"data:image/png;base64,{said}" for said in (URL, quote(SAID, safe=""))),
    *(f"data:image/png,{quote_from_bytes(PNG)}", {"bytes": PNG, "path": "gone.png"}),
    *({"bytes": SAID}, {"type": "base64", "media_type": "image/png", "data": SAID}, {"url": URI}),
]
PATHS = ("/9j/a.jpg", "Qk/0001", f"{'a/' * 200}b", f"/9j/{'a' * 300}.jpg")


def test_an_image_that_stands_in_a_record_is_its_bytes_and_a_path_is_a_path() -> None:
    assert SAID.endswith("=")
    assert SAID != URL
    for value in IMAGES:
        assert read_image(value) == PNG, value
    for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        content = drawing(format, (300, 200))
        assert read_image(base64.b64encode(content).decode()) == content, format
    assert [*map(read_image, PATHS)] == [*PATHS]
    text = f"/9j/{' ' * 200_000}!"  # a megabyte of spaces took an hour
    with fail_after(2):
        assert read_image(text) == text


NONE: list[tuple[Any, str]] = [
    ("data:image/png;base64,AAAAA", "its base64 cannot be decoded"),
    (f"data:image/png;base64,{SAID[:40]}!!!!{SAID[44:]}", "its base64 cannot be decoded"),
    *(("data:image/png;base64", "without a comma"), ({"url": ""}, "it is {'url': ''}, not a path")),
    *(
        ({"url": {"url": {"url": "x"}}}, "not a path, URL, bytes or base64"),
        (3, "it is 3, not a path"),
    ),
]


def test_what_is_no_image_says_why() -> None:
    for value, why in NONE:
        with pytest.raises(RecordRefused, match=r"^bad_image$") as fault:
            read_image(value)
        assert why in fault.value.why.detail["why"]


ODD: list[Any] = [None, "", 5, [], ["a.jpg"], {}, {"url": "a.jpg"}, {"bytes": 1}, "a.jpg", "a <image>"]  # fmt: skip
KINDS = st.sampled_from(["text", "image", "image_url", "reasoning", "tool_call", *ODD])
KEYS = st.sampled_from(["text", "value", "image", "image_url", "base64", "data", "index"])
VALUES = st.sampled_from(ODD)
PART = st.builds(lambda t, more: {"type": t} | more, KINDS, st.dictionaries(KEYS, VALUES, max_size=2))  # fmt: skip


@settings(max_examples=60)
@given(st.lists(PART, max_size=3), VALUES)
@example([{"type": "text", "image_url": "a.jpg"}], None)
@example([{"type": "text", "text": 5}], None)
@example([{"type": ["image"]}], None)
@example([{"type": "image", "base64": 1}], None)
def test_whatever_parts_say_they_are_read_or_a_reason(parts: list[Any], images: Any) -> None:
    """Each of the examples ended the run: a TypeError of ours, by one record."""
    said = [user(parts), ANSWER]
    for name in ("messages", "openai", "llava"):
        shape = with_images(SHAPES[name], ())
        data = {"messages": said, "conversations": said, "images": images}
        assert isinstance(shape.read(data, {key: key for key in shape.fields}), str | Conversation)
