"""Two real processes of a training run get rows of their own, and after a stop exactly the rest; a preview says the same of them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdsmix.mix.draws import World as Machines
from mdsmix.mix.resolve import mix_of
from mdsmix.preview.asked import Asked, EpochState
from mdsmix.preview.first_steps import preview
from mdsmix.preview.step_rows import Step
from tests.forked import Standing
from tests.minio import free_port
from tests.published import CARD
from tests.with_torch.load_streams import PAIR, config, pair, write_stream, write_tokens

RANK = """
import json, os, sys
from itertools import islice
import torch.distributed as dist
from mdsmix.load import TokenIds, build_loader

config, packed = json.loads(sys.argv[1])
dist.init_process_group("gloo")

def first(batch):
    return batch["input_ids"][:, 0].tolist()

def held(batch):
    trained = int((batch["labels"][:, 1:] != -100).sum())
    return [int(batch["attention_mask"].sum()), trained, (batch["sequence_id"].amax(dim=1) + 1).tolist()]

def of_all(look, batches):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, [look(batch) for batch in batches])
    return every

def stopped(config, look):
    ids = TokenIds(eos=0, pad=1)
    whole = of_all(look, build_loader(config, 4, ids=ids))
    stopped = build_loader(config, 4, ids=ids)
    batches = iter(stopped)
    before = of_all(look, islice(batches, 3))
    state = json.loads(json.dumps(stopped.state_dict()))
    del stopped, batches
    resumed = build_loader(config, 4, ids=ids)
    resumed.load_state_dict(state)
    return {"whole": whole, "before": before, "after": of_all(look, resumed), "state": state}

print(json.dumps([stopped(config, first), stopped(packed, held)]))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_share_a_stream(tmp_path: Path, programs: Standing) -> None:
    web = {"local": str(write_tokens(tmp_path / "web", 90, shard_bytes=600))}
    settings = config({"web": web}, "text", shuffle=True, num_canonical_nodes=2, drop_last=True)
    pairs = {name: {"local": str(tmp_path / name)} for name in ("faq", "forum")}
    for name, count in (("faq", 90), ("forum", 60)):
        write_stream(tmp_path / name, PAIR, map(pair, range(count)), shard_bytes=900)
    packing = config(pairs, shuffle=True, packing_ratio=2.6)
    answer, held = together(programs, [settings, packing])
    whole, before, after = answer["whole"], answer["before"], answer["after"]
    assert answer["state"]["sample_in_epoch"] == 3 * 2 * 4
    for rank in (0, 1):
        assert [len(batch) for batch in whole[rank]] == [4] * (90 // 2 // 4)
        assert before[rank] + after[rank] == whole[rank]
    assert whole[0] != whole[1]
    for part, state in (("whole", None), ("after", answer["state"])):
        wanted = [list(step) for step in zip(*answer[part], strict=True)]
        found = previewed(settings, len(wanted), state)
        assert [[[10 + 8 * n for n in r.ids] for r in s.ranks] for s in found] == wanted
    for part, state in (("whole", None), ("after", held["state"])):
        made = previewed(packing, len(held[part][0]), state)
        for step, (one, other) in zip(made, zip(*held[part], strict=True), strict=True):
            assert step.counts is not None
            samples, tokens, trained = step.counts.sum(axis=0)
            assert (tokens, trained) == (one[0] + other[0], one[1] + other[1])
            assert samples == sum(one[2] + other[2])


def previewed(settings: dict[str, Any], steps: int, state: dict[str, Any] | None) -> Sequence[Step]:
    """What a preview says of these two processes."""
    told = state or {"epoch": 0, "sample_in_epoch": 0}
    entered = EpochState(**{k: told[k] for k in EpochState.__dataclass_fields__ if k in told})
    workers = settings["train_loader"].get("num_workers", 0)
    cluster = Machines(nodes=1, gpus=2, workers=workers, batch=8)
    mix = dataclasses.replace(mix_of(settings, "train.yaml"), tokenizer=CARD)
    return preview(mix, Asked(world=cluster, steps=steps, state=entered)).steps


def together(programs: Standing, argument: object) -> Any:
    """What rank 0 of two processes on this machine prints."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    of_rank = ({"RANK": n, "LOCAL_RANK": n} | common for n in "01")
    running = [programs.start(RANK, json.dumps(argument), **each) for each in of_rank]
    ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [0, 0], ended
    return json.loads(ended[0].stdout.splitlines()[-1])
