"""Exports of every kind of stream, read by the trainers' own readers: `make test-exports`.

What each row must be comes from mdsmix's loader, which shares no code with an export
(`tests/every_kind.py`). The packages are installed without what they need for training, in
`.venv-exports`, next to the torch and transformers of `.venv-today`.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import mdsmix
from mdsmix.errors import RecipeError
from mdsmix.exporting.writers import WRITERS
from mdsmix.shapes import SHAPES
from tests.converting import run_recipe, write_jsonl, write_recipe
from tests.every_kind import (
    FINETUNING,
    PACKED,
    PLAIN,
    ROW,
    Row,
    Streams,
    expected_preferences,
    expected_unpaired,
    make_unpaired_records,
    publish_every_kind,
)

EOS = 0
pytestmark = [
    pytest.mark.filterwarnings("ignore:The loader cuts rows"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CONTENT = {
    "parquet": (*PLAIN, *FINETUNING, "preferences", "unpaired"),
    "litdata": (*PLAIN, *FINETUNING, "preferences"),
    "megatron": PLAIN,
    "megatron-bridge": PACKED,
}
"Format -> the streams that it can contain."


@pytest.fixture(scope="session")
def streams(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Streams:
    return publish_every_kind(tmp_path_factory.mktemp("streams"), tokenizer_folder)


@pytest.fixture(scope="session")
def exported(streams: Streams, tmp_path_factory: pytest.TempPathFactory) -> Mapping[Any, Path]:
    """(format, stream) -> the folder of its export, for all that a format does not refuse."""
    folders = {}
    for to in WRITERS:
        for name in (*PLAIN, *FINETUNING, "preferences", "unpaired"):
            out = tmp_path_factory.mktemp("out")
            try:
                mdsmix.export(str(streams.url(name)), to=to, out=out, progress=False)
            except RecipeError:
                continue
            folders[to, name] = out
    return folders


def test_each_format_takes_what_it_can_contain(exported: Mapping[Any, Path]) -> None:
    assert {*exported} == {(to, name) for to, names in CONTENT.items() for name in names}


# Megatron-Core: documents.


@pytest.mark.parametrize("name", CONTENT["megatron"])
def test_megatron_core_reads_the_documents(
    streams: Streams, exported: Mapping[Any, Path], name: str
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = list[list[int]]()
    for row in streams.rows(name):
        ends = np.cumsum(row.lengths)[:-1]
        documents += [part.tolist() for part in np.split(np.array(row.ids), ends)]
    dataset = IndexedDataset(str(exported["megatron", name] / "train"))
    assert [dataset[number].tolist() for number in range(len(dataset))] == documents
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    assert dataset.sequence_lengths.tolist() == [*map(len, documents)]
    assert dataset.index.dtype == np.uint16
    totals = streams.manifest(name).totals
    assert sum(map(len, documents)) == totals.tokens


def test_megatron_core_reads_the_weights(streams: Streams, tmp_path: Path) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    result = mdsmix.export(
        str(streams.recipe),
        to="megatron",
        out=tmp_path,
        only=["concat", "document"],
        progress=False,
    )
    assert result.data_args is not None
    prefixes, weights = get_blend_from_list(result.data_args.read_text().split())
    assert prefixes == [f"{tmp_path}/{name}/train" for name in ("concat", "document")]
    tokens = [streams.manifest(name).totals.tokens for name in ("concat", "document")]
    assert weights == pytest.approx([amount / sum(tokens) for amount in tokens], abs=1e-6)


# Megatron-Bridge: packed rows.


@pytest.fixture(scope="session")
def packed_dataset() -> Any:
    """The class of Megatron-Bridge that reads packed Parquet. Its package's `__init__` imports all
    models, and one of them a module that transformers 5.24 no longer has; here only the modules
    that the class imports are loaded.
    """
    import megatron.core

    root = Path(megatron.core.__file__).parents[1] / "bridge"
    for path in ("", "data", "data/packing", "data/datasets", "training", "training/tokenizers", "utils"):  # fmt: skip
        module = types.ModuleType(".".join(["megatron", "bridge", *path.split("/")]).rstrip("."))
        module.__path__ = [str(root / path)]
        sys.modules[module.__name__] = module
    return import_module("megatron.bridge.data.packing.parquet").GPTSFTPackedParquetDataset


@pytest.mark.parametrize("name", CONTENT["megatron-bridge"])
def test_megatron_bridge_trains_the_same_tokens(
    streams: Streams, exported: Mapping[Any, Path], packed_dataset: Any, name: str
) -> None:
    expected = streams.rows(name)
    dataset = packed_dataset(
        file_path=str(exported["megatron-bridge", name]),
        tokenizer=types.SimpleNamespace(eos_id=EOS),
        max_seq_length=ROW,
        prompt_template="{input} {answer}",  # demanded, and not used for packed rows
        truncation_field="input",
    )
    assert len(dataset) == len(expected)
    trained = 0
    for number, expected_row in enumerate(expected):
        item = dataset[number]
        starts = item["seq_boundaries"][:-1]
        dataset.validate_row(number, item["input_ids"], item["loss_mask"], starts)
        batch = dataset.collate_fn([item])
        inputs, targets, mask, positions = _predictions(expected_row)
        size = len(inputs)
        assert batch["tokens"][0, :size].tolist() == inputs
        assert batch["labels"][0, :size].tolist() == targets
        assert batch["loss_mask"][0, :size].tolist() == mask
        assert not batch["loss_mask"][0, size:].any()
        assert batch["position_ids"][0, :size].tolist() == positions
        edges = np.cumsum([0, *(length - 1 for length in expected_row.lengths)])
        assert batch["cu_seqlens_q"][0, : len(edges)].tolist() == edges.tolist()
        trained += int(batch["loss_mask"].sum())
    assert trained == streams.manifest(name).totals.loss_tokens


def _predictions(row: Row) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the input, target, mask and position of each prediction within a document."""
    inputs, targets, mask, positions = [], [], [], []
    start = 0
    for length in row.lengths:
        stop = start + length
        inputs += row.ids[start : stop - 1]
        targets += row.ids[start + 1 : stop]
        mask += [int(label != -100) for label in row.labels[start + 1 : stop]]
        positions += range(length - 1)
        start = stop
    return inputs, targets, mask, positions


