"""The whole way: raw files in a bucket -> published streams -> check -> YAML -> the batches of a training loop, every token there."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import yaml

from mdsmix.storage import locate
from tests.converting import (
    chats,
    documents,
    manifest_of,
    mdsmix,
    pairs,
    token_rows,
    tokens,
    write_recipe,
)

LENGTH = 64


LOADER = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "drop_last": False}  # fmt: skip


def test_every_sample_that_was_published_comes_out_of_the_loader_once(
    tmp_path: Path, corpus_folder: Path, tokenizer_folder: Path, bucket: str
) -> None:
    """Sources in the bucket for one stream, on the disk for the others; published in the bucket."""
    packed = "web.jsonl.zst"
    locate(f"s3://{bucket}/raw/{packed}").write((corpus_folder / packed).read_bytes())
    streams = {
        "web": documents(f"s3://{bucket}/raw/*.zst"),
        "docs": documents(corpus_folder / "docs.jsonl", layout="document", min_tokens=8),
        "faq": pairs(corpus_folder / "faq.jsonl"),
        "chat": chats(corpus_folder / "chat.jsonl"),
    }
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        streams=streams,
        max_seq_len=LENGTH,
        remote=f"s3://{bucket}/mix",
        local=str(tmp_path / "training"),
        train_loader=LOADER | {"dataset": {"shuffle": True, "shuffle_seed": 5}},
    )
    assert mdsmix("convert", recipe).code == 0
    checked = mdsmix("check", recipe)
    assert checked.code == 0, checked.out
    assert "4 streams may be mixed" in checked.out
    rendered = tmp_path / "train.yaml"
    assert mdsmix("render-yaml", recipe, "-o", rendered).code == 0
    assert not (tmp_path / "training").exists(), "a training node's cache is not convert's to write"

    published = {name: token_rows(f"s3://{bucket}/mix/{name}/train") for name in streams}
    for name, rows in published.items():
        totals = manifest_of(f"s3://{bucket}/mix/{name}/train").totals
        assert (totals.samples, totals.tokens) == (len(rows), sum(map(len, rows)))
    everything = [row for rows in published.values() for row in rows]
    assert Counter(map(tuple, _streamed(rendered))) == Counter(map(tuple, everything))
    shutil.rmtree(tmp_path / "training")
    found = Counter(map(_as_collated, _batched(rendered)))
    assert found == Counter(map(_as_collated, everything))


def _as_collated(row: list[int]) -> tuple[int, ...]:
    """The finetuning collator ends a row with EOS (0) where it has none, and cuts one that is too long."""
    row = row[: LENGTH - 1]
    while row and not row[-1]:
        row = row[:-1]
    return tuple(row)


def _streamed(rendered: Path) -> list[list[int]]:
    """What Streaming's own dataset reads, by S3_ENDPOINT_URL."""
    from streaming import Stream, StreamingDataset

    streams = yaml.safe_load(rendered.read_text())["train_loader"]["dataset"]["streams"]
    dataset = StreamingDataset(streams=[Stream(**s) for s in streams.values()], batch_size=4)
    return [tokens(sample) for sample in dataset]


def _batched(rendered: Path) -> list[list[int]]:
    """What a training loop gets, without the padding."""
    from mdsmix.load import build_loader

    rows = []
    for batch in build_loader(str(rendered), batch_size=8):
        masks = batch.get("attention_mask", np.ones(batch["input_ids"].shape))
        for ids, mask in zip(batch["input_ids"], masks, strict=True):
            rows.append([int(token) for token in ids[np.asarray(mask).astype(bool)]])
    return rows
