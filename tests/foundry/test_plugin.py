"""`train_loader.name: mdsmix`: the unmodified LLM-Foundry trains on streams that none of its own loaders reads together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.converting import chats, documents, pairs, write_jsonl
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted, does, rendered

LENGTH = 128
ORDER = {"shuffle": True, "shuffle_seed": 17}
EVALUATED = "eval_interval=6ba"
LOSS = "loss/train/total"


def mixed(folder: Path, tokenizer: Path, corpus: Path, **settings: Any) -> Path:
    """The training YAML of text in full rows, documents, pairs and chats, with an evaluation of two kinds."""
    streams = {
        "web": documents(corpus / "web.jsonl.zst"),
        "docs": documents(corpus / "docs.jsonl", layout="document", min_tokens=8),
        "faq": pairs(corpus / "faq.jsonl"),
        "chat": chats(corpus / "chat.jsonl"),
        "held": documents(corpus / "heldout.jsonl", split="val"),
        "held-chat": chats(corpus / "chat.jsonl", split="val"),
    }
    settings = {
        "streams": streams,
        "mix": {"web": {"repeat": 0.5}, "chat": {"repeat": 2}},
        "max_seq_len": LENGTH,
        "train_loader": {
            "name": "mdsmix",
            "num_workers": 0,
            "dataset": {**ORDER, "eos_token_id": 0},
        },
    } | settings
    return rendered(converted(folder, tokenizer, **settings))


def edited(config: Path, name: str, **keys: Any) -> Path:
    """The same YAML with other keys of its train_loader's dataset, under another name; `loader` and `model` beside it."""
    tree = yaml.safe_load(config.read_text())
    tree["train_loader"].update(keys.pop("loader", {}))
    tree["model"].update(keys.pop("model", {}))
    tree["train_loader"]["dataset"].update(keys)
    path = config.with_name(f"{name}.yaml")
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, corpus_folder: Path
) -> Path:
    return mixed(tmp_path_factory.mktemp("plugin"), tokenizer_folder, corpus_folder)


@pytest.fixture(scope="module")
def undisturbed(config: Path, foundry: Foundry) -> dict[str, list[float]]:
    return dict(foundry("train.metrics", path=str(config), steps=12, settings=[EVALUATED]))


def test_a_mix_of_both_kinds_trains_and_is_evaluated(
    config: Path, undisturbed: dict[str, list[float]]
) -> None:
    assert undisturbed[LOSS][-1] < undisturbed[LOSS][0] - 0.5
    for label in ("held", "held-chat"):
        before, after = undisturbed[f"metrics/eval/{label}/LanguageCrossEntropy"]
        assert after < before
    columns = {
        path.parent.parent.name: json.loads(path.read_text())["shards"][0]["column_names"]
        for path in (config.parent / "out").glob("*/train/index.json")
    }
    plain, pair = ["tokens"], ["input_ids", "labels"]
    assert columns == {"web": plain, "docs": plain, "faq": pair, "chat": ["turns"]}


def test_a_run_that_resumes_has_the_losses_of_one_that_was_not_disturbed(
    config: Path, undisturbed: dict[str, list[float]], foundry: Foundry, tmp_path: Path
) -> None:
    saving = [f"save_folder={tmp_path}", "save_interval=5ba"]
    before = foundry("train.metrics", path=str(config), steps=5, settings=saving)
    resuming = [f"load_path={tmp_path}/ep0-ba5-rank0.pt"]
    after = foundry("train.metrics", path=str(config), steps=12, settings=resuming)
    assert before[LOSS] == undisturbed[LOSS][:5]
    assert after[LOSS] == undisturbed[LOSS][5:]
    assert after["time/token"] == undisturbed["time/token"][5:]


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, corpus_folder: Path
) -> Path:
    """A mix that Foundry's finetuning loader reads too."""
    folder, corpus = tmp_path_factory.mktemp("both"), corpus_folder
    streams = {
        "docs": documents(corpus / "docs.jsonl", layout="document", min_tokens=8),
        "faq": pairs(corpus / "faq.jsonl"),
        "chat": chats(corpus / "chat.jsonl"),
    }
    loader = {"name": "finetuning", "num_workers": 0, "dataset": ORDER}
    return rendered(
        converted(
            folder, tokenizer_folder, streams=streams, max_seq_len=LENGTH, train_loader=loader
        )
    )


