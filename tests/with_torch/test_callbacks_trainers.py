"""The callbacks of Trainer and Lightning: what they log equals an independent count of the same
batches, losses are those of each stream alone, and a resumed run ends with the counts of an
uninterrupted one.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as lightning
import torch
from pytorch_lightning.loggers import CSVLogger
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from mdsmix.callbacks.lightning import LightningStreams, _import_lightning
from mdsmix.callbacks.run_file import read_run
from mdsmix.callbacks.trainer import TrainerStreams
from mdsmix.errors import RecipeError
from mdsmix.load import MixLoader, build_loader
from tests.with_torch.load_streams import IDS, PAIR, config, write_stream, write_tokens

pytestmark = pytest.mark.usefixtures("_release_loaders")
CHAT = 1000
"Ids from here on are of the stream `chat`, all others of `web`."
ROWS, STEPS = 6, 9
Sums = dict[str, list[float]]
"Stream -> samples, tokens, trained positions, sum of losses."


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A step of so small a model is over before a second thread has started."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("streams")
    chats = []
    for n in range(30):
        ids = np.arange(CHAT, CHAT + 1 + n % 3, dtype=np.uint16)
        chats.append({"input_ids": ids, "labels": ids[:1].repeat(1 + n % 5) + 7})
    return {
        "web": {"local": str(write_tokens(folder / "web", 24))},
        "chat": {"local": str(write_stream(folder / "chat", PAIR, chats))},
    }


def opened(mixed: Mapping[str, Any], **settings: Any) -> MixLoader:
    gc.collect()
    plain = {"shuffle": True, "drop_last": False, "max_seq_len": 12} | settings
    return build_loader(config(mixed, "mdsmix", **plain), ROWS, ids=IDS)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1100, num_hidden_layers=1, **shape))


def count_alone(mixed: Mapping[str, Any], name: str, model: LlamaForCausalLM) -> list[float]:
    """Count an epoch of one stream alone, row by row; the loss is the model's own."""
    samples = tokens = trained = 0
    loss = 0.0
    for batch in opened({name: mixed[name]}):
        for row in range(len(batch["input_ids"])):
            one = {key: value[row : row + 1] for key, value in batch.items()}
            one.pop("sequence_id")
            targets = sum(label != -100 for label in one["labels"][0, 1:].tolist())
            samples += 1
            tokens += sum(one["attention_mask"][0].tolist())
            trained += targets
            loss += model(**one).loss.item() * targets if targets else 0.0
    return [samples, tokens, trained, loss]


def counted(callback: Any) -> Sums:
    counts = callback.meter.tally.counts()
    return {name: [c.samples, c.tokens, c.trained, c.loss] for name, c in counts.items()}


class SaveLoaderState(TrainerCallback):
    """The callback in docs/loading.md."""

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
        path.write_text(json.dumps(objects["train_dataloader"].state_dict()))


