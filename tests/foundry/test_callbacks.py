"""`callbacks: {mdsmix_streams: {}}`: the unmodified `llmfoundry train` logs how much of each stream
it has trained, and its loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mdsmix.callbacks.run_file import LoggedStep, read_run
from tests.converting import chats, documents, pairs, run_ok, write_jsonl
from tests.foundry.conftest import LLMFOUNDRY, TINY, Foundry, Lab
from tests.preloaded import SECONDS, PreloadedPython
from tests.with_torch.load_streams import run_ranks

COUNT = 16
"Samples of each stream, so that three streams are six global batches of eight."
ORDER = {"eos_token_id": 0, "shuffle": True}
LOADER = {"name": "mdsmix", "num_workers": 0, "dataset": ORDER}


def write_sources(folder: Path) -> dict[str, Any]:
    """Write three small sources of different lengths, and return their streams."""
    words = ["one two three", "four five", "six seven eight nine ten", "eleven"]
    texts = [{"text": " ".join(words * (1 + n % 2))} for n in range(COUNT)]
    asked = [{"prompt": f"{n}?", "response": " ".join(words[: n % 4 + 1])} for n in range(COUNT)]
    talked = []
    for n in range(COUNT):
        turns = [{"role": "user", "content": f"Which {n}?"}]
        turns.append({"role": "assistant", "content": " ".join(words[: 1 + n % 3])})
        talked.append({"messages": turns})
    return {
        "web": documents(write_jsonl(folder / "web.jsonl", texts), layout="document"),
        "faq": pairs(write_jsonl(folder / "faq.jsonl", asked)),
        "chat": chats(write_jsonl(folder / "chat.jsonl", talked)),
    }


def rendered(lab: Lab, **settings: Any) -> Path:
    """Return the config of the tiny model on the three streams, with the callback."""
    plain = {"streams": write_sources(lab.folder), "max_seq_len": 64, "train_loader": LOADER}
    recipe = lab.converted(**(plain | settings))
    config = recipe.with_name("train.yaml")
    run_ok("render-yaml", recipe, "--into", TINY, "-o", config, "--callback")
    return config


def keys(file: Path, **settings: Any) -> list[str]:
    """Return the callback's settings as words of the command line."""
    settings = {"file": file, **settings}
    return [f"callbacks.mdsmix_streams.{key}={value}" for key, value in settings.items()]


def test_two_ranks_count_each_stream(programs: PreloadedPython, lab: Lab, foundry: Foundry) -> None:
    """The counts of an epoch are those of the streams read alone, and so are the losses, of a model
    that does not learn. A step has two microbatches on each rank.
    """
    config = rendered(lab)
    expected = foundry("streams.alone", path=str(config), names=["web", "faq", "chat"])
    file = lab.folder / "run.jsonl"
    words = ["max_duration=1ep", "optimizer.lr=0.0", "device_train_microbatch_size=2"]
    words += keys(file, log_every=4)
    ended = run_ranks(programs, LLMFOUNDRY, "train", config, *words, seconds=SECONDS)
    assert "mdsmix/chat/loss" in ended[0].stdout + ended[0].stderr

    run = read_run(str(file))
    assert [line.step for line in run.steps] == [4, 6], "and the last step of the run"
    for name, (samples, tokens, trained, loss) in expected.items():
        stream = run.steps[-1].streams[name]
        assert (stream.samples, stream.tokens, stream.trained) == (samples, tokens, trained), name
        assert stream.passes == 1
        assert stream.mean_loss == pytest.approx(loss / trained, rel=1e-4), name
        planned = {stream.name: stream for stream in run.planned}[name]
        assert (planned.samples, planned.tokens, planned.trained) == (samples, tokens, trained)


