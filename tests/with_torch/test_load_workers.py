"""Workers that are forked by a server, the default from Python 3.14 on, give the same batches as
forked ones. Their dataset is pickled, as for spawned workers, which take 20 s each to start.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import islice
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from torch.utils.data._utils.worker import WorkerInfo

from mdsmix.errors import RecipeError
from mdsmix.load import MixLoader, build_loader, training_rows
from tests.converting import run_ok, run_recipe
from tests.pictures import record, write_drawings
from tests.with_torch.load_streams import PAIR, first_tokens, loaded, pair, write_stream
from tests.with_torch.load_streams import write_tokens as write_text
from tests.with_torch.seeing import Folders, rendered, written
from tests.with_torch.test_preferences import RECORDED, converted, records_of

pytestmark = pytest.mark.usefixtures("_release_loaders", "_server")
WORKERS = {"num_workers": 2, "prefetch_factor": 2, "shuffle": True, "drop_last": True}
Batches = list[dict[str, Any]]


@pytest.fixture(scope="module")
def _server() -> None:
    """Make the fork server import the loader, so that its workers start at once.

    The server ends when this process does, after pytest has deleted its temporary folder, so its
    socket must be somewhere else.
    """
    multiprocessing.set_forkserver_preload(["mdsmix.load"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/tmp")
        get_temp_dir()


def read(loader: MixLoader, count: int | None = None) -> Batches:
    """Read batches as lists; all of a pass by default."""
    return [{k: v.tolist() for k, v in batch.items()} for batch in islice(loader, count)]


def read_and_resume(loader: MixLoader, method: str) -> list[Batches]:
    """Read a pass, then go on in the middle of the next one, then read another."""
    loader.multiprocessing_context = method
    first = read(loader)
    read(loader, 3)
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    passes = [first, read(loader), read(loader)]
    loader.end()
    return passes


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, Any]:
    folders = [
        write_text(tmp_path / "tokens", 40, size_limit=200),
        write_stream(tmp_path / "pairs", PAIR, [pair(i) for i in range(40)], size_limit=300),
    ]
    return {folder.name: {"remote": str(folder)} for folder in folders}


def opened(mixed: dict[str, Any], copy: Path, **settings: Any) -> MixLoader:
    """Open a loader with a cache of its own."""
    streams = {n: {**s, "local": str(copy / n)} for n, s in mixed.items()}
    return loaded(streams, 4, "mdsmix", **{**WORKERS, **settings})


@pytest.mark.parametrize(("is_persistent", "packing_ratio"), [(True, 1), (False, 2)])
def test_a_fork_server_gives_the_same_batches(
    mixed: dict[str, Any], tmp_path: Path, is_persistent: bool, packing_ratio: int
) -> None:
    """Also if this process has read the dataset, which then has locks and a client of a store. Cut
    rows are warned of once, in any worker.
    """
    settings = {"persistent_workers": is_persistent, "packing_ratio": packing_ratio}
    forked = opened(mixed, tmp_path / "a", max_seq_len=7, **settings)
    expected = read_and_resume(forked, "fork")
    assert len(expected[0]) > len(expected[1]) > 0
    training_rows.last_warned.fill_(0)
    served = opened(mixed, tmp_path / "b", max_seq_len=7, **settings)
    assert len(served.dataset[0].input_ids) > 0
    served.dataset.streams[0]._downloader.client = threading.Lock()
    assert read_and_resume(served, "forkserver") == expected
    assert training_rows.last_warned.item() == 7


def test_forked_workers_read_a_dataset_that_this_process_has_read(
    mixed: dict[str, Any], tmp_path: Path
) -> None:
    """A forked worker has none of this process's threads, and must not wait for them."""
    loader = opened(mixed, tmp_path / "a", timeout=20)
    loader.multiprocessing_context = "fork"
    list(islice(loader.dataset, 3))
    assert len(first_tokens(loader)) == 80


def test_a_spawned_worker_refuses_batches_that_trainer_five_skips(
    mixed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has not imported Trainer itself."""
    loader = opened(mixed, tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.24.0"))
        patch.setitem(sys.modules, "transformers.trainer", SimpleNamespace())
        pickled = pickle.dumps(loader.dataset)
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    keep = training_rows.last_warned
    received = pickle.loads(pickled)
    training_rows.last_warned = keep
    worker = WorkerInfo(id=0, num_workers=1, seed=0, dataset=received)
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", worker)
    with pytest.raises(RecipeError, match="Trainer"):
        next(iter(received))


def test_a_fork_server_gives_preferences(tmp_path: Path, tokenizer_folder: Path) -> None:
    case = RECORDED["cases"][0]
    names = {key: key for key in case["rows"][0]}
    converted(tmp_path, tokenizer_folder, records_of(case["rows"], tokenizer_folder), **names)
    run_ok("render-yaml", tmp_path / "recipe.yaml", "-o", tmp_path / "train.yaml")
    config = yaml.safe_load((tmp_path / "train.yaml").read_text())
    config["train_loader"] |= {"num_workers": 1, "prefetch_factor": 2}
    compare(lambda: build_loader(config, 2))


@pytest.mark.usefixtures("_looks_here")
def test_a_fork_server_gives_images(tmp_path: Path, processors: Folders) -> None:
    paths = write_drawings(tmp_path / "img", 2, (70, 40))
    records = [record(str(path.relative_to(tmp_path))) for path in paths]
    recipe = written(tmp_path, processors["qwen"], records)
    run_recipe(recipe)
    config = yaml.safe_load(Path(rendered(recipe)).read_text())
    config["train_loader"] |= {"num_workers": 1, "prefetch_factor": 2}
    compare(lambda: build_loader(config, 2))


def compare(build: Callable[[], MixLoader]) -> None:
    """Check that a fork server's worker gives the same batches as a forked one."""
    batches = []
    for method in ("fork", "forkserver"):
        loader = build()
        loader.multiprocessing_context = method
        batches.append(read(loader))
        loader.end()
        del loader
    forked, served = batches
    assert forked == served != []


def test_a_script_without_a_main_guard_is_named_in_its_workers(
    mixed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the first lines of a notebook or a README, under `spawn` or Python 3.14."""
    worker = multiprocessing.current_process()
    monkeypatch.setattr(worker, "_inheriting", True, raising=False)
    with pytest.raises(RecipeError, match="if __name__ == "):
        opened(mixed, tmp_path)