class Recorder(TrainerCallback):
    """Stands for W&B: Trainer puts it before the callbacks of the user."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.logs.append(dict(objects["logs"]))


class MixTrainer(Trainer):
    mixed: Any
    settings: Mapping[str, Any] = {}
    begin: str | None = None
    takes_count = True
    "Whether Trainer tells the model by how many labels to divide."

    def get_train_dataloader(self) -> Any:
        loader = opened(self.mixed, **self.settings)
        if self.begin:
            loader.load_state_dict(json.loads(Path(self.begin, "loader.json").read_text()))
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        row = torch.arange(8)
        rows = [{"input_ids": row, "labels": row, "stream_id": torch.tensor(1)}] * 4
        return torch.utils.data.DataLoader(rows, batch_size=2)


def train(
    mixed: Any,
    folder: Path,
    streams: TrainerStreams,
    begin: Path | None = None,
    loader: Mapping[str, Any] = {},
    **keys: Any,
) -> tuple[MixTrainer, Recorder]:
    recorder = Recorder()
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 2}
    arguments = TrainingArguments(
        str(folder), **(quiet | {"save_strategy": "no", "ignore_data_skip": True, "seed": 1} | keys)
    )
    callbacks = [recorder, streams, SaveLoaderState()]
    trainer = MixTrainer(make_model(), arguments, eval_dataset=[0], callbacks=callbacks)
    trainer.mixed = mixed
    trainer.settings = loader
    trainer.model_accepts_loss_kwargs = trainer.takes_count
    trainer.begin = str(begin) if begin else None
    trainer.train(resume_from_checkpoint=trainer.begin)
    return trainer, recorder


@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_counts_each_stream(mixed: Any, tmp_path: Path, accumulated: int) -> None:
    model = make_model()
    expected = {name: count_alone(mixed, name, model) for name in mixed}
    streams = TrainerStreams(file=str(tmp_path / "run.jsonl"))
    trainer, recorder = train(
        mixed,
        tmp_path,
        streams,
        num_train_epochs=1,
        learning_rate=0.0,
        gradient_accumulation_steps=accumulated,
    )
    sums = counted(streams)
    for name, values in expected.items():
        assert sums[name][:3] == values[:3], name
        assert sums[name][3] == pytest.approx(values[3], rel=1e-5)

    # The loggers before the callback get the figures too, and so do log_history and the file.
    last = [log for log in recorder.logs if "loss" in log][-1]
    assert last["mdsmix/chat/samples"] <= 30
    history = [log for log in trainer.state.log_history if "mdsmix/chat/loss" in log]
    assert [log["step"] for log in history] == [*range(2, STEPS // accumulated + 1, 2)]
    run = read_run(str(tmp_path / "run.jsonl"))
    assert run.steps[-1].step == -(-STEPS // accumulated)
    assert run.steps[-1].streams["chat"].samples == 30
    assert run.steps[-1].streams["chat"].passes == 1
    assert run.planned_shares["web"]["samples"] == 24 / 54
    web_tokens = expected["web"][1] / (expected["web"][1] + expected["chat"][1])
    assert run.steps[-1].streams["web"].shares["tokens"] == web_tokens


def test_the_losses_of_streams_make_up_the_loss_of_the_trainer(
    mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every logged step, while the model learns.

    By default Trainer divides the sum by the labels of the batch, and counts the first label of a
    row, which gives no loss.
    """
    monkeypatch.setattr(MixTrainer, "takes_count", False)
    streams = TrainerStreams(file=str(tmp_path / "run.jsonl"))
    keys = {"logging_steps": 1, "learning_rate": 0.01, "max_steps": 6}
    trainer, _ = train(mixed, tmp_path, streams, **keys)
    trained = dict.fromkeys(mixed, 0)
    for log in [log for log in trainer.state.log_history if "loss" in log]:
        total = count = 0.0
        for name in mixed:
            positions = log[f"mdsmix/{name}/trained_tokens"] - trained[name]
            trained[name] += positions
            total += positions * log.get(f"mdsmix/{name}/loss", 0.0)
            count += positions
        assert total / count == pytest.approx(log["loss"], abs=1e-3), log["step"]
    assert count


def test_trainer_counts_packed_rows_by_token(mixed: Any, tmp_path: Path) -> None:
    """Every row is joined of samples of both streams."""
    settings = {"packing_ratio": 2, "max_seq_len": 16}
    tokens: dict[bool, int] = {True: 0, False: 0}
    trained: dict[bool, int] = {True: 0, False: 0}
    starts: dict[bool, int] = {True: 0, False: 0}
    for batch in opened(mixed, **settings):
        for ids, labels, documents in zip(
            batch["input_ids"].tolist(),
            batch["labels"].tolist(),
            batch["sequence_id"].tolist(),
            strict=True,
        ):
            is_chat = False
            for place, (token, label, document) in enumerate(
                zip(ids, labels, documents, strict=True)
            ):
                if document < 0:
                    continue
                is_new = place == 0 or documents[place - 1] != document
                # EOS, appended to chats, has the id of none.
                is_chat = token >= CHAT if is_new else is_chat
                starts[is_chat] += is_new
                tokens[is_chat] += 1
                trained[is_chat] += label != -100 and place > 0
    streams = TrainerStreams()
    train(mixed, tmp_path, streams, loader=settings, num_train_epochs=1, learning_rate=0.0)
    sums = counted(streams)
    for name, is_chat in (("web", False), ("chat", True)):
        assert sums[name][:3] == [starts[is_chat], tokens[is_chat], trained[is_chat]]
        assert sums[name][3] > 0


