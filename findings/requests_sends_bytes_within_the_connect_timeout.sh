#!/usr/bin/env bash
# Surprise: requests.put(url, data=BYTES, timeout=(connect, read)) fails if sending all of the body takes longer than the
#   connect timeout, though the connection is made and bytes flow. With data=io.BytesIO(BYTES) the same upload succeeds.
# Likely guess: the connect timeout ends when the connection is made; a body that makes progress is limited by no timeout,
#   or by one for each part. (urllib3 keeps the connect timeout on the socket until it reads, and bytes are one `sendall`,
#   whose timeout is for the whole call; a file is sent in parts of 16 KiB, each with a time of its own.)
# Why it matters: an upload of 64 MiB with the usual timeout=(5, 30) fails on each link of less than 13 MB/s, and each retry
#   fails in the same way.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'requests==2.34.2' 'urllib3==2.8.0'
"$folder/env/bin/python" - <<'PY'
import io
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import requests

MIB = 1 << 20


class SlowStore(BaseHTTPRequestHandler):
    """Reads a body at 20 MiB/s."""

    def do_PUT(self) -> None:
        for _ in range(int(self.headers["content-length"]) // MIB):
            self.rfile.read(MIB)
            time.sleep(0.05)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *words: object) -> None:
        """Print nothing: the client may have gone."""


server = Server(("127.0.0.1", 0), SlowStore)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_address[1]}/"
print("requests", version("requests"), "urllib3", version("urllib3"))
body = bytes(40 * MIB)
outcomes = {}
for name, data in (("a file", io.BytesIO(body)), ("bytes", body)):
    began = time.monotonic()
    try:
        requests.put(url, data=data, timeout=(1, 30))
        outcomes[name] = "sent"
    except requests.RequestException as error:
        outcomes[name] = str(error)
    print(f"{name}: {outcomes[name]} after {time.monotonic() - began:.1f} s")
assert outcomes["a file"] == "sent"
assert "timed out" in outcomes["bytes"]
PY
