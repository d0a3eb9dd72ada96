"""What counting the losses of streams costs of a training step on a CPU.

    .venv/bin/python -m benchmarks.stream_losses

A Llama of the shape of GPT-2 small trains on random rows, with a vocabulary of 32,768 and of
128,256 ids. In each step the CPU time of counting (`StreamTally.add` and `commit`) is measured
beside that of the whole step; the share is the median of all steps. It is CPU time of one thread:
threads that wait for each other on a busy machine count as time too.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mdsmix.callbacks.stream_tally import StreamKeys, StreamTally

ROWS, LENGTH, STREAMS = 2, 512, 8
STEPS = 5
SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}


class Cost(NamedTuple):
    """CPU seconds of a step, and of counting in it."""

    step: float
    counting: float

    @property
    def share(self) -> float:
        return self.counting / (self.step - self.counting)


def measure(vocabulary: int, packed: bool) -> tuple[int, list[Cost]]:
    """Return the model's parameters and the cost of each step after the first.

    Args:
        packed: whether stream ids are those of tokens, as of packed rows.
    """
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **SHAPE, **HEADS)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tally = StreamTally([f"s{number}" for number in range(STREAMS)])
    costs = list[Cost]()
    for _ in range(STEPS + 1):
        ids = torch.randint(0, vocabulary, (ROWS, LENGTH))
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        batch["attention_mask"] = torch.ones_like(ids)
        shape = (ROWS, LENGTH) if packed else (ROWS,)
        samples = torch.ones(ROWS, STREAMS, dtype=torch.int64) if packed else None
        keys = StreamKeys(torch.randint(0, STREAMS, shape), samples)
        begin = time.process_time()
        outputs = model(**batch)
        before = time.process_time()
        tally.add(keys, batch, outputs)
        counting = time.process_time() - before
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = time.process_time()
        tally.commit()
        counting += time.process_time() - before
        costs.append(Cost(time.process_time() - begin, counting))
    return sum(p.numel() for p in model.parameters()), costs[1:]


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"rows: {ROWS} of {LENGTH} tokens, {STREAMS} streams, torch {torch.__version__}, 1 thread"
    )
    for vocabulary in (32_768, 128_256):
        for packed in (False, True):
            parameters, costs = measure(vocabulary, packed)
            shares = sorted(cost.share for cost in costs)
            step = statistics.median(cost.step for cost in costs)
            counting = statistics.median(cost.counting for cost in costs)
            print(
                f"{parameters / 1e6:.0f} M parameters, {vocabulary:,} ids, "
                f"{'packed rows' if packed else 'rows'}: a step {step:.2f} s of CPU, counting "
                f"{counting * 1000:.0f} ms, {statistics.median(shares):.2%} "
                f"({shares[0]:.2%} to {shares[-1]:.2%})"
            )


if __name__ == "__main__":
    main()