def test_trainer_resumes_exactly_and_evaluates(mixed: Any, tmp_path: Path) -> None:
    keys = {"max_steps": 14, "save_strategy": "steps", "save_steps": 5, "learning_rate": 0.01}
    keys |= {"eval_strategy": "steps", "eval_steps": 4, "num_train_epochs": 2}
    whole = TrainerStreams(file=str(tmp_path / "run.jsonl"))
    train(mixed, tmp_path / "saved", whole, **keys)
    assert sum(values[0] for values in counted(whole).values()) == 14 * ROWS, "none of evaluations"
    lines = read_run(str(tmp_path / "run.jsonl")).steps
    with (tmp_path / "run.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "str')  # a run that was killed

    more = TrainerStreams(file=str(tmp_path / "run.jsonl"))
    train(mixed, tmp_path / "more", more, tmp_path / "saved/checkpoint-5", **keys)
    assert counted(more) == counted(whole)
    assert read_run(str(tmp_path / "run.jsonl")).steps == lines
    assert (tmp_path / "saved/checkpoint-5/trainer_state.json").read_text().count("saved") == 1


def test_trainer_refuses_what_hides_labels_or_streams(mixed: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="label_smoothing_factor"):
        train(mixed, tmp_path, TrainerStreams(), label_smoothing_factor=0.1, max_steps=1)
    trainer = Trainer(
        make_model(),
        TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1),
        train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 4,
        callbacks=[TrainerStreams()],
    )
    with pytest.raises(RecipeError, match="name: mdsmix"):
        trainer.train()


class Lit(lightning.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.model = make_model()
        self.rate = rate

    def training_step(self, batch: Any, index: int) -> Any:
        assert "stream_id" not in batch
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class LitTwice(Lit):
    def training_step(self, batch: Any, index: int) -> Any:
        self.model(**batch)
        return self.model(**batch).loss


def fit(
    mixed: Any, folder: Path, streams: LightningStreams, lit: Any = None, **keys: Any
) -> lightning.Trainer:
    begin = keys.pop("ckpt_path", None)
    plain = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    plain |= {"logger": CSVLogger(folder, name="log", version=0), "log_every_n_steps": 2}
    saving = lightning.callbacks.ModelCheckpoint(
        dirpath=folder / "saved", save_top_k=-1, every_n_train_steps=5, filename="{step}"
    )
    trainer = lightning.Trainer(
        callbacks=[streams, saving],
        use_distributed_sampler=False,
        **(plain | {"max_epochs": 1} | keys),
    )
    trainer.fit(lit or Lit(0.0), opened(mixed), ckpt_path=begin, weights_only=False)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_lightning_counts_each_stream(mixed: Any, tmp_path: Path) -> None:
    model = make_model()
    streams = LightningStreams(file=str(tmp_path / "run.jsonl"))
    fit(mixed, tmp_path, streams, accumulate_grad_batches=2)
    sums = counted(streams)
    for name in mixed:
        expected = count_alone(mixed, name, model)
        assert sums[name][:3] == expected[:3], name
        assert sums[name][3] == pytest.approx(expected[3], rel=1e-5)
    written = (tmp_path / "log/version_0/metrics.csv").read_text()
    assert "mdsmix/chat/loss" in written.splitlines()[0]
    run = read_run(str(tmp_path / "run.jsonl"))
    assert [line.step for line in run.steps] == [2, 4, 5]
    assert run.steps[-1].streams["web"].passes == 1


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_exactly(mixed: Any, tmp_path: Path) -> None:
    whole = LightningStreams()
    fit(mixed, tmp_path, whole, Lit(0.1), max_epochs=2)
    more = LightningStreams()
    begin = tmp_path / "saved/step=5.ckpt"
    fit(mixed, tmp_path / "more", more, Lit(0.1), max_epochs=2, ckpt_path=begin)
    assert counted(more) == counted(whole)
    assert counted(more)["web"][0] == 48


@pytest.mark.filterwarnings("ignore")
def test_lightning_refuses_a_step_with_two_calls(mixed: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="called the model twice"):
        fit(mixed, tmp_path, LightningStreams(), LitTwice(0.0))
    alone = LightningStreams(losses=False)
    fit(mixed, tmp_path, alone, LitTwice(0.0))
    assert counted(alone)["web"] == [24, 192, 168, 0.0]


def test_the_package_of_lightning_that_is_imported_is_the_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its two packages have different classes, and a Trainer takes only its own."""
    assert _import_lightning() is lightning
    assert issubclass(LightningStreams, lightning.Callback)
    other = object()
    monkeypatch.setitem(sys.modules, "lightning.pytorch", other)
    assert _import_lightning() is other
