"""A run that stops and goes on reads what an undisturbed one reads, under every trainer, also from
the end of an epoch.
"""

from __future__ import annotations

import gc
import json
from itertools import islice
from pathlib import Path
from typing import Any

import accelerate
import pytest
import pytorch_lightning as lightning
import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from mdsmix.errors import RecipeError
from mdsmix.load import MixLoader
from tests.preloaded import Standing
from tests.versions import IS_TRANSFORMERS_4
from tests.with_torch.load_streams import config, first_tokens, ranks
from tests.with_torch.test_load_lock import opened, publish

pytestmark = pytest.mark.usefixtures("_release_loaders")
STEPS = 11
"Batches of eight of the 90 samples of an epoch; two samples are left over."
Passes = list[list[int]]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("resume")
    return {"a": publish(folder / "a", range(10, 70)), "b": publish(folder / "b", range(70, 100))}


def loaded(mixed: dict[str, Any], **settings: Any) -> MixLoader:
    return opened(mixed, **{"drop_last": True, **settings})


def passes(loader: MixLoader, count: int) -> Passes:
    return [first_tokens(loader) for _ in range(count)]


def kept(state: Any) -> Any:
    """A state as a checkpoint keeps it."""
    return json.loads(json.dumps(state))


WORKERS = {"num_workers": 2, "prefetch_factor": 2}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"drop_last": False},
    WORKERS | {"persistent_workers": False},
    WORKERS | {"persistent_workers": True},
    {"batching_method": "per_stream"},
    {"packing_ratio": 2, "max_seq_len": 16},
    # Streaming rounds this epoch up to 128 samples, and begins none at 128.
    {"drop_last": False, "shuffle_algo": "py1s", "num_canonical_nodes": 64},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(mixed: Any, settings: Any) -> None:
    """Whether the state is taken with the last batch or after the pass, and however often."""
    whole = passes(loaded(mixed, **settings), 3)
    assert whole[0] != whole[1] != whole[2]
    loader = loaded(mixed, **settings)
    for _ in loader:
        state = loader.state_dict()
    assert loader.state_dict() == state
    del loader
    for _ in range(2):
        resumed = loaded(mixed, **settings)
        resumed.load_state_dict(kept(state))
        state = resumed.state_dict()
        del resumed
    resumed = loaded(mixed, **settings)
    resumed.load_state_dict(kept(state))
    assert passes(resumed, 2) == whole[1:]


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[3]], ids=str)
def test_a_state_is_honoured_by_a_loader_that_was_iterated(mixed: Any, settings: Any) -> None:
    """After whole passes, in the middle of one, and one state after another; the pass that was read
    before cannot go on.
    """
    first = loaded(mixed, **settings)
    list(islice(first, 3))
    early = kept(first.state_dict())
    rest = first_tokens(loaded_at(mixed, early, settings))
    assert len(rest) == (STEPS - 3) * 8
    second, third = passes(first, 2)
    late = kept(first.state_dict())
    for state, wanted in ((early, [rest, second, third]), (late, passes(first, 2))):
        first.load_state_dict(state)
        assert first.state_dict() == state
        assert passes(first, len(wanted)) == wanted
    reading = iter(first)
    next(reading)
    first.load_state_dict(late)
    first.load_state_dict(early)
    with pytest.raises(RecipeError, match="only the last pass can be read"):
        next(reading)
    assert first.state_dict() == early
    half = first_tokens(islice(first, 4))
    assert half == rest[:32]
    assert first.state_dict()["sample_in_epoch"] == 56
    first.load_state_dict(first.state_dict())
    assert passes(first, 2) == [rest[32:], second]


def loaded_at(mixed: Any, state: Any, settings: Any) -> MixLoader:
    """Another loader of the same folders would be refused: these are copies."""
    at = {n: {"remote": s["local"], "local": f"{s['local']}-copy"} for n, s in mixed.items()}
    loader = loaded(at, **settings)
    loader.load_state_dict(state)
    return loader


TWO_RANKS = """
import json, sys
from mdsmix.load import build_loader
from tests.with_torch.load_streams import IDS, first_tokens
loader = build_loader(json.loads(sys.argv[1]), 4, ids=IDS)
seen = [first_tokens(loader) for _ in range(2)]
for place in (88, 40):
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "sample_in_epoch": place})
    seen.append(first_tokens(loader))
print(json.dumps(seen))
"""


def test_ranks_go_on_together(mixed: Any, programs: Standing) -> None:
    """From the end of an epoch and from the middle of one that is behind, with two workers
    a rank.
    """
    settings = config(mixed, "mdsmix", shuffle=True, drop_last=True, **WORKERS)
    started = ranks(programs, TWO_RANKS, json.dumps(settings))
    ended = [program.wait() for program in started]
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr[-3000:]
    for each in ended:
        first, second, after_88, after_40 = json.loads(each.stdout)
        assert after_88 == second != first
        assert after_40 == first[20:]


def test_of_two_passes_the_last_one_is_read(mixed: Any) -> None:
    loader = loaded(mixed)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(RecipeError, match="only the last pass can be read"):
        next(first)
    assert len(list(second)) == STEPS - 1


