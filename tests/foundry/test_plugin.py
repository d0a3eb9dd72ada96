"""`train_loader.name: mdsmix`: the unmodified LLM-Foundry trains on streams that none of its own
loaders reads together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.converting import chats, documents, run_ok, write_jsonl
from tests.foundry.conftest import SCRIPTS, Foundry, Lab
from tests.pictures import record, seeing_tokenizer, stream, write_drawings
from tests.processors import IMAGE_TOKEN, TOKENS, ask_in_process, make_processor

LENGTH = 128
ORDER = {"shuffle": True, "shuffle_seed": 17}
LOSS = "loss/train/total"


def test_a_mix_of_both_kinds_trains_is_evaluated_and_resumes(lab: Lab, foundry: Foundry) -> None:
    """Text in full rows, documents, pairs and chats, with an evaluation of two kinds."""
    streams = lab.demo() | {"held-chat": chats(lab.corpus / "chat.jsonl", split="val")}
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {**ORDER, "eos_token_id": 0}}
    keys = {"mix": {"web": {"repeat": 0.5}, "chat": {"repeat": 2}}, "max_seq_len": LENGTH}
    config = str(lab.rendered(streams=streams, train_loader=loader, **keys))
    whole = foundry("train.metrics", path=config, steps=12, settings=["eval_interval=6ba"])
    assert whole[LOSS][-1] < whole[LOSS][0] - 0.5
    for label in ("heldout", "held-chat"):
        before, after = whole[f"metrics/eval/{label}/LanguageCrossEntropy"]
        assert after < before

    saving = [f"save_folder={lab.folder}/saved", "save_interval=5ba"]
    first = foundry("train.metrics", path=config, steps=5, settings=saving)
    resuming = [f"load_path={lab.folder}/saved/ep0-ba5-rank0.pt"]
    second = foundry("train.metrics", path=config, steps=8, settings=resuming)
    assert first[LOSS] == whole[LOSS][:5]
    assert second[LOSS] == whole[LOSS][5:8]
    assert second["time/token"][:3] == whole["time/token"][5:8]


def test_from_the_end_of_an_epoch_the_next_one_begins(lab: Lab, foundry: Foundry) -> None:
    """Composer writes a checkpoint with the last batch, or after the epoch."""
    streams = lab.demo("docs faq")
    loader = {"name": "mdsmix", "num_workers": 1, "dataset": {**ORDER, "eos_token_id": 0}}
    drawn = {"mix": {name: {"choose": 12} for name in streams}, "max_seq_len": LENGTH}
    config = str(lab.rendered(streams=streams, train_loader=loader, **drawn))
    whole = []
    for interval, name in (("1ep", "ep1-ba3"), ("3ba", "ep0-ba3")):
        saving = [f"save_folder={lab.folder}/{interval}", f"save_interval={interval}"]
        saving.append("save_num_checkpoints_to_keep=-1")
        whole = whole or foundry("train.losses", path=config, steps=7, settings=saving)
        if interval == "3ba":
            foundry("train.losses", path=config, steps=3, settings=saving)
        resuming = [f"load_path={lab.folder}/{interval}/{name}-rank0.pt"]
        more = foundry("train.losses", path=config, steps=7, settings=resuming)
        assert more == whole[3:], name


def test_a_lost_shard_ends_a_run_and_changed_data_is_refused(
    lab: Lab, tmp_path: Path, foundry: Foundry
) -> None:
    texts = [{"text": f"{n} one two three four five six seven eight"} for n in range(400)]
    parts = [write_jsonl(tmp_path / f"{n}.jsonl", texts[n::4]) for n in range(4)]
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {**ORDER, "shuffle_block_size": 32}}
    streams = {f"s{n}": documents(part) for n, part in enumerate(parts)}
    config = lab.rendered(streams=streams, train_loader=loader)
    saving = [f"save_folder={tmp_path}/saved", "save_interval=10ba"]
    foundry("train.metrics", path=str(config), steps=10, settings=saving)

    write_jsonl(parts[2], [{"text": "a text that is longer than those before"}, *texts[2::4]])
    run_ok("convert", tmp_path / "recipe.yaml")
    resuming = [f"load_path={tmp_path}/saved/ep0-ba10-rank0.pt"]
    told = foundry("train.failure", path=str(config), steps=30, settings=resuming)
    assert told.startswith("MixRefused: The checkpoint was written on other data: stream s2 was ")
    resuming.append("train_loader.accept_changed=true")
    assert len(foundry("train.losses", path=str(config), steps=14, settings=resuming)) == 4

    (lost,) = (tmp_path / "out/s1/train").glob("*.mds")
    lost.rename(tmp_path / "away")
    told = foundry("train.failure", path=str(config), steps=60)
    lost_one = f"Unreachable: Stream s1: shard {lost.name} under {tmp_path}/out/s1/train"
    assert told.startswith(lost_one)


def test_text_and_images_train_alike_in_whole_batches_and_in_microbatches(
    lab: Lab, tmp_path: Path, foundry: Foundry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_in_process(monkeypatch)
    declared = {"image_token": IMAGE_TOKEN["qwen"]}
    lab.tokenizer = seeing_tokenizer(lab.tokenizer, tmp_path / "words", TOKENS, declared=declared)
    make_processor("qwen", lab.tokenizer).save_pretrained(tmp_path / "qwen")
    names = [f"img/{path.name}" for path in write_drawings(tmp_path / "img", 12, (70, 40))]
    records = [record(name, answer=f"Drawing {n}.") for n, name in enumerate(names)]
    records += [record(names[0], names[5])] + [record(answer=f"None in {n}.") for n in range(3)]
    texts = [{"text": f"{n} one two three four five six seven"} for n in range(16)]
    loader = {"name": "mdsmix", "num_workers": 1, "dataset": {"dummy_image": True}}
    streams = {
        "see": stream(write_jsonl(tmp_path / "see.jsonl", records)),
        "read": documents(write_jsonl(tmp_path / "read.jsonl", texts), layout="document"),
    }
    given = {"max_seq_len": 96, "processor": str(tmp_path / "qwen"), "train_loader": loader}
    config = lab.rendered(streams=streams, **given)
    tree = yaml.safe_load(config.read_text())
    tree["model"] = {"name": "tiny_seeing", "processor": str(tmp_path / "qwen")}
    tree |= {"code_paths": [str(SCRIPTS / "seeing.py")], "accumulate_train_batch_on_tokens": True}
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    rate = "optimizer.lr=0.02"
    sized = ([f"device_train_microbatch_size={size}", rate] for size in (8, 3))
    asked = {"path": str(config), "steps": 6}
    whole, cut = (foundry("train.losses", **asked, settings=settings) for settings in sized)
    assert cut == pytest.approx(whole, rel=1e-4), "8 rows as 3, 3 and 2"
    assert whole[-1] < whole[0] - 0.5
