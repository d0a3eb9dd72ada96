"""The lock of a mix in a bucket: the training node's names of tokenizer and caches change nothing of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mdsmix.storage import locate
from tests.converting import documents, mdsmix, write_jsonl, write_recipe


def test_a_mix_in_a_bucket_is_as_planned_until_it_is_published_anew(
    tmp_path: Path, tokenizer_folder: Path, bucket: str
) -> None:
    texts = [{"text": f"{n} one two three four five"} for n in range(40)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        remote=f"s3://{bucket}/mix",
        local=str(tmp_path / "node"),
        streams={"web": documents(source)},
    )
    config, away = tmp_path / "train.yaml", f"s3://{bucket}/train.yaml"
    assert mdsmix("convert", recipe).code == 0
    for target in (config, away):
        assert mdsmix("render-yaml", recipe, "-o", target).code == 0
    lock = Path(f"{config}.mix.lock").read_bytes()
    assert locate(f"{away}.mix.lock").read() == lock
    assert "tokenizer" in json.loads(lock)["loaders"]["train_loader"]["settings"]
    done = mdsmix("check", "--lock", config)
    assert (done.code, done.err) == (0, "")
    assert re.search(r"train_loader +web +as planned", done.out)

    write_jsonl(source, [{"text": "another one before all of the others"}, *texts])
    assert mdsmix("convert", recipe).code == 0
    done = mdsmix("check", "--lock", config)
    assert done.code == 3
    assert "error lock-differs [web]" in done.out
