"""`train_loader.name: mdsmix`: the unmodified LLM-Foundry trains on streams that none of its own loaders reads together."""

import json
from pathlib import Path

import pytest
import yaml

from tests.converting import chats, documents, done, write_jsonl
from tests.foundry.conftest import SCRIPTS, Foundry
from tests.foundry.steps import converted, demo, rendered
from tests.pictures import record, seeing_tokenizer, stream, write_drawings
from tests.processors import IMAGE_TOKEN, TOKENS, look_here, processor_of

LENGTH = 128
ORDER = {"shuffle": True, "shuffle_seed": 17}
LOSS = "loss/train/total"


def test_a_mix_of_both_kinds_trains_is_evaluated_and_resumes_as_if_nothing_had_been(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path, foundry: Foundry
) -> None:
    """Text in full rows, documents, pairs and chats, with an evaluation of two kinds."""
    streams = demo(corpus_folder)
    streams["held-chat"] = chats(corpus_folder / "chat.jsonl", split="val")
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {**ORDER, "eos_token_id": 0}}
    keys = {"mix": {"web": {"repeat": 0.5}, "chat": {"repeat": 2}}, "max_seq_len": LENGTH}
    made = converted(tmp_path, tokenizer_folder, streams=streams, train_loader=loader, **keys)
    config = str(rendered(made))
    whole = foundry("train.metrics", path=config, steps=12, settings=["eval_interval=6ba"])
    assert whole[LOSS][-1] < whole[LOSS][0] - 0.5
    for label in ("heldout", "held-chat"):
        before, after = whole[f"metrics/eval/{label}/LanguageCrossEntropy"]
        assert after < before
    columns = {
        path.parent.parent.name: json.loads(path.read_text())["shards"][0]["column_names"]
        for path in (tmp_path / "out").glob("*/train/index.json")
    }
    plain, pair = ["tokens"], ["input_ids", "labels"]
    assert columns == {"web": plain, "docs": plain, "faq": pair, "chat": ["turns"]}

    saving = [f"save_folder={tmp_path}/saved", "save_interval=5ba"]
    first = foundry("train.metrics", path=config, steps=5, settings=saving)
    resuming = [f"load_path={tmp_path}/saved/ep0-ba5-rank0.pt"]
    second = foundry("train.metrics", path=config, steps=8, settings=resuming)
    assert first[LOSS] == whole[LOSS][:5]
    assert second[LOSS] == whole[LOSS][5:8]
    assert second["time/token"][:3] == whole["time/token"][5:8]


def test_a_lost_shard_ends_the_run_with_its_name_and_changed_data_is_refused(
    tmp_path: Path, tokenizer_folder: Path, foundry: Foundry
) -> None:
    texts = [{"text": f"{n} one two three four five six seven eight"} for n in range(400)]
    parts = [write_jsonl(tmp_path / f"{n}.jsonl", texts[n::4]) for n in range(4)]
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {**ORDER, "shuffle_block_size": 32}}
    streams = {f"s{n}": documents(part) for n, part in enumerate(parts)}
    recipe = converted(tmp_path, tokenizer_folder, streams=streams, train_loader=loader)
    config = rendered(recipe)
    saving = [f"save_folder={tmp_path}/saved", "save_interval=10ba"]
    foundry("train.metrics", path=str(config), steps=10, settings=saving)

    write_jsonl(parts[2], [{"text": "a text that is longer than those before"}, *texts[2::4]])
    done("convert", recipe)
    resuming = [f"load_path={tmp_path}/saved/ep0-ba10-rank0.pt"]
    told = foundry("train.failure", path=str(config), steps=30, settings=resuming)
    assert told.startswith("MixRefused: The checkpoint was written on other data: s2 was ")
    resuming.append("train_loader.accept_changed=true")
    went = foundry("train.warned", path=str(config), steps=14, settings=resuming)
    assert len(went["losses"]) == 4
    accepted = "accept_changed: the checkpoint was written on other data: s2"
    assert any(accepted in sentence for sentence in went["said"])

    (lost,) = (tmp_path / "out/s1/train").glob("*.mds")
    lost.rename(tmp_path / "away")
    told = foundry("train.failure", path=str(config), steps=60)
    lost_one = f"Unreachable: Stream s1: shard {lost.name} under {tmp_path}/out/s1/train"
    assert told.startswith(lost_one)


def seeing(config: Path, processor: Path) -> Path:
    """The YAML with the tiny model that sees instead of the one that reads."""
    tree = yaml.safe_load(config.read_text())
    tree["model"] = {"name": "tiny_seeing", "processor": str(processor)}
    tree |= {"code_paths": [str(SCRIPTS / "seeing.py")], "accumulate_train_batch_on_tokens": True}
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    return config


def test_text_and_images_train_alike_in_whole_batches_and_in_microbatches(
    tmp_path: Path, tokenizer_folder: Path, foundry: Foundry, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_here(monkeypatch)
    declared = {"image_token": IMAGE_TOKEN["qwen"]}
    words = seeing_tokenizer(tokenizer_folder, tmp_path / "words", TOKENS, declared=declared)
    processor_of("qwen", words).save_pretrained(tmp_path / "qwen")
    names = [f"img/{path.name}" for path in write_drawings(tmp_path / "img", 12, (70, 40))]
    records = [record(name, answer=f"Drawing {n}.") for n, name in enumerate(names)]
    records += [record(names[0], names[5])] + [record(answer=f"None in {n}.") for n in range(3)]
    texts = [{"text": f"{n} one two three four five six seven"} for n in range(16)]
    loader = {"name": "mdsmix", "num_workers": 1, "dataset": {"dummy_image": True}}
    streams = {
        "see": stream(write_jsonl(tmp_path / "see.jsonl", records)),
        "read": documents(write_jsonl(tmp_path / "read.jsonl", texts), layout="document"),
    }
    given = {"streams": streams, "max_seq_len": 96, "processor": str(tmp_path / "qwen")}
    recipe = converted(tmp_path, words, train_loader=loader, **given)
    config = seeing(rendered(recipe), tmp_path / "qwen")
    rate = "optimizer.lr=0.02"
    sized = ([f"device_train_microbatch_size={size}", rate] for size in (8, 3))
    asked = {"path": str(config), "steps": 6}
    whole, cut = (foundry("train.losses", **asked, settings=settings) for settings in sized)
    assert cut == pytest.approx(whole, rel=1e-4), "8 rows as 3, 3 and 2"
    assert whole[-1] < whole[0] - 0.5
