"""Writing objects: in one request, or where they are too large in parts, each of them asked for until it is there.

One part at a time, so that a broken connection costs one part and memory holds only what the caller holds. What is given
up is taken back without waiting long: where the store fails that too, `unfinished` finds the parts later.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mdsmix.errors import Unreachable
from mdsmix.storage.location import Bytes, Stat
from mdsmix.storage.s3_client import ask
from mdsmix.storage.s3_errors import error_code

Part = Callable[[Any, dict[str, Any]], Any]
"Sends one part, with this client to this upload and number, and returns what the store says of it."

_TAKE_BACK_SECONDS = 3.0


def send(url: str, place: dict[str, str], buffers: Sequence[Bytes], part_bytes: int) -> None:
    """Puts the joined buffers at `place`."""
    pieces = _cut(buffers, part_bytes)
    if len(pieces) <= 1:
        ask(url, partial(_put, place, pieces[0] if pieces else []))
        return
    _in_parts(url, place, _begin_sent, (partial(_send_part, piece) for piece in pieces))


def copy(
    url: str, source: dict[str, str], found: Stat | None, place: dict[str, str], part_bytes: int
) -> None:
    """Puts what is at `source` (and was found to be so) at `place`, inside the store: in one request up to `part_bytes`."""
    if found is None or found.size <= part_bytes:  # what is missing, the store says itself
        ask(url, lambda client: client.copy_object(**place, CopySource=source))
        return
    origin = {"CopySource": source, "CopySourceIfMatch": f'"{found.stamp}"'}
    starts = range(0, found.size, part_bytes)
    ranges = (f"bytes={n}-{min(n + part_bytes, found.size) - 1}" for n in starts)
    _in_parts(url, place, _begin_copied, (partial(_copy_part, origin, wanted) for wanted in ranges))


def _in_parts(
    url: str,
    place: dict[str, str],
    begin: Callable[[dict[str, str], Any], Any],
    parts: Iterable[Part],
) -> None:
    """Makes one object of the parts, in order."""
    begun = ask(url, partial(begin, place))
    upload = {**place, "UploadId": begun["UploadId"]}
    try:
        sent = [
            ask(url, partial(_numbered, part, upload, number))
            for number, part in enumerate(parts, 1)
        ]
        ask(url, partial(_complete, place, upload, sent))
    except BaseException:
        with suppress(Unreachable):
            ask(url, lambda client: client.abort_multipart_upload(**upload), _TAKE_BACK_SECONDS)
        raise


def _put(place: dict[str, str], piece: list[memoryview], client: Any) -> None:
    body = _Joined(piece)
    client.put_object(**place, Body=body, ContentLength=body.size)


def _send_part(piece: list[memoryview], client: Any, which: dict[str, Any]) -> Any:
    body = _Joined(piece)
    return client.upload_part(**which, Body=body, ContentLength=body.size)


def _copy_part(origin: dict[str, Any], wanted: str, client: Any, which: dict[str, Any]) -> Any:
    return client.upload_part_copy(**which, **origin, CopySourceRange=wanted)["CopyPartResult"]


def _cut(buffers: Sequence[Bytes], size: int) -> list[list[memoryview]]:
    """The joined buffers as pieces of `size` bytes, the last one shorter; nothing is copied."""
    pieces: list[list[memoryview]] = []
    room = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            if not room:
                pieces.append([])
                room = size
            pieces[-1].append(rest[:room])
            rest, room = rest[room:], room - len(pieces[-1][-1])
    return pieces


def _begin_copied(place: dict[str, str], client: Any) -> Any:
    return client.create_multipart_upload(**place)


def _begin_sent(place: dict[str, str], client: Any) -> Any:
    """Where boto3 sends checksums with the parts, the store wants to hear of them before."""
    has_sums = client.meta.config.request_checksum_calculation == "when_supported"
    sums = {"ChecksumAlgorithm": "CRC32"} if has_sums else {}
    return client.create_multipart_upload(**place, **sums)


def _numbered(part: Part, upload: dict[str, Any], number: int, client: Any) -> dict[str, Any]:
    said = part(client, {**upload, "PartNumber": number})
    told = {name: said[name] for name in ("ETag", "ChecksumCRC32") if name in said}
    return {"PartNumber": number, **told}


def _complete(
    place: dict[str, str], upload: dict[str, Any], sent: list[dict[str, Any]], client: Any
) -> None:
    from botocore.exceptions import ClientError

    try:
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": sent})
    except ClientError as error:
        # Asked again because the first answer was lost: there is no upload any more, but the object.
        if error_code(error) != "NoSuchUpload" or not _is_made_of(client, place, sent):
            raise


def _is_made_of(client: Any, place: dict[str, str], sent: list[dict[str, Any]]) -> bool:
    """Whether the object has the ETag that these parts make."""
    from botocore.exceptions import ClientError

    try:
        found = client.head_object(**place)["ETag"].strip('"')
    except ClientError as error:
        if error_code(error) != "404":
            raise
        return False
    digests = [part["ETag"].strip('"') for part in sent]
    if not all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests):
        return False  # a store whose ETags are no MD5
    joined = hashlib.md5(bytes.fromhex("".join(digests)), usedforsecurity=False)
    return bool(found == f"{joined.hexdigest()}-{len(sent)}")


class _Joined(io.RawIOBase):
    """Several buffers read as one file, without joining them in memory."""

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts
        self.size = sum(map(len, parts))
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        filled = begin = 0
        for part in self._parts:
            skipped = max(0, self._position - begin)
            piece = part[skipped : skipped + len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._position += len(piece)
            begin += len(part)
        return filled