@pytest.mark.parametrize("ratio", [None, 1.5])
def test_finetuning_and_mdsmix_have_equal_losses_on_what_both_read(
    both: Path, ratio: float | None, foundry: Foundry
) -> None:
    theirs, ours = (
        foundry(
            "train.metrics",
            path=str(edited(both, f"{name}-{ratio}", loader={"name": name}, packing_ratio=ratio)),
            steps=4,
        )
        for name in ("finetuning", "mdsmix")
    )
    assert ours == theirs, "and equal tokens"


def test_documents_of_a_full_row_are_masked_as_under_name_text(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path, foundry: Foundry
) -> None:
    loader = {"name": "text", "num_workers": 0, "dataset": ORDER}
    streams = {"docs": documents(corpus_folder / "docs.jsonl")}
    plain = rendered(
        converted(
            tmp_path, tokenizer_folder, streams=streams, max_seq_len=LENGTH, train_loader=loader
        )
    )
    model = {"attn_config": {"attn_impl": "torch", "attn_uses_sequence_id": True}}
    found = {
        name: foundry(
            "train.metrics",
            path=str(edited(plain, name, loader={"name": name}, model=model, eos_token_id=0)),
            steps=4,
        )
        for name in ("text", "mdsmix")
    }
    assert found["mdsmix"][LOSS] == pytest.approx(found["text"][LOSS], abs=1e-6)
    assert found["mdsmix"]["time/token"] == found["text"]["time/token"]
    unmasked = foundry("train.losses", path=str(edited(plain, "unmasked", eos_token_id=0)), steps=1)
    assert unmasked[0] != pytest.approx(found["text"][LOSS][0], abs=1e-4)


def test_a_lost_shard_ends_the_run_with_its_name_and_changed_data_is_refused(
    tmp_path: Path, tokenizer_folder: Path, foundry: Foundry
) -> None:
    texts = [{"text": f"{n} one two three four five six seven eight"} for n in range(400)]
    parts = [write_jsonl(tmp_path / f"{n}.jsonl", texts[n::4]) for n in range(4)]
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {**ORDER, "shuffle_block_size": 32}}
    recipe = converted(
        tmp_path,
        tokenizer_folder,
        streams={f"s{n}": documents(part) for n, part in enumerate(parts)},
        train_loader=loader,
    )
    config = rendered(recipe)
    saving = [f"save_folder={tmp_path}/saved", "save_interval=10ba"]
    foundry("train.metrics", path=str(config), steps=10, settings=saving)

    write_jsonl(
        parts[2], [{"text": "another text that is longer than the one before"}, *texts[2::4]]
    )
    does("convert", recipe)
    resuming = [f"load_path={tmp_path}/saved/ep0-ba10-rank0.pt"]
    told = foundry("train.failure", path=str(config), steps=30, settings=resuming)
    assert told.startswith("MixRefused: The checkpoint was written on other data: s2 was ")
    resuming.append("train_loader.accept_changed=true")
    went = foundry("train.warned", path=str(config), steps=14, settings=resuming)
    assert len(went["losses"]) == 4
    assert any(
        "accept_changed: the checkpoint was written on other data: s2" in s for s in went["said"]
    )

    (lost,) = (tmp_path / "out/s1/train").glob("*.mds")
    lost.rename(tmp_path / "away")
    told = foundry("train.failure", path=str(config), steps=60)
    assert told.startswith(
        f"Unreachable: Stream s1: shard {lost.name} under {tmp_path}/out/s1/train"
    )
