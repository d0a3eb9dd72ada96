"""What may be set of a loader that changes its speed and no batch, and which of it is tried.

Workers from none to one a core, by doubling: whether 5 or 6 of them are best is noise, whether 1 or 8 are is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mdsmix.errors import RecipeError
from mdsmix.words import plural

PREFETCH = (2, 4)
"Batches that each worker makes in advance; 2 is torch's and Foundry's default."


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One way to set a loader."""

    workers: int
    prefetch: int | None
    "Batches of each worker in advance; None without workers."
    predownload: int | None = None
    "Samples that each worker downloads in advance; None: Streaming's own, 8 batches."

    @property
    def loader_keys(self) -> dict[str, int | bool | None]:
        """As `train_loader` takes it: without workers torch wants neither prefetching nor persistence."""
        works = self.workers > 0
        keys = {"num_workers": self.workers, "prefetch_factor": self.prefetch}
        return keys | {"persistent_workers": works}

    @property
    def ready(self) -> int:
        """Batches that may lie ready, the one that is asked for among them."""
        return 1 + self.workers * (self.prefetch or 0)

    def __str__(self) -> str:
        ahead = f", prefetch {self.prefetch}" if self.prefetch else ""
        down = f", predownload {self.predownload:,}" if self.predownload else ""
        return f"{plural(self.workers, 'worker')}{ahead}{down}"


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of this machine."""

    cores: int
    ranks: int

    @property
    def each(self) -> int:
        """Cores for a rank and its workers; a rank that has less than one has to do with one worker."""
        return max(1, self.cores // self.ranks)

    def __str__(self) -> str:
        if self.ranks == 1:
            return f"one rank on {plural(self.cores, 'core')}"
        return f"one rank of {self.ranks} on {plural(self.cores, 'core')}, {self.cores / self.ranks:g} each"


def whole_numbers(option: str, text: str | None, least: int) -> list[int] | None:
    """`0,2,4` as numbers; RecipeError where they are none."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= least for part in parts):
        raise RecipeError(
            f"{option} {text}: these must be whole numbers of {least} or more with commas between them, such as 2,4."
        )
    return [int(part) for part in parts]


def settings(
    share: Share, workers: Sequence[int] | None, prefetch: Sequence[int] | None
) -> list[Setting]:
    """What is tried; RecipeError where more workers are asked for than a rank has cores."""
    if workers and max(workers) > share.each:
        raise RecipeError(
            f"--workers {max(workers)}: a rank has {plural(share.each, 'core')} here ({share}), and workers that take turns on "
            f"them measure the machine instead of the loader; name at most {share.each}, or measure on the training machine."
        )
    counts = sorted(set(workers)) if workers else list(_doubled(share.each))
    return list(_settings(counts, sorted(set(prefetch or PREFETCH))))


def _settings(counts: Iterable[int], ahead: Sequence[int]) -> Iterator[Setting]:
    for count in counts:
        yield from (Setting(count, batches) for batches in (ahead if count else [None]))


def _doubled(most: int) -> Iterator[int]:
    """0, 1, 2, 4, ... and the most."""
    yield 0
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most
