#!/usr/bin/env bash
# Surprise: google-cloud-storage's anonymous client raises InvalidOperation "Anonymous credentials cannot be refreshed."
#   when a store answers 401, as Google does for an object that is not public. The answer's own words are lost.
# Likely guess: google.api_core.exceptions.Unauthorized with the store's message, as for any other status (404: NotFound).
# Why it matters: code that catches GoogleAPIError, or Unauthorized, to tell "not public" from "no such object" lets it through;
#   and the message sends the reader to look for credentials that expired, where there are none.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'google-cloud-storage==3.2.0' 'google-auth==2.63.0'
"$folder/env/bin/python" - <<'PY'
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version


class Store(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 401 if "private" in self.path else 404
        message = "Anonymous caller does not have storage.objects.get access"
        body = json.dumps({"error": {"code": status, "message": message}}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", 0), Store)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{server.server_address[1]}"

from google.api_core.exceptions import GoogleAPIError, NotFound
from google.auth.exceptions import InvalidOperation
from google.cloud.storage import Client

print("google-cloud-storage", version("google-cloud-storage"), "google-auth", version("google-auth"))
raised = {}
for name in ("missing", "private"):
    try:
        Client.create_anonymous_client().bucket("bucket").blob(name).reload(retry=None)
    except Exception as error:
        raised[name] = error
        print(f"{name}: {type(error).__module__}.{type(error).__name__}: {error}")
assert isinstance(raised["missing"], NotFound)
assert isinstance(raised["private"], InvalidOperation)
assert not isinstance(raised["private"], GoogleAPIError)
assert "storage.objects.get" not in str(raised["private"])
PY
