"""The first records of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mdsmix.shapes.image_parts import FIELDS
from mdsmix.sources import SourceFile, plan, read

RECORDS = 50
"Records of a file that are read: enough to see fields that not every record has."
MOST_BYTES = 1 << 40
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRecords:
    """The beginning of a file."""

    file: SourceFile
    records: list[Any]
    bad: Counter[str]
    "Reason code -> items of the file that are no record."

    @property
    def fields(self) -> list[str]:
        """All names at the top of its records, in their order."""
        objects = (record for record in self.records if isinstance(record, dict))
        return list(dict.fromkeys(str(name) for record in objects for name in record))


def head_of(file: SourceFile) -> FirstRecords:
    """The first records of a file; MdsmixError where it cannot be read."""
    records, bad = list[Any](), Counter[str]()
    for batch in read(plan([file], MOST_BYTES)[0], limit=RECORDS):
        records += batch.records
        bad.update(each.reason for each in batch.bad)
    return FirstRecords(file=file, records=records, bad=bad)


def sizes(files: Iterable[SourceFile]) -> int:
    """The stored bytes of all files."""
    return sum(file.stat.size for file in files)


def fields_of_images(head: FirstRecords) -> tuple[str, ...]:
    """The fields that hold images, at the top of the records; () if they bear the usual names, or if no field holds any."""
    objects = [record for record in head.records if isinstance(record, dict)]
    held = [name for name in head.fields if any(is_image(record.get(name)) for record in objects)]
    return () if set(held) & set(FIELDS) else tuple(held)


def is_image(value: Any) -> bool:
    if isinstance(value, list):
        return any(is_image(each) for each in value if not isinstance(each, list))
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"} and any(value.values())
    if isinstance(value, bytes):
        return value.startswith(MAGIC)
    return isinstance(value, str) and (
        value.lower().endswith(SUFFIXES) or value[:11].lower() == "data:image/"
    )
