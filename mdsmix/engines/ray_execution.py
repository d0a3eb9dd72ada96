"""One try of a task on a Ray cluster, as its driver knows it: what it said last, what it has done, whether it hangs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mdsmix.engines.attempts import Attempt
from mdsmix.engines.hang import Pulse
from mdsmix.engines.ray_worker import News


@dataclass(slots=True, eq=False)
class Execution:
    """One try of a task, on its way or in work."""

    ref: Any
    number: int
    attempt: Attempt
    losses: int
    "How often the cluster had lost a node when it was sent."
    news: News | None = None
    "None: it has not begun, as far as is known."
    pulse: Pulse = field(default_factory=Pulse)
    size: int = 0
    tokens: int = 0
    "What is known to be done."

    def rest(self, whole: News) -> News:
        """What of all that the try did was not heard yet."""
        return replace(whole, size=whole.size - self.size, tokens=whole.tokens - self.tokens)

    def hear(self, news: News) -> None:
        is_first = self.news is None
        if self.news is None or news.size or news.place != self.news.place:
            self.pulse.beat()
        self.news = news
        self.size, self.tokens = self.size + news.size, self.tokens + news.tokens
        if is_first:
            self.pulse = Pulse()

    def hangs(self) -> str | None:
        """Why it is taken for hung; a task that waits for its turn is not."""
        if (news := self.news) is None:
            return None
        return self.pulse.look(
            lambda: ("S", news.used), news.place.size if news.place else None, False
        )
