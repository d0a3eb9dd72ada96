"""Recognises the format of a file by its first bytes.

`sniff_format` names the format of a file whose suffix is unknown, for `mdsmix init`.
`describe_foreign_content` is for a file that is read by its suffix, but begins like a file of
another format. Such a file is refused: otherwise each of its lines would be a bad record.
"""

from __future__ import annotations

import json
from contextlib import suppress

from mdsmix.sources.units import SourceFile

HEAD_BYTES = 48
"First bytes of a file that are compared."
ARROW_FILE_MAGIC = b"ARROW1"
ARROW_MESSAGE_START = b"\xff\xff\xff\xff"
"The first bytes of each message of an Arrow stream since Arrow 0.15, including the end mark."
_FORMATS = {
    b"PAR1": "parquet",
    ARROW_FILE_MAGIC: "arrow",
    ARROW_MESSAGE_START: "arrow",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "zip",
    b"{": "jsonl",
    b"[": "json",
}
"First bytes -> the name of the format, or of the packing."
_PACKINGS = {
    b"\x1f\x8b\x08": "gzip (.gz)",
    b"\x28\xb5\x2f\xfd": "Zstandard (.zst)",
    b"\xfd7zXZ\0": "xz (.xz)",
    **{b"BZh%d1AY&" % level: "bzip2 (.bz2)" for level in range(1, 10)},
}
_ZIP = b"PK\x03\x04"
_BINARY_FORMATS = {b"PAR1\x15": "parquet", b"ARROW1\0\0": "arrow"}
"""Longer beginnings than in `_FORMATS`, because text that begins with `PAR1` or `ARROW1` must still
be read as text.
"""
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UTF_16_BYTES = 8
"First bytes that show UTF-16 without a mark. Among more bytes a letter outside ASCII may be."


def sniff_format(file: SourceFile) -> str:
    """Return the name of a file's format or packing by the file's first bytes; "" if unknown.

    Examples: `jsonl`, `parquet`, `gzip`.
    """
    with file.open() as stored:
        head = stored.read(8).lstrip()  # JSON may begin with white space
    for magic, name in _FORMATS.items():
        if head.startswith(magic):
            return name
    return ""


def begins_with_json_line(text: str) -> bool:
    """Return whether the first line of a text is a JSON object, as in JSON Lines."""
    first_line = text.lstrip().partition("\n")[0]
    if not first_line.startswith("{"):
        return False
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(first_line), dict)
    return False


def has_comma_after_object(text: str) -> bool:
    """Return whether a text begins with a JSON object and a comma, as the inside of a list does:
    `{"text": "a"},` and then a new line.
    """
    with suppress(ValueError, RecursionError):
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
        return isinstance(value, dict) and text.lstrip()[end:].lstrip().startswith(",")
    return False


def describe_foreign_content(head: bytes, packing: str) -> str:
    """Return what is wrong with a file that should be text but begins like a file of another
    format; "" if nothing is. The string continues a message that begins with the file's name:
    `is a zip archive, which mdsmix does not read: unpack it, ...`.

    Args:
        head: the first `HEAD_BYTES` bytes, after decompression; fewer in a shorter file.
        packing: the suffix of the file's compression, such as `.gz`; "" if the file was not
            decompressed.
    """
    for magic, name in _PACKINGS.items():
        if head.startswith(magic):
            if packing:
                return f"is packed a second time, by {name}: unpack it once"
            return (
                f"is packed by {name}, and its name does not show that: "
                "unpack it, or add that suffix to its name"
            )
    if head.startswith(_ZIP):
        return "is a zip archive, which mdsmix does not read: unpack it, and name the files in it"
    for magic, name in _BINARY_FORMATS.items():
        if head.startswith(magic):
            return f"is a {name} file: set source.format: {name}, or rename it to .{name}"
    if head.startswith(_UTF_16_MARKS) or _is_utf_16_without_mark(head[:_UTF_16_BYTES]):
        return (
            "is encoded in UTF-16, and mdsmix reads UTF-8: "
            "convert it, for example with iconv -f UTF-16 -t UTF-8"
        )
    return ""


def _is_utf_16_without_mark(head: bytes) -> bool:
    """Return whether every second byte is zero, and no other byte is, as in ASCII text encoded in
    UTF-16: `h\\0e\\0l\\0l\\0` or `\\0h\\0e\\0l\\0l`.
    """
    if len(head) < _UTF_16_BYTES:
        return False
    even, odd = head[::2], head[1::2]
    is_little_endian = all(even) and not any(odd)
    is_big_endian = all(odd) and not any(even)
    return is_little_endian or is_big_endian