class Bare(PreTrainedModel):
    """One weight, so that a trainer has a loss."""

    config_class = PretrainedConfig
    seen: list[int]

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, input_ids: Any, labels: Any = None, **rest: Any) -> Any:
        self.seen.append(int(input_ids[0, 0]))
        return {"loss": self.weight * input_ids.float().mean()}


class KeepPlace(TrainerCallback):
    """As docs/loading.md has it."""

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
        path.write_text(json.dumps(objects["train_dataloader"].state_dict()))


class OnMix(Trainer):
    mixed: Any
    place: Path | None = None

    def get_train_dataloader(self) -> Any:
        loader = loaded(self.mixed)
        if self.place:
            loader.load_state_dict(json.loads(self.place.read_text()))
        return loader


def trained(mixed: Any, folder: Path, begin: Path | None = None, **keys: Any) -> list[int]:
    """The first token of each step's batch."""
    gc.collect()
    at = begin / "loader.json" if begin else None
    given = {"num_train_epochs": 3, "save_strategy": "no", "ignore_data_skip": True, **keys}
    with_state = given.pop("with_state", True)
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    model = Bare()
    trainer = OnMix(model, Arguments(str(folder), **quiet, **given), callbacks=[KeepPlace()])
    trainer.mixed, trainer.place = mixed, at if with_state else None
    trainer.train(resume_from_checkpoint=str(begin) if begin else None)
    return model.seen


def test_trainer_goes_on(mixed: Any, tmp_path: Path) -> None:
    whole = trained(mixed, tmp_path / "whole")
    assert len(whole) == 3 * STEPS
    saved = tmp_path / "saved"
    trained(mixed, saved, num_train_epochs=1, save_strategy="epoch")
    trained(mixed, saved, num_train_epochs=2, save_strategy="steps", save_steps=7)
    for step in (7, STEPS, 14, 21):
        begin = saved / f"checkpoint-{step}"
        assert trained(mixed, tmp_path / "more", begin) == whole[step:], step
    # Trainer's own way reads the batches of the epoch without a state, and passes over them. That
    # of transformers 5 reads those of the first epoch, whatever the epoch is.
    without = {"with_state": False, "ignore_data_skip": False}
    if IS_TRANSFORMERS_4:
        assert trained(mixed, tmp_path / "more", saved / "checkpoint-14", **without) == whole[14:]
    else:
        with pytest.raises(RecipeError, match="has not set the epoch"):
            trained(mixed, tmp_path / "more", saved / "checkpoint-14", **without)


def test_trainer_that_would_skip_twice_is_refused(mixed: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    trained(mixed, saved, num_train_epochs=1, save_strategy="steps", save_steps=3)
    with pytest.raises(RecipeError, match=r"skipped twice.*ignore_data_skip=True"):
        trained(mixed, tmp_path / "more", saved / "checkpoint-3", ignore_data_skip=False)


def test_accelerate_keeps_the_place_of_a_prepared_loader(mixed: Any, tmp_path: Path) -> None:
    whole = [token for each in passes(loaded(mixed), 3) for token in each]

    def goes_on(stop: int, begin: Path | None, end: Path | None) -> list[int]:
        gc.collect()
        accelerator, loader = accelerate.Accelerator(cpu=True), loaded(mixed)
        assert accelerator.prepare(loader) is loader, "it divides its batches by itself"
        if begin:
            accelerator.load_state(str(begin))
        seen: list[int] = []
        while len(seen) < 8 * stop:
            for batch in loader:
                seen += batch["input_ids"][:, 0].tolist()
                if len(seen) == 8 * stop:
                    break
        if end:
            accelerator.save_state(str(end))
        accelerator.free_memory()
        return seen

    for step in (4, STEPS, 15):
        folder = tmp_path / str(step)
        assert goes_on(step, None, folder) == whole[: 8 * step]
        assert goes_on(3 * STEPS - step, folder, None) == whole[8 * step :]


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.bare = Bare()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.bare(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on(mixed: Any, tmp_path: Path) -> None:
    """Its checkpoint of the end of an epoch is not handed to the loader: Lightning says which epoch
    begins.
    """

    def fitted(epochs: int, begin: Path | None = None, **saving: Any) -> list[int]:
        gc.collect()
        keep: dict[str, Any] = {"dirpath": tmp_path, "save_top_k": -1, "filename": "{step}"}
        writes: list[Any] = (
            [lightning.callbacks.ModelCheckpoint(**keep, **saving)] if saving else []
        )
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            callbacks=writes,
            enable_checkpointing=bool(saving),
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        lit = Lit()
        trainer.fit(lit, loaded(mixed), ckpt_path=begin, weights_only=False)
        return lit.bare.seen

    whole = fitted(3)
    assert len(whole) == 3 * STEPS
    for saving in (
        {"every_n_epochs": 1},
        {"every_n_train_steps": STEPS},
        {"every_n_train_steps": 7},
    ):
        fitted(2, **saving)
        written = sorted(tmp_path.glob("*.ckpt"))
        assert len(written) > 1
        for path in written:
            step = torch.load(path, weights_only=False)["global_step"]
            assert fitted(3, path) == whole[step:], (saving, step)
            path.unlink()
