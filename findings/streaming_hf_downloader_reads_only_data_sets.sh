#!/usr/bin/env bash
# Surprise: Streaming's downloader of hf:// URLs drops the first part of the path. `hf://buckets/org/name/index.json` and
#   `hf://models/org/name/index.json` are requested from the data set org/name, and no error says so.
# Likely guess: the URL names the kind of repository, as it does for huggingface_hub's own file system, which opens
#   buckets, models and data sets by these URLs; what Streaming cannot read, it refuses.
# Why it matters: if a data set has the same name as the bucket, training reads other data than the URL names. Otherwise
#   the run fails with a 404 of an address that nobody wrote.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0'
HF_HUB_OFFLINE=0 "$folder/env/bin/python" - "$folder" <<'PY'
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version

requested = []


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        requested.append(self.path)
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
import os

os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
from streaming.base.storage.download import HFDownloader

print("mosaicml-streaming", version("mosaicml-streaming"), "huggingface-hub", version("huggingface-hub"))
for kind in ("datasets", "buckets", "models"):
    requested.clear()
    try:
        HFDownloader()._download_file_impl(f"hf://{kind}/org/name/index.json", f"{sys.argv[1]}/{kind}/index.json", 60)
    except Exception as error:
        print(f"hf://{kind}/org/name/index.json: {type(error).__name__}; requested {requested[-1]}")
    assert requested[-1].startswith("/datasets/org/name/resolve/"), requested
PY
