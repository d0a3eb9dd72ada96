"""The output of `mdsmix check`: findings, shares, verdict, and how far shards were read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mdsmix.foundry_yaml.findings import Finding
from mdsmix.mix.check import (
    describe_coverage,
    describe_verdict,
    is_refused,
    list_unopened_evals,
    make_check_tree,
)
from mdsmix.mix.epoch.apportion import describe_shares, make_shares_table
from mdsmix.mix.streams.mix import Mix
from mdsmix.report.drawings import Ribbon, RibbonPart, choose_colours
from mdsmix.report.result import Result
from mdsmix.report.show import Heading, Item, group_findings
from mdsmix.table import Table, Tree, table_to_json


class CheckedMix(list[Finding], Result):
    """The findings on a mix, the gravest first."""

    def __init__(self, findings: Iterable[Finding], mix: Mix, locked: Table | None = None) -> None:
        """Keep the findings and what they are about.

        Args:
            mix: the mix that was checked.
            locked: a table that compares the streams with the YAML's lock, the record of how they
                were when the YAML was rendered; None if there was no comparison.
        """
        super().__init__(findings)
        self.mix = mix
        self.locked = locked

    __str__ = Result.__str__

    @property
    def is_refused(self) -> bool:
        """Whether there is an error, so that the mix may not be trained."""
        return is_refused(self)

    @property
    def verdict(self) -> str:
        """One line such as `3 streams may not be mixed (1 error, 2 notes)`."""
        return describe_verdict(self.mix, self)

    def items(self) -> Iterator[Item]:
        yield from group_findings(self)
        yield from self.summary()

    def items_with_drawings(self) -> Iterator[Item | Ribbon]:
        yield Heading(self.verdict)
        shares = self.mix.shares
        if shares:
            colours = choose_colours(share.stream for share in shares.streams)
            parts = list[RibbonPart]()
            for share in shares.streams:
                css = colours[share.stream]
                parts.append(RibbonPart(share.stream, css, float(share.reached)))
            yield Ribbon(f"reached shares of an epoch's {shares.count}", parts)
        for item in self.items():
            if item != self.verdict:
                yield item

    def summary(self) -> Iterator[Item]:
        """Yield what follows the findings: the shares, the verdict, and what was not read."""
        if self.mix.shares:
            yield describe_shares(self.mix.shares)
            yield make_shares_table(self.mix.shares)
        yield self.verdict
        yield describe_coverage(self.mix)
        for label in list_unopened_evals(self.mix):
            yield f"kept, but its streams were not opened: {label}"
        if self.locked:
            yield self.locked

    def to_dict(self) -> Tree:
        """Return the result as `mdsmix check --json` prints it."""
        tree = make_check_tree(self.mix, self)
        if self.locked:
            tree["lock"] = {"streams": table_to_json(self.locked)["rows"]}
        return tree
