"""Runs the ranks of a node from their imports to their first batches. Each prints its cost as one
line of JSON.

    python first_batch.py mdsmix|bare LOCAL REMOTE|- WIDTH BATCH RANKS

The process imports once and then forks the ranks: eight times the same 5 CPU seconds would hide the
cost of the data.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path


def main() -> None:
    name, local, remote, width, batch, ranks = *sys.argv[1:4], *map(int, sys.argv[4:7])
    began = time.time()
    import mdsmix.load  # noqa: F401

    imported = {"imports": time.time() - began, "cpu_imports": time.process_time()}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.time()
    for rank in range(ranks):
        if not os.fork():
            os.environ.update(_environment(rank, ranks, port))
            result = imported | _rank(name, local, remote, width, batch, began)
            sys.stdout.write(json.dumps(result) + "\n")
            sys.exit()
    codes = [os.waitpid(-1, 0)[1] for _ in range(ranks)]
    sys.exit(max(map(os.waitstatus_to_exitcode, codes)))


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets; Streaming then makes its own gloo group."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {key: str(value) for key, value in (own | master).items()}


def _rank(
    name: str, local: str, remote: str, width: int, batch: int, began: float
) -> dict[str, float]:
    import streaming

    import mdsmix.load

    cpu = time.process_time()
    before = _io()
    places = {"local": local}
    if remote != "-":
        places["remote"] = remote
    if name == "mdsmix":
        dataset = {"streams": {"s": places}, "max_seq_len": width, "shuffle": True}
        config = {"train_loader": {"name": "text", "dataset": dataset}}
        loader = mdsmix.load.build_loader(config, batch, ids=mdsmix.load.TokenIds(eos=0, pad=1))
    else:
        bare = streaming.StreamingDataset(**places, batch_size=batch, shuffle=True)
        loader = streaming.StreamingDataLoader(bare, batch_size=batch, collate_fn=list)
    built = time.time()
    next(iter(loader))
    after = _io()
    return {
        "built": built - began,
        "done": time.time() - began,
        "cpu": time.process_time() - cpu,
        "read": after["rchar"] - before["rchar"],
        "written": after["wchar"] - before["wchar"],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


if __name__ == "__main__":
    main()