def test_packed_rows_in_uneven_microbatches(lab: Lab, foundry: Foundry) -> None:
    """The losses of the streams make up the loss that Composer logs."""
    dataset = {**ORDER, "packing_ratio": 1.5}
    config = str(rendered(lab, train_loader={**LOADER, "dataset": dataset}))
    file = lab.folder / "run.jsonl"
    words = ["device_train_microbatch_size=3", "accumulate_train_batch_on_tokens=true"]
    words += keys(file, log_every=1)
    told = foundry("train.metrics", path=config, steps=4, settings=words)
    before: dict[str, int] = {}
    steps = read_run(str(file)).steps
    for line, loss in zip(steps, told["loss/train/total"], strict=True):
        assert weigh(line, before) == pytest.approx(loss, rel=1e-4), line.step
    assert sum(stream.samples for stream in steps[-1].streams.values()) > 4 * 8


def test_a_resumed_run_writes_the_figures_of_an_uninterrupted_one(
    lab: Lab, foundry: Foundry
) -> None:
    """And the losses of the streams make up the loss that Composer logs."""
    config = str(rendered(lab))
    saving = [f"save_folder={lab.folder}/saved", "save_interval=5ba"]
    names = ("whole", "resumed")
    files = [lab.folder / f"{name}.jsonl" for name in names]
    logging = [keys(file, log_every=1) for file in files]
    whole = foundry("train.metrics", path=config, steps=9, settings=[*saving, *logging[0]])
    foundry("train.metrics", path=config, steps=7, settings=logging[1])
    resuming = [f"load_path={lab.folder}/saved/ep0-ba5-rank0.pt", *logging[1]]
    foundry("train.metrics", path=config, steps=9, settings=resuming)
    steps = read_run(str(files[0])).steps
    assert len(steps) == 9
    assert read_run(str(files[1])).steps == steps
    assert whole["mdsmix/chat/loss"] == [
        line.streams["chat"].loss for line in steps if line.streams["chat"].loss is not None
    ]

    before: dict[str, int] = {}
    for line, loss in zip(steps, whole["loss/train/total"], strict=True):
        assert weigh(line, before) == pytest.approx(loss, rel=1e-4), line.step


def weigh(line: LoggedStep, before: dict[str, int]) -> float:
    """Return the mean of the streams' losses of a step, weighted by their trained positions.

    Args:
        before: trained positions of each stream before the step; they are brought up to date.
    """
    total = count = 0.0
    for name, stream in line.streams.items():
        positions = stream.trained - before.get(name, 0)
        before[name] = stream.trained
        total += positions * (stream.loss or 0)
        count += positions
    return total / count


def test_a_loader_of_llm_foundry_is_refused_before_and_at_the_start(
    lab: Lab, foundry: Foundry
) -> None:
    streams = {"faq": write_sources(lab.folder)["faq"]}
    recipe = lab.converted(streams=streams, max_seq_len=64, train_loader={"num_workers": 0})
    config = recipe.with_name("train.yaml")
    run_ok("render-yaml", recipe, "--into", TINY, "-o", config)
    started = foundry(
        "train.failure",
        path=str(config),
        steps=2,
        settings=["callbacks.mdsmix_streams.log_every=1"],
    )
    assert "mdsmix_streams" in started
    assert "name: mdsmix" in started


COMPOSER = """
from composer import DataSpec, Trainer
from composer.models import HuggingFaceModel
from mdsmix.callbacks.composer import ComposerStreams
from mdsmix.load import build_loader

spec = DataSpec(build_loader(CONFIG, batch_size=8))
streams = ComposerStreams(log_every=1, file=FILE)
trainer = Trainer(
    model=HuggingFaceModel(model), train_dataloader=spec, max_duration="1ep", callbacks=[streams]
)
trainer.fit()
"""


def test_composer_without_llm_foundry_counts_a_model_of_transformers(
    lab: Lab, foundry: Foundry
) -> None:
    config = rendered(lab)
    file = lab.folder / "run.jsonl"
    code = COMPOSER.replace("CONFIG", repr(str(config))).replace("FILE", repr(str(file)))
    assert foundry("train.run", code=code) == 6
    steps = read_run(str(file)).steps
    assert [line.step for line in steps] == [1, 2, 3, 4, 5, 6]
    for stream in steps[-1].streams.values():
        assert (stream.samples, stream.passes) == (COUNT, 1)
        assert stream.mean_loss == pytest.approx(7.6, abs=0.4), (
            "ln 2048, of a model that knows none"
        )
