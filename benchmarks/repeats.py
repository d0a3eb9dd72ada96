"""The cost of finding the duplicates of a stream: `python -m benchmarks.repeats [RECORDS]`.

Fingerprints are random; one in a hundred comes from the same 25,000. They are joined as `convert`
joins them. Prints seconds and peak memory.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from mdsmix.conversion.duplicates import Fingerprints, count_repeats

WINDOW = 25_000
"Records of 4 KB in a window of 96 MiB."


def windows(records: int) -> Iterator[Fingerprints]:
    rng = np.random.default_rng(0)
    first = rng.integers(1, 2**63, (WINDOW, 2), dtype=np.uint64)
    for _ in range(records // WINDOW):
        window = rng.integers(0, 2**64, (WINDOW, 2), dtype=np.uint64)
        window[: WINDOW // 100] = first[rng.integers(0, WINDOW, WINDOW // 100)]
        yield window


def main() -> None:
    records = int(float((*sys.argv[1:], "1e7")[0]))
    began, used = time.monotonic(), time.process_time()
    repeats = count_repeats(windows(records))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{records:,} records, {repeats:,} of them repeats: {time.monotonic() - began:.1f} s, "
        f"{time.process_time() - used:.1f} s of CPU, {peak} MB at most"
    )


if __name__ == "__main__":
    main()
