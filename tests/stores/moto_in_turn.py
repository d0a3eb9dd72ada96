"""moto as a server that handles one request at a time; run by the Python of moto's own environment:
`moto_in_turn.py PORT`.

`moto_server` has a thread for each connection, which first looks for an object and then writes it:
under load, two of three writers that create an object at the same moment both succeeded in 10 of
300 trials. So whether it keeps conditions was a matter of luck.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

_moto = DomainDispatcherApplication(create_backend_app)
_turn = threading.Lock()


def _one_at_a_time(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    with _turn:
        return _moto(environ, start_response)  # type: ignore[no-any-return]


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), _one_at_a_time, threaded=True)
