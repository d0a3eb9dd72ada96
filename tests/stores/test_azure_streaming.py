"""A stream that is published to Azure's own address and read there by Streaming itself. Its client
knows no other address, so a proxy of the tests leads it to Azurite (`serve_as_azure`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mdsmix.storage import Location
from tests import azurite
from tests.converting import Project, read_location, read_samples, run_ok
from tests.stores.servers import AZURE, Store

pytestmark = pytest.mark.parametrize("running", [AZURE], indirect=True)

TEXTS = [f"Document {n} is about the number {n}. " * 5 for n in range(80)]
PROGRAM = """
import sys
from streaming import StreamingDataset
from streaming.base.storage.download import AzureDownloader

remote, local, cache, odd = sys.argv[1:]
far = StreamingDataset(remote=remote, local=cache, split="train", shuffle=False, batch_size=1)
near = StreamingDataset(local=local, split="train", shuffle=False, batch_size=1)
assert len(far) == len(near) > 0
for number in range(len(near)):
    assert all((far[number][key] == near[number][key]).all() for key in near[number])

downloader = AzureDownloader()
downloader.download(odd, cache + "/odd")
client = downloader._azure_client
print(len(far), client.account_name, client.url)
"""


@pytest.fixture
def at_azure(
    store: Store, root: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Location]:
    """Return a new container, to which everything leads that talks to Azure."""
    with azurite.serve_as_azure(store.url, tmp_path) as settings:
        monkeypatch.delenv(azurite.VARIABLE)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield root


def test_streaming_reads_what_was_published_at_azures_own_address(
    at_azure: Location, project: Project, tmp_path: Path
) -> None:
    mix = at_azure / "a mix ü"
    project.write_source(TEXTS)
    project.configure(remote=mix.url).run()
    project.run("remote=null")
    assert read_location(mix / "web/train") == read_location(project.out / "web/train")
    assert mix.describe_access() == (
        f"endpoint https://{azurite.HOST}, credentials from AZURE_ACCOUNT_ACCESS_KEY"
    )

    run_ok("render-yaml", project.recipe, "-o", tmp_path / "train.yaml")
    rendered = (tmp_path / "train.yaml").read_text()
    (stream,) = yaml.safe_load(rendered)["train_loader"]["dataset"]["streams"].values()
    assert stream["remote"] == f"{mix}/web"
    assert f"azcopy copy --recursive 'https://{mix.path}/tokenizer-" in rendered

    odd = mix / "it's 50% (1) +x/ö.bin"
    odd.write(b"odd")
    arguments = (stream["remote"], project.out / "web", tmp_path / "cache", odd.url)
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    samples = len(read_samples(project.out / "web/train"))
    assert done.stdout.split() == [str(samples), azurite.ACCOUNT, f"https://{azurite.HOST}/"]
    assert (tmp_path / "cache/odd").read_bytes() == b"odd"
