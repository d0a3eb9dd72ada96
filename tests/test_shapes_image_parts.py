"""What a record may hold as an image: a path, bytes, and base64 in all forms in which it is found."""

import base64
from typing import Any
from urllib.parse import quote, quote_from_bytes

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mdsmix.record import Conversation, RecordRefused
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import image_of, with_images
from tests.alarm import at_most
from tests.pictures import drawing

PNG = drawing("PNG", (41, 30))
SAID = base64.b64encode(PNG).decode()
URL = base64.urlsafe_b64encode(PNG).decode()
IMAGES: list[Any] = [
    *(PNG, SAID, f"data:image/png;base64,{SAID}"), f"DATA:;charset=utf-8;BASE64, {SAID}\n",
    f"data:image/png;base64,{base64.encodebytes(PNG).decode()}",
    f"data:image/png;base64,{SAID.rstrip('=')}", f"data:image/png;base64,{URL}",
    f"data:image/png;base64,{quote(SAID, safe='')}", f"data:image/png,{quote_from_bytes(PNG)}",
    {"bytes": PNG, "path": "gone.png"}, {"bytes": SAID},
    {"type": "base64", "media_type": "image/png", "data": SAID},
    {"url": f"data:image/png;base64,{SAID}"},
]  # fmt: skip
PATHS = ("/9j/a.jpg", "Qk/0001", f"{'a/' * 200}b", f"/9j/{'a' * 300}.jpg")


def test_an_image_that_stands_in_a_record_is_its_bytes_and_a_path_is_a_path() -> None:
    assert SAID.endswith("=")
    assert SAID != URL
    for value in IMAGES:
        assert image_of(value) == PNG, value
    for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        content = drawing(format, (300, 200))
        assert image_of(base64.b64encode(content).decode()) == content, format
    assert [*map(image_of, PATHS)] == [*PATHS]
    text = f"/9j/{' ' * 200_000}!"  # a megabyte of spaces took an hour
    with at_most(2):
        assert image_of(text) == text


NONE: list[tuple[Any, str]] = [
    ("data:image/png;base64,AAAAA", "its base64 cannot be decoded"),
    (f"data:image/png;base64,{SAID[:40]}!!!!{SAID[44:]}", "its base64 cannot be decoded"),
    *(("data:image/png;base64", "without a comma"), ({"url": ""}, "it is {'url': ''}, no path")),
    *(({"url": {"url": {"url": "x"}}}, "no path, URL, bytes or base64"), (3, "it is 3, no path")),
]


def test_what_is_no_image_says_why() -> None:
    for value, why in NONE:
        with pytest.raises(RecordRefused) as fault:
            image_of(value)
        assert fault.value.args == ("bad_image",)
        assert why in fault.value.why.detail["why"]


ODD: list[Any] = [None, "", 5, [], ["a.jpg"], {}, {"url": "a.jpg"}, {"bytes": 1}, "a.jpg", "a <image>"]  # fmt: skip
PARTS = st.builds(
    lambda kind, rest: {"type": kind} | rest,
    st.sampled_from(["text", "image", "image_url", "reasoning", "tool_call", *ODD]),
    st.dictionaries(
        st.sampled_from(["text", "value", "image", "image_url", "base64", "data", "index"]),
        st.sampled_from(ODD),
        max_size=2,
    ),
)


@settings(max_examples=60)
@given(st.lists(PARTS, max_size=3), st.sampled_from(ODD))
@example([{"type": "text", "image_url": "a.jpg"}], None)
@example([{"type": "text", "text": 5}], None)
@example([{"type": ["image"]}], None)
@example([{"type": "image", "base64": 1}], None)
def test_whatever_parts_say_they_are_read_or_a_reason(parts: list[Any], images: Any) -> None:
    """Each of the examples ended the run: a TypeError of ours, by one record."""
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    for name in ("messages", "openai", "llava"):
        shape = with_images(SHAPES[name], ())
        record = {"messages": talk, "conversations": talk, "images": images}
        read = shape.read(record, {key: key for key in shape.fields})
        assert isinstance(read, str | Conversation)
