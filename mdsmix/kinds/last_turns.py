"""Shortens conversations that are longer than max_seq_len from their beginning (`too_long:
last_turns`): the system message and the last turns that fit are kept.

A shortened conversation is rendered again by the chat template, and not cut from the token ids.
Templates print the first question in another way than later ones, or move the tools to it. So a row
equals the row of a record that has only these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mdsmix.encode.chat import find_trained_answers
from mdsmix.encode.labels import Lengths, Turns
from mdsmix.kinds.turn_rows import TurnRows
from mdsmix.lazy_numpy import np
from mdsmix.record import SYSTEM_ROLES, Conversation, Message, count_message_images


@dataclass(slots=True)
class _Search:
    """The search for the first cut after which a conversation fits. A cut is the position of the
    first message that is kept (besides the system message). The range of cuts is halved in each
    round.
    """

    conversation: Conversation
    cuts: list[int]
    "The positions of the user messages with which the kept turns can begin, in order."
    low: int = 0
    "The conversation is too long after each cut before `cuts[low]`."
    high: int = field(init=False)
    "`cuts[high]` is the first cut after which it is known to fit; len(cuts) if none is known."
    fitting: Turns | None = None
    "The tokenized turns that `cuts[high]` keeps; None if no cut is known to fit."

    def __post_init__(self) -> None:
        self.high = len(self.cuts)

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    def shorten(self) -> Conversation:
        """Return the conversation from the middle cut on, with its system message."""
        return drop_turns(self.conversation, self.cuts[self.middle])

    def narrow(self, turns: Turns | None) -> None:
        """Halve the range of cuts.

        Args:
            turns: the tokenized turns that the middle cut keeps; None if they do not fit, or if the
                chat template refuses the shortened conversation.
        """
        if turns is None:
            self.low = self.middle + 1
            return
        self.high = self.middle
        self.fitting = turns

    def count_left_out(self) -> int:
        """Return the number of user messages before the cut that was found."""
        before = self.conversation.messages[: self.cuts[self.high]]
        return len([message for message in before if message["role"] == "user"])


def keep_last_turns(
    conversations: Sequence[Conversation],
    rows: TurnRows,
    longest: int,
    render: Callable[[Sequence[Conversation]], TurnRows],
    measure: Callable[[TurnRows], Lengths],
) -> TurnRows:
    """Return the rows of a batch with each row that is too long shortened to its conversation's
    system message and as many of its last turns as fit. A row stays as it is, and too long, if not
    even the last question and its answers fit.

    A batch without a long row is measured, and no more. The searches of a batch go on together:
    each round renders and tokenizes all conversations that are still searched in one call. A
    conversation of n questions takes log2(n) rounds.

    Args:
        conversations: the records of the batch.
        rows: their rows, at most one for each record.
        longest: max_seq_len.
        render: tokenizes conversations as `rows` were made.
        measure: returns the length of each row in tokens (int64) with everything that has to fit,
            such as the EOS that the loader appends.
    """
    long_rows = np.flatnonzero(measure(rows) > longest).tolist()
    if not long_rows:
        return rows
    searches = dict[int, _Search]()
    for row in long_rows:
        conversation = conversations[rows.positions[row]]
        searches[row] = _Search(conversation, find_cuts(conversation))
    while True:
        open_searches = [search for search in searches.values() if search.low < search.high]
        if not open_searches:
            break
        tried = render([search.shorten() for search in open_searches])
        fits = measure(tried) <= longest
        fitting = {
            position: tried.turns.slice(row, row + 1)
            for row, position in enumerate(tried.positions)
            if fits[row]
        }
        for position, search in enumerate(open_searches):
            search.narrow(fitting.get(position))
    return _replace_rows(rows, searches)


def _replace_rows(rows: TurnRows, searches: dict[int, _Search]) -> TurnRows:
    """Return the rows with the shortened turns that the searches found.

    Args:
        rows: the rows of a batch.
        searches: number of a row that is too long -> its search, which has ended. In the order
            of the rows.
    """
    images = [*rows.images]
    left_out = np.zeros(len(rows.positions), np.int64)
    # The shortened rows, and between them slices of the rows that stay.
    parts = list[Turns]()
    start = 0
    for row, search in searches.items():
        if search.fitting is None:
            continue
        parts += [rows.turns.slice(start, row), search.fitting]
        start = row + 1
        images[row] = drop_turns(search.conversation, search.cuts[search.high]).images
        left_out[row] = search.count_left_out()
    parts.append(rows.turns.slice(start, len(rows.positions)))
    return replace(
        rows,
        turns=Turns.concat(parts),
        images=images,
        whole_lengths=rows.turns.samples.lengths,
        left_out_turns=left_out,
    )


def find_cuts(conversation: Conversation) -> list[int]:
    """Return the positions of the user messages with which the kept turns of a conversation can
    begin, in order. Each of them leaves something out, and keeps the last answer that is trained.
    """
    messages = conversation.messages
    system_end = _count_system_messages(messages)
    answers = find_trained_answers(conversation)
    last_answer = answers[-1] if answers else 0
    return [
        position
        for position in range(system_end + 1, last_answer)
        if messages[position]["role"] == "user"
    ]


def drop_turns(conversation: Conversation, cut: int) -> Conversation:
    """Return a conversation without the messages between its system message and position `cut`, and
    without their images.
    """
    messages = conversation.messages
    system_end = _count_system_messages(messages)
    dropped = slice(system_end, cut)
    # Shapes make a record without untrained messages with `trained=None`.
    trained: list[bool] | None = None
    if conversation.trained is not None:
        flags = conversation.trained
        kept_flags = [*flags[:system_end], *flags[cut:]]
        trained = None if all(kept_flags) else kept_flags
    losses = conversation.losses
    if losses is not None:
        losses = [*losses[:system_end], *losses[cut:]]
    first_image = _count_images(messages[:system_end])
    end_image = first_image + _count_images(messages[dropped])
    images = conversation.images
    return conversation._replace(
        messages=[*messages[:system_end], *messages[cut:]],
        trained=trained,
        images=[*images[:first_image], *images[end_image:]],
        losses=losses if losses and any(losses) else None,
    )


def _count_system_messages(messages: Sequence[Message]) -> int:
    """Return how many messages at the beginning are the system's."""
    for position, message in enumerate(messages):
        if message["role"] not in SYSTEM_ROLES:
            return position
    return len(messages)


def _count_images(messages: Sequence[Message]) -> int:
    """Return how many parts of the messages are images."""
    return sum(count_message_images(message) for message in messages)
