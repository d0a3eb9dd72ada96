#!/usr/bin/env bash
# Surprise: MDSWriter(out="azure://data/web") writes to the container `data`, and StreamingDataset(remote="azure://data/web")
#   reads from the container `web`: the uploader takes the host of the URL as the container, the downloader the first part
#   of the path. Without AZURE_ACCOUNT_NAME the downloader takes all up to the first dot as the account.
# Likely guess: the URL that a stream was written to is the URL that it is read from, as for s3:// and gs://.
# Why it matters: training fails, or reads another container. Only azure://ACCOUNT.blob.core.windows.net/CONTAINER/... is
#   read as it looks; MDSWriter cannot write there.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0'
"$folder/env/bin/python" - "$folder" <<'PY'
import os
import sys
from importlib.metadata import version
from unittest.mock import patch

from streaming.base.storage.download import AzureDownloader
from streaming.base.storage.upload import AzureUploader

print("mosaicml-streaming", version("mosaicml-streaming"))
os.environ["AZURE_ACCOUNT_ACCESS_KEY"] = "a2V5"
os.environ.pop("AZURE_ACCOUNT_NAME", None)


def read_from(remote: str) -> tuple[str, str, str]:
    """Return the account, container and blob that Streaming asks for. No request is sent."""
    with patch("azure.storage.blob.BlobServiceClient") as client:
        AzureDownloader().download(remote, f"{sys.argv[1]}/{len(remote)}")
        asked = client.return_value.get_blob_client.call_args.kwargs
        return client.call_args.kwargs["account_url"], asked["container"], asked["blob"]


with patch("azure.storage.blob.BlobServiceClient") as client:
    AzureUploader(out="azure://data/web")
    written = client.return_value.get_container_client.call_args.kwargs["container"]
read = read_from("azure://data/web/index.json")
whole = read_from("azure://me.blob.core.windows.net/data/web/index.json")
print("azure://data/web: MDSWriter writes to the container", written, "| StreamingDataset reads", read)
print("azure://me.blob.core.windows.net/data/web: StreamingDataset reads", whole)
assert written == "data"
assert read == ("https://data/web/index.blob.core.windows.net", "web", "index.json"), read
assert whole == ("https://me.blob.core.windows.net", "data", "web/index.json"), whole
PY