# TRL, datasets, axolotl: Parquet.


def load_rows(folder: Path, cache: Path) -> Any:
    from datasets import load_dataset

    files = str(folder / "train-*.parquet")
    return load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))


def make_model(tokenizer_folder: Path) -> tuple[Any, Any]:
    """Return a tiny model and its tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4 * ROW,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config), tokenizer


@pytest.mark.parametrize("name", ["document", "every_answer", "conversations", "packed_chats"])
def test_trl_trains_the_same_tokens(
    streams: Streams,
    exported: Mapping[Any, Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    name: str,
) -> None:
    from trl import SFTConfig, SFTTrainer

    is_packed = name in PACKED
    model, tokenizer = make_model(tokenizer_folder)
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        max_length=None,
        padding_free=is_packed,
        per_device_train_batch_size=1 if is_packed else 4,
        report_to=[],
        use_cpu=True,
        max_steps=1,
        save_strategy="no",
    )
    rows = load_rows(exported["parquet", name], tmp_path)
    trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    actual = []
    for batch in trainer.get_train_dataloader():
        if is_packed:
            begins = torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist()
            lengths = np.diff([*begins, batch["input_ids"].shape[1]]).tolist()
            actual.append((batch["input_ids"][0].tolist(), batch["labels"][0].tolist(), lengths))
            continue
        for ids, labels, mask in zip(*(batch[k] for k in ("input_ids", "labels", "attention_mask")), strict=True):  # fmt: skip
            length = int(mask.sum())
            assert (labels[length:] == -100).all()
            actual.append((ids[:length].tolist(), labels[:length].tolist(), [length]))
    assert sorted(actual) == sorted(map(tuple, streams.rows(name)))
    if name == "conversations":
        assert np.isfinite(trainer.train().training_loss)


def test_trl_trains_the_same_preferences(
    streams: Streams, exported: Mapping[Any, Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    from trl import DPOConfig, DPOTrainer

    class TokenizedDPOTrainer(DPOTrainer):
        """The lines of docs/exporting.md."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    model, tokenizer = make_model(tokenizer_folder)
    arguments = DPOConfig(
        output_dir=str(tmp_path),
        max_length=None,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
    )
    rows = load_rows(exported["parquet", "preferences"], tmp_path)
    # Without these lines TRL fails: it does not train anything else in silence.
    with pytest.raises(Exception, match="chosen"):
        DPOTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    reference, _ = make_model(tokenizer_folder)
    trainer = TokenizedDPOTrainer(
        model, reference, args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    actual = []
    for batch in trainer.get_train_dataloader():
        for ids, mask, seen in zip(*(batch[k] for k in ("input_ids", "completion_mask", "attention_mask")), strict=True):  # fmt: skip
            length = int(seen.sum())
            actual.append((ids[:length].tolist(), mask[:length].tolist()))
    expected = []
    for row in expected_preferences(streams.url("preferences")):
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            mask = [0] * len(row["prompt_ids"]) + [1] * len(answer)
            expected.append((row["prompt_ids"] + answer, mask))
    assert sorted(actual) == sorted(expected)


SIZE = 4
"Rows of a batch of unpaired preferences."


def make_kto_trainer(trainer_class: Any, rows: Any, tokenizer_folder: Path, out: Path) -> Any:
    """Return TRL's trainer of unpaired preferences, or a subclass of it, for these rows."""
    from trl import KTOConfig

    model, tokenizer = make_model(tokenizer_folder)
    reference, _ = make_model(tokenizer_folder)
    arguments = KTOConfig(
        output_dir=str(out),
        max_length=ROW,
        per_device_train_batch_size=SIZE,
        report_to=[],
        use_cpu=True,
        max_steps=1,
        save_strategy="no",
    )
    return trainer_class(
        model, reference, args=arguments, train_dataset=rows, processing_class=tokenizer
    )


QUESTION: Any = {"role": "user", "content": "Why?"}
BEGINNINGS: list[list[Any]] = [
    [QUESTION],
    [{"role": "system", "content": "Be brief."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Who?"}],
    [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann."}, QUESTION],
]
GREETING: list[Any] = [{"role": "assistant", "content": "Hello."}, QUESTION]
"A beginning that only the shape preference_openai takes."


@pytest.mark.parametrize("shape", ["preference", "preference_openai"])
def test_trl_finds_the_same_prompt_in_whole_conversations(shape: str) -> None:
    from trl.data_utils import maybe_extract_prompt

    beginnings = [*BEGINNINGS, GREETING] if shape == "preference_openai" else BEGINNINGS
    for beginning in beginnings:
        record = {
            "prompt": "Why?",
            "chosen": [*beginning, {"role": "assistant", "content": "A."}],
            "rejected": [*beginning, {"role": "assistant", "content": "B."}],
        }
        extracted = maybe_extract_prompt(record)
        read = SHAPES[shape].read(record, {key: key for key in record})
        for half in ("chosen", "rejected"):
            assert getattr(read, half).messages == extracted["prompt"] + extracted[half]
        assert extracted["prompt"] == beginning


def test_trl_tokenizes_unpaired_preferences_alike(
    streams: Streams, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """TRL cuts a row only in its collator, and drops a record whose prompt fills a row."""
    from datasets import Dataset
    from trl import KTOTrainer

    records = Dataset.from_list(make_unpaired_records())
    trainer = make_kto_trainer(KTOTrainer, records, tokenizer_folder, tmp_path)
    theirs = []
    for row in trainer.train_dataset:
        room = ROW - len(row["prompt_ids"])
        theirs.append((row["prompt_ids"], row["completion_ids"][:room], row["label"]))
    ours = [tuple(row.values()) for row in expected_unpaired(streams.url("unpaired"))]
    assert theirs == ours
    assert any(len(prompt) + len(completion) == ROW for prompt, completion, _ in ours)


def test_trl_tokenizes_conversations_with_labels_alike(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """TRL adds no EOS after the template's end of an answer, and mdsmix does."""
    from datasets import Dataset
    from trl import KTOTrainer

    prompts = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Ann."},
        {"role": "user", "content": "Sure?"},
    ]
    records = [
        {
            "prompt": prompts[-length:],
            "completion": [{"role": "assistant", "content": text}],
            "label": label,
        }
        for length, text, label in ((1, "Yes.", True), (4, "No!", False), (1, "Well", False))
    ]
    trainer = make_kto_trainer(KTOTrainer, Dataset.from_list(records), tokenizer_folder, tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", records)
    fields = {key: key for key in ("prompt", "completion", "label")}
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        streams={"kto": {"kind": "preference", "source": {"path": str(source), **fields}}},
        max_seq_len=ROW,
        train_loader={"name": "unpaired_preference"},
    )
    run_recipe(recipe)
    ours = expected_unpaired(tmp_path / "out/kto/train")
    theirs = [
        {
            "prompt_ids": row["prompt_ids"],
            "completion_ids": [*row["completion_ids"], EOS],
            "label": row["label"],
        }
        for row in trainer.train_dataset
    ]
    assert theirs == ours


def test_trl_trains_exported_unpaired_preferences(
    streams: Streams, exported: Mapping[Any, Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    """And mdsmix.load gives the batches that TRL's collator makes of the same rows."""
    from trl import KTOTrainer

    class TokenizedKTOTrainer(KTOTrainer):
        """The lines of docs/exporting.md."""

        def _prepare_dataset(self, dataset: Any, tokenizer: Any, args: Any, name: str) -> Any:
            def pair_with_others(rows: dict[str, Any]) -> dict[str, Any]:
                completions = rows["completion_ids"]
                return {"KL_completion_ids": [completions[-1], *completions[:-1]]}

            size = args.per_device_train_batch_size
            return dataset.map(pair_with_others, batched=True, batch_size=size)

    rows = load_rows(exported["parquet", "unpaired"], tmp_path)
    with pytest.raises(KeyError, match="chosen"):
        make_kto_trainer(KTOTrainer, rows, tokenizer_folder, tmp_path)
    trainer = make_kto_trainer(TokenizedKTOTrainer, rows, tokenizer_folder, tmp_path)
    assert np.isfinite(trainer.train().training_loss)

    mdsmix.render_yaml(str(streams.unpaired), out=str(tmp_path / "train.yaml"))
    config = yaml.safe_load((tmp_path / "train.yaml").read_text())
    config["train_loader"] |= {"num_workers": 0, "drop_last": False}
    for key in ("prefetch_factor", "persistent_workers"):
        config["train_loader"].pop(key, None)
    config["train_loader"]["dataset"]["shuffle"] = False
    starts = range(0, len(rows), SIZE)
    collate = trainer.data_collator
    theirs = [collate([trainer.train_dataset[n] for n in range(i, min(i + SIZE, len(rows)))]) for i in starts]  # fmt: skip
    ours = list(mdsmix.build_loader(config, SIZE))
    assert len(ours) == len(theirs) > 3
    for batch, their_batch in zip(ours, theirs, strict=True):
        assert batch.keys() == their_batch.keys()
        for key, values in their_batch.items():
            assert batch[key].dtype == values.dtype, key
            assert torch.equal(batch[key], values), key


def test_axolotl_takes_the_rows_for_tokenized(exported: Mapping[Any, Path], tmp_path: Path) -> None:
    """The function of axolotl that decides it, alone: axolotl itself needs a GPU's packages."""
    from datasets import Dataset, IterableDataset

    (root,) = [Path(path) / "axolotl" for path in sys.path if (Path(path) / "axolotl").is_dir()]
    tree = ast.parse((root / "utils/data/wrappers.py").read_text("utf-8"))
    name = "_is_dataset_already_tokenized"
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    scope: dict[str, Any] = {"Dataset": Dataset, "IterableDataset": IterableDataset}
    exec(compile(ast.Module([function], []), name, "exec"), scope)
    rows = load_rows(exported["parquet", "packed_chats"], tmp_path)
    assert scope[name](rows)
    assert not scope[name](rows.remove_columns("labels"))


# litData.


def read_litdata(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder))
    assert (
        dataset[0]["input_ids" if "input_ids" in dataset[0] else "prompt_ids"].dtype == torch.int32
    )
    yield from dataset


@pytest.mark.parametrize("name", [*PLAIN, *FINETUNING])
def test_litdata_reads_the_same_rows(
    streams: Streams, exported: Mapping[Any, Path], name: str
) -> None:
    samples = list(read_litdata(exported["litdata", name]))
    expected = streams.rows(name)
    assert len(samples) == len(expected)
    for sample, expected_sample in zip(samples, expected, strict=True):
        assert sample["labels"].dtype == torch.int64
        keys: Sequence[str] = ("input_ids", "labels")
        assert [sample.pop(key).tolist() for key in keys] == [
            expected_sample.ids,
            expected_sample.labels,
        ]
        if name in PACKED:
            positions = [
                position for length in expected_sample.lengths for position in range(length)
            ]
            assert sample.pop("position_ids").tolist() == positions
        assert sample == {}


def test_litdata_reads_the_same_preferences(streams: Streams, exported: Mapping[Any, Path]) -> None:
    samples = read_litdata(exported["litdata", "preferences"])
    actual = [{key: value.tolist() for key, value in sample.items()} for sample in samples]
    keys = ("prompt_ids", "chosen_ids", "rejected_ids")
    expected = expected_preferences(streams.url("preferences"))
    assert actual == [{key: row[key] for key in keys} for row in expected]
