"""Whether too many records are bad: of the whole stream, and already while it is being converted.

`max_bad` limits the share of all records. A run stops early where the outcome is certain: where the first units are nearly all
bad (the wrong file, the wrong field), or where the records still to come are too few to bring the share down. Units are looked
at in the order of the plan, so any number of workers gives the same sentence. How many records are to come is not known, but a
format may know a bound: a line takes at least two bytes, a true if loose bound for a plain file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

from mdsmix.convert.advice import advice
from mdsmix.convert.job import Job
from mdsmix.convert.stored import UnitResult
from mdsmix.errors import TooManyBadRecords
from mdsmix.shards.counts import Records
from mdsmix.sources import Unit, most_records

FIRST_UNITS = 3
NEARLY_ALL = Fraction(9, 10)


def refuse_too_many_bad(job: Job, records: Records) -> None:
    """TooManyBadRecords where more records of the whole stream were bad than the recipe's max_bad allows."""
    if records.bad > job.max_bad * records.sampled:
        raise TooManyBadRecords(
            f"stream {job.name}: {_bad_of(records)}, more than max_bad {_percent(job.max_bad)}; nothing new is published. "
            f"{where(job, records)}"
        )


@dataclass(slots=True)
class FirstUnits:
    """The first units of the plan, as far as all of them are done."""

    job: Job
    units: Sequence[Unit]
    done: int = 0
    records: Records = field(default_factory=Records)
    _to_come: list[float] = field(default_factory=list)
    "For each number of finished units, how many records the remaining units hold at most."

    def is_hopeless(self, found: Mapping[int, UnitResult]) -> bool:
        """Whether no later unit can bring the share down; `done` then says how many units it took to know. `found`: finished
        units by their numbers."""
        self._to_come = self._to_come or _most_to_come(self.units)
        while self.done in found:
            self.records = sum((r.records for r in found[self.done].records), self.records)
            self.done += 1
            if self.done < len(self.units) and self._is_beyond():
                return True
        return False

    def refusal(self) -> TooManyBadRecords:
        of = f"the first {self.done} of {len(self.units)} work units"
        return TooManyBadRecords(
            f"stream {self.job.name}: {_bad_of(self.records)} in {of}, and max_bad is {_percent(self.job.max_bad)}, so the others "
            f"were not waited for; nothing new is published, finished units are kept. {where(self.job, self.records)}"
        )

    def _is_beyond(self) -> bool:
        bad, read, most = self.records.bad, self.records.sampled, self.job.max_bad
        if not bad:  # as a rule, and a comparison of fractions is slow
            return False
        if self.done == FIRST_UNITS and bad > max(NEARLY_ALL, most) * read:
            return True
        return bad > most * (read + self._to_come[self.done])


def _most_to_come(units: Sequence[Unit]) -> list[float]:
    return [*accumulate(map(most_records, reversed(units)), initial=0)][::-1]


def _bad_of(records: Records) -> str:
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in records.quarantined.items())
    return f"{records.bad:,} of {records.sampled:,} records are bad ({reasons})"


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):.4f}".rstrip("0").rstrip(".") + "%"


def where(job: Job, records: Records) -> str:
    """Where the bad records lie, and what they suggest."""
    lie = f"They lie in {job.target}/quarantine (mdsmix quarantine shows them): mend the source, or raise max_bad (1.0 allows any number)."
    return " ".join([*advice(job, records), lie])
