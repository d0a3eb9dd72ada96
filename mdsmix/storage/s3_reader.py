"""An object as a file that is read from its beginning, also where bodies break on the way."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

from mdsmix.storage.s3_client import Patience, ask
from mdsmix.storage.s3_errors import error_code, failures
from mdsmix.storage.s3_objects import own_stamp

if TYPE_CHECKING:
    from mdsmix.storage.s3 import S3Path

_MORE_BYTES = 1 << 20  # a line that is longer than was thought


class Reader(io.RawIOBase):
    """The bytes [start, end) of one version of an object, taken up again where a body breaks."""

    def __init__(
        self,
        place: S3Path,
        start: int,
        end: int | None,
        begun: tuple[str, Any] | None = None,
        stamp: str = "",
        goes_on: bool = False,
    ) -> None:
        """`begun`: the stamp and the body of a request that was made already; `stamp`: of the version that is to be read;
        `goes_on`: beyond `end` too, by further requests."""
        self._place, self._position, self._end = place, start, end
        self._stamp, self._goes_on = stamp, goes_on and end is not None
        self._patience: Patience | None = None
        if begun:
            self._stamp, self._body = begun
        else:
            self._body = self._request()

    def _request(self) -> Any:
        wanted = self._place._object()
        if self._stamp:
            wanted["IfMatch"] = f'"{self._stamp}"'
        if self._position or self._end is not None:
            last = "" if self._end is None else self._end - 1
            wanted["Range"] = f"bytes={self._position}-{last}"
        stamp, body = ask(self._place.url, partial(_get, wanted))
        self._stamp = stamp or self._stamp
        return body

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        while True:
            try:
                data: bytes = self._body.read(len(target))
                if data or not target or not self._go_on():
                    break
            except failures() as error:
                self._resume(error)
        self._patience = None
        self._position += len(data)
        target[: len(data)] = data
        return len(data)

    def _go_on(self) -> bool:
        """Asks for more where all that was asked for has been read."""
        if not self._goes_on or self._position != self._end:
            return False
        self._body.close()
        self._end += _MORE_BYTES
        self._body = self._request()
        return True

    def _resume(self, error: Exception) -> None:
        self._body.close()
        self._patience = self._patience or Patience(self._place.url)
        self._patience.wait(error)
        self._body = self._request()

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()


def _get(wanted: dict[str, str], client: Any) -> tuple[str, Any]:
    """The stamp and the body of a GET; nothing where the object ends before the range."""
    from botocore.exceptions import ClientError

    try:
        answer = client.get_object(**wanted)
    except ClientError as error:
        if error_code(error) != "InvalidRange":
            raise
        return "", io.BytesIO()
    return own_stamp(answer), answer["Body"]
