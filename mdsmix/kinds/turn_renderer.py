"""Renders conversations with a stream's chat template, splits the rendered text into the same turns
as LLM-Foundry's converter does, and tokenizes the turns.

The tokenizer is called once for each batch, with the texts of all turns in one list. All later
steps are arithmetic on lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple

from mdsmix.encode import forms, printed_parts
from mdsmix.encode.answer_parts import (
    CALL,
    PARTS,
    PARTS_REASONS,
    PartRange,
    find_parts,
    has_earlier_call,
)
from mdsmix.encode.answer_spans import WeightedRange, match_answers, weigh_responses
from mdsmix.encode.backends import Backend
from mdsmix.encode.chat import (
    ChatTemplate,
    PlainPart,
    TemplateLayout,
    Turn,
    find_layout_for_roles,
    find_plain,
    find_trained_answers,
    render_alike,
)
from mdsmix.encode.control_words import ControlWords, open_control_words
from mdsmix.encode.labels import Turns
from mdsmix.encode.open_template import add_variables, open_stream_template
from mdsmix.encode.rewritten_history import render_rows
from mdsmix.encode.special_tokens import make_token_search
from mdsmix.encode.trained_ranges import MarkedRange, mark_tokens, multiply_weights
from mdsmix.kinds.row_faults import (
    LATER_SYSTEMS,
    find_faultless,
    find_later_systems,
    find_row_faults,
    find_without_results,
    has_thought,
    list_signs,
)
from mdsmix.kinds.turn_rows import PLACEHOLDERS, TurnRows, count_placeholders
from mdsmix.lazy_numpy import np
from mdsmix.record import Conversation, PlainConversations, RecordRefused, RichConversation
from mdsmix.shapes.extras import VARIABLES
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer

TEMPLATE_REASONS = {
    "template_error": "The chat template fails on the conversation.",
    "split_token": (
        "A prompt or an answer would end inside a control token of the tokenizer; the detail shows "
        "the text before and after that end."
    ),
    "not_prefix_stable": (
        "The chat template prints earlier messages in another way once more messages follow; the "
        "detail shows both texts where they differ."
    ),
    "untrained_in_prompt": (
        "A prompt contains an answer, or characters of an answer, that are marked as not trained, "
        "but target_prompts in the recipe trains prompts."
    ),
    "span_in_encoder": (
        "Only some characters of an answer are trained, but the recipe sets decoder_only_format: "
        "false, so an encoder would read the others."
    ),
    "span_not_printed": (
        "The chat template prints an answer with train_detail in another way than the record has "
        "it, so that its characters are not found; the detail gives the message's position."
    ),
    "tools_not_printed": (
        "The conversation has tools, calls or results, but the chat template prints none of them."
    ),
    "image_not_printed": (
        "The conversation has an image, but the chat template prints no image token for it."
    ),
    **PARTS_REASONS,
}
"""Reason codes of conversations that the chat template cannot render -> their explanations."""


class RenderedRows(NamedTuple):
    """The rows that the chat template prints for a batch of conversations, before they are
    tokenized.
    """

    rows: list[Sequence[Turn]]
    "The turns of each row. A turn is a prompt and the response to it, both strings."
    ranges: list[Sequence[MarkedRange]]
    """The ranges of each response with their marks (`mark_rows`), for the responses of all rows in
    order. Empty if no response has marks.
    """
    positions: list[int]
    "The position of each row's conversation in the batch."
    rejected: dict[int, str]
    "Position of a conversation without a row -> the reason code."
    unread: Counter[str]
    "Field that the template does not print -> number of conversations that have it."


class Prepared(NamedTuple):
    """A conversation as a chat template takes it, and this template."""

    template: ChatTemplate
    conversation: Conversation


class TurnRenderer:
    """Renders the conversations of a stream, and tokenizes their turns. A turn is a prompt and the
    response to it. Subclasses that make other rows of a conversation override `rows_of`.
    """

    trains_answers: ClassVar[bool] = True
    "Whether answers in the conversations are trained; False for prompts."

    def __init__(self, encoding: Encoding, tokenizer: Tokenizer, backend: Backend) -> None:
        self.encoding = encoding
        self.tokenizer = tokenizer
        self.backend = backend

    @cached_property
    def chat(self) -> ChatTemplate:
        return open_stream_template(self.encoding, self.tokenizer)

    @property
    def controls(self) -> Sequence[str]:
        """The strings that the tokenizer reads as special tokens."""
        return self.tokenizer.special_tokens

    @cached_property
    def has_control(self) -> Callable[[str], bool]:
        return make_token_search(self.controls)

    @cached_property
    def words(self) -> ControlWords:
        """The special and added tokens of the tokenizer. No text may be split inside a token."""
        return open_control_words((*self.controls, *self.tokenizer.added_tokens))

    @cached_property
    def suspicious_characters(self) -> set[str]:
        """The first characters of all special tokens and placeholders, such as `<`. Only texts that
        contain one of them are searched for special tokens and placeholders.
        """
        return {token[0] for token in (*self.controls, *PLACEHOLDERS) if token}

    def prints_null(self, conversation: RichConversation, role: str, path: tuple[str, ...]) -> bool:
        """Check whether the chat template may print a null of a message such as `{"role":
        "user", "name": None}`.

        Args:
            conversation: the conversation with the message.
            role: the role of the message.
            path: the keys that lead from the message to the null (`printed_parts.prints_null`).
        """
        template = add_variables(self.chat.for_tools(conversation.tools), conversation.variables)
        return printed_parts.prints_null(template, role, path)

    def render(self, conversations: Sequence[Conversation]) -> TurnRows:
        """Render each conversation with the chat template, and tokenize its turns.

        A conversation becomes one row, or the several rows that `rows_of` makes of it. A
        conversation that cannot be rendered gets a reason code in `TurnRows.rejected`.
        """
        plain = find_plain(conversations)
        suspicious = self._join_suspicious_texts(conversations, plain)
        with_specials = self._find_specials(conversations, suspicious)

        # Render each conversation.
        if isinstance(conversations, PlainConversations):
            has_losses = any(conversations.losses)
        else:
            has_losses = any(conversation.losses for conversation in conversations)
        has_marks = has_losses or bool(self.encoding.train_parts)
        together = self.render_together(plain)
        rendered = self._render_rows(conversations, together, with_specials, has_marks)
        unprinted = self._count_unprinted(conversations, plain, rendered.rejected)
        rendered.unread.update(unprinted)

        # Tokenize all turns together: the list of texts is prompt, response, prompt, and so on.
        texts = [*chain.from_iterable(chain.from_iterable(rendered.rows))]
        ids = self.backend.encode(texts, match_special=True)
        turns = Turns(ids, np.array([len(row) for row in rendered.rows], np.int64))
        if has_marks:
            turns = mark_tokens(turns, texts[1::2], rendered.ranges, self.backend)
        with_spans = None
        if has_losses:
            flags = [names_characters(conversations[position]) for position in rendered.positions]
            with_spans = np.array(flags, bool)

        whole_texts = (conversation.all_text for conversation in conversations)
        return TurnRows(
            turns=turns,
            positions=rendered.positions,
            rejected=rendered.rejected,
            with_specials=with_specials,
            placeholders=count_placeholders([suspicious], whole_texts),
            faults=self._find_faults(conversations, plain, rendered, suspicious),
            unread=rendered.unread,
            with_untrained_calls=self._find_untrained_calls(
                conversations, plain, rendered, has_call_texts=CALL in suspicious
            ),
            images=_list_images(conversations, rendered.positions),
            has_spans=with_spans,
        )

    def _find_specials(self, conversations: Sequence[Conversation], suspicious: str) -> set[int]:
        """Return the positions of the conversations that contain the string of a special token.

        Args:
            conversations: the records.
            suspicious: the texts of `_join_suspicious_texts`.
        """
        if not self.has_control(suspicious):
            return set()
        return {
            position
            for position, conversation in enumerate(conversations)
            if self.has_control(conversation.all_text)
        }

    def _find_faults(
        self,
        conversations: Sequence[Conversation],
        plain: PlainPart,
        rendered: RenderedRows,
        suspicious: str,
    ) -> dict[str, set[int]]:
        """Return the positions of the conversations whose rows are probably damaged, by their fault
        (`find_row_faults`).

        Args:
            conversations: the records.
            plain: the plain ones among them, whose only texts are the contents of their messages.
            rendered: their rows.
            suspicious: the texts of `_join_suspicious_texts`.
        """
        later_systems = find_later_systems(conversations, rendered.positions, plain)
        faulty = {LATER_SYSTEMS: later_systems} if later_systems else {}
        if not suspicious or not any(sign in suspicious for sign in list_signs(self.chat)):
            return faulty
        # Looking at all plain conversations took a twentieth of a conversion of chats, and a sixth
        # if their answers have thoughts.
        faultless = find_faultless(plain, self.chat, has_thought(suspicious))
        searched = {*rendered.positions} - faultless
        trained = self.encoding.target_responses if self.trains_answers else ""
        return faulty | find_row_faults(conversations, searched, self.chat, trained)

    def _join_suspicious_texts(
        self, conversations: Sequence[Conversation], plain: PlainPart
    ) -> str:
        """Return all texts of conversations that may contain a special token or a placeholder,
        joined to one string.

        These are the texts with one of the `suspicious_characters`, and few texts have one. A
        search for these characters takes a tenth of the time of a search for special tokens.

        Args:
            conversations: the records.
            plain: the plain ones among them, whose only texts are the contents of their messages.
        """
        texts = [*plain.conversations.all_contents]
        plain_positions = {*plain.positions}
        for position in range(len(conversations)):
            if position not in plain_positions:
                texts += conversations[position].texts
        suspicious_texts = dict[str, None]()  # an ordered set
        for character in self.suspicious_characters:
            suspicious_texts |= dict.fromkeys([text for text in texts if character in text])
        return "\n".join(suspicious_texts)

    def _render_rows(
        self,
        conversations: Sequence[Conversation],
        together: Mapping[int, Sequence[Turn]],
        with_specials: Set[int],
        has_marks: bool,
    ) -> RenderedRows:
        """Render each conversation with the chat template. A conversation that cannot be rendered
        gets a reason code in `RenderedRows.rejected`.

        Args:
            conversations: the records.
            together: the turns of those that were rendered together (`render_together`).
            with_specials: positions of those that contain the string of a special token.
            has_marks: whether a part of a response may have another loss weight than the rest, so
                that `ranges` are needed.
        """
        rendered = RenderedRows([], [], [], {}, Counter())
        refused = with_specials
        if self.encoding.special_tokens_in_text == "allow":
            refused = frozenset()
        for position in range(len(conversations)):
            turns = together.get(position)
            if turns and not has_marks and position not in refused:
                # Most conversations: 0.2 us for each instead of 1.
                rendered.rows.append(turns)
                rendered.positions.append(position)
                continue
            try:
                if position in refused:
                    raise RecordRefused("special_token_in_text")
                conversation = conversations[position]
                rows = [turns] if turns else self._render_alone(conversation, rendered.unread)
                ranges: list[list[MarkedRange]] = []
                if has_marks:
                    layout = self._find_layout(conversation) if turns else None
                    ranges = self.mark_rows(conversation, rows, layout)
            except RecordRefused as error:
                rendered.rejected[position] = error.why
            else:
                rendered.rows.extend(rows)
                rendered.ranges.extend(ranges)
                rendered.positions.extend(repeat(position, len(rows)))
        return rendered

    def _render_alone(
        self, conversation: Conversation, unread: Counter[str]
    ) -> Sequence[Sequence[Turn]]:
        """Return the rows of a conversation (`rows_of`).

        Raises RecordRefused if it has no row, or if a prompt or a response ends inside a control
        token.
        """
        rows = self.rows_of(conversation, unread)
        for row in rows:
            self.words.refuse_split([*chain.from_iterable(row)])
        return rows

    def _find_layout(self, conversation: Conversation) -> TemplateLayout | None:
        """Return the layout with which a conversation was rendered together with others."""
        roles = tuple([message["role"] for message in conversation.messages])
        return find_layout_for_roles(self.chat, roles)

    def render_together(self, plain: PlainPart) -> Mapping[int, Sequence[Turn]]:
        """Return the turns of the conversations that can be rendered together with others like
        them, which is faster, by their positions in the batch. `rows_of`, which has to render all
        others alone, would return one row of the same turns.
        """
        # A subclass that overrides `rows_of` makes other rows.
        if type(self).rows_of is not TurnRenderer.rows_of:
            return {}
        rendered = render_alike(self.chat, plain, self.words)
        if self.encoding.target_prompts == "none":
            return rendered
        # If prompts are trained, `rows_of` refuses some conversations with untrained answers.
        for position, trained in zip(plain.positions, plain.conversations.trained, strict=True):
            if trained is not None:
                rendered.pop(position, None)
        return rendered

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[Turn]]:
        """Return the rows of a conversation, each a list of turns: `[[("Hi", "Hello")]]`.

        Raises RecordRefused if no row can be made of the conversation.

        Args:
            conversation: the record.
            unread: counts the fields that the template does not print; they are added here.
        """
        # If some answers are marked as not trained, check that at least one answer is trained. An
        # untrained answer becomes a part of the prompt of the next trained answer: refuse the
        # conversation if prompts are trained.
        if conversation.trained is not None:
            trained = find_trained_answers(conversation)
            if not trained:
                raise RecordRefused("nothing_trained")
            all_answers = find_trained_answers(conversation._replace(trained=None))
            trains_prompts = self.encoding.target_prompts != "none"
            # No earlier answer is untrained if the trained answers are the first answers.
            has_earlier_untrained = all_answers[: len(trained)] != trained
            if trains_prompts and has_earlier_untrained:
                raise RecordRefused("untrained_in_prompt")
        template, conversation = self.prepare(conversation, unread)
        rule = self.encoding.rewritten_history
        return render_rows(template, conversation, rule, self.words)

    def prepare(self, conversation: Conversation, unread: Counter[str]) -> Prepared:
        """Choose the chat template for a conversation (the tokenizer may have one for tools), and
        return the conversation with its calls of tools written as this template takes them, for
        example with their arguments as a JSON string.

        Raises RecordRefused (tools_not_printed) if the template does not print the tools.

        Args:
            conversation: the record.
            unread: counts the fields that the template does not print; they are added here.
        """
        if isinstance(conversation, RichConversation):
            conversation = forms.lift_system_tools(self.chat, conversation)
        # A tokenizer may have a template of its own for conversations with tools.
        chosen = self.chat.for_tools(conversation.tools)
        # Without such a template, an empty list of tools means the same as no tools.
        if conversation.tools == [] and chosen is self.chat:
            conversation = conversation._replace(tools=None)
        template = add_variables(chosen, conversation.variables)
        if isinstance(conversation, RichConversation):
            conversation = forms.fit_tools(chosen, conversation)
            unread.update(set(printed_parts.find_unread_keys(template, conversation)))
        unread.update(self.unread_variables(conversation))
        return Prepared(template, conversation)

    def find_unread(self, conversation: Conversation) -> set[str]:
        """Return the names of the fields of a conversation that the template does not print, such
        as `messages.name`. Return no keys of messages if the template cannot take the conversation.
        """
        unread = Counter(self.unread_variables(conversation))
        with suppress(RecordRefused):
            self.prepare(conversation, unread)
        return {*unread}

    def _count_unprinted(
        self,
        conversations: Sequence[Conversation],
        plain: PlainPart,
        rejected: Mapping[int, str],
    ) -> Counter[str]:
        """Return how many conversations with a row have contents that the template does not print:
        name, such as `messages.content of system messages` -> number.

        Args:
            conversations: the records.
            plain: the plain ones among them. Most templates print no role developer, so those whose
                roles are all printed are skipped together: 0.1 us a conversation.
            rejected: has a key for the position of each conversation without a row.
        """
        counts = Counter[str]()
        if self._prints_system_roles:
            return counts
        skipped = {*rejected}
        if all(map(self._prints_roles, {*plain.conversations.roles})):
            skipped.update(plain.positions)
        for position in range(len(conversations)):
            if position not in skipped:
                counts.update(self.find_unprinted(conversations[position]))
        return counts

    def _find_untrained_calls(
        self,
        conversations: Sequence[Conversation],
        plain: PlainPart,
        rendered: RenderedRows,
        has_call_texts: bool,
    ) -> set[int]:
        """Return the positions of the conversations with a row that call tools in an answer which
        is not trained: only their last answer is, by `target_responses: last`, or since
        `rewritten_history: last` made one turn of them.

        Args:
            conversations: the records.
            plain: the plain ones among them. Their calls can only be texts, or texts before the
                result of a tool.
            rendered: their rows.
            has_call_texts: whether a text of the conversations may be a call.
        """
        leaves_out_calls = not self.encoding.train_parts.get("calls", True)
        trains_last = self.encoding.target_responses == "last"
        makes_one_turn = self.encoding.rewritten_history == "last"
        trains_all = not trains_last and not makes_one_turn
        if leaves_out_calls or self.encoding.target_prompts != "none" or trains_all:
            return set()
        skipped = set[int]() if has_call_texts else find_without_results(plain)
        if len(skipped) == len(conversations):
            return set()
        return {
            position
            for position, row in zip(rendered.positions, rendered.rows, strict=True)
            if (trains_last or (makes_one_turn and len(row) == 1))
            and position not in skipped
            and has_earlier_call(conversations[position])
        }

    def _prints_roles(self, roles: Sequence[str]) -> bool:
        """Check whether the template prints the messages of conversations with these roles and
        without tools.
        """
        messages = [{"role": role, "content": "x"} for role in roles]
        return not any(printed_parts.find_unprinted_contents(self.chat, messages))

    def find_unprinted(self, conversation: Conversation) -> set[str]:
        """Return names for the contents of a conversation that the template does not print, such as
        `messages.content of system messages`.
        """
        if self._prints_system_roles:
            return set()
        template = self.chat.for_tools(conversation.tools)
        return {*printed_parts.find_unprinted_contents(template, conversation.messages)}

    @cached_property
    def _prints_system_roles(self) -> bool:
        """Whether the templates print all messages of the roles system and developer."""
        templates = filter(None, [self.chat, self.chat.tool_use])
        return all(map(printed_parts.prints_system_roles, templates))

    def mark_rows(
        self,
        conversation: Conversation,
        rows: Sequence[Sequence[Turn]],
        layout: TemplateLayout | None,
    ) -> list[list[MarkedRange]]:
        """Split each response of a conversation's rows into ranges of characters. A range has the
        number of the part of the answer that it belongs to (such as the reasoning), and its loss
        weight, 0 if it is not trained. The weight is the product of the weights that the recipe's
        `train_parts` and the record itself (its `train_detail`, with ranges of characters called
        spans) give these characters.

        Raises RecordRefused with one of these reason codes:
            parts_not_found: an answer's parts are not found in what the template prints.
            span_not_printed: the template does not print the content of an answer with spans as it
                is.
            untrained_in_prompt: the recipe trains prompts, so an answer that the record leaves
                untrained would be trained as a part of a later prompt.
            span_in_encoder: the recipe sets decoder_only_format: false, so an encoder would read
                characters that the record does not train.

        Args:
            conversation: the record.
            rows: its rows, each a list of turns.
            layout: the layout of these turns; None if the conversation was rendered by itself.

        Returns:
            A list of ranges for each response, in the order of the rows and their turns.
        """
        ranges_of_parts = None
        if self.encoding.train_parts:
            ranges_of_parts = self._mark_parts(conversation, rows)
        if conversation.losses:
            if self.encoding.target_prompts != "none":
                raise RecordRefused("untrained_in_prompt")
            if not self.encoding.decoder_only_format:
                raise RecordRefused("span_in_encoder")
            # Without a layout, spans are found by rendering the conversation again, with a private
            # character in the content at each end of a span: the template may strip or move it.
            weighed = weigh_responses(
                conversation, rows, lambda marked: self.rows_of(marked, unread=Counter()), layout
            )
            weighed_responses = [*chain.from_iterable(weighed)]
        else:
            # Each response is one range, trained with the weight 1.
            weighed_responses = [
                [WeightedRange(0, len(response), 1.0)] for row in rows for _, response in row
            ]
        if ranges_of_parts is None:
            return [
                [MarkedRange(start, stop, 0, weight) for start, stop, weight in of_response]
                for of_response in weighed_responses
            ]
        pairs = zip(ranges_of_parts, weighed_responses, strict=True)
        return [multiply_weights(*pair) for pair in pairs]

    def _mark_parts(
        self, conversation: Conversation, rows: Sequence[Sequence[Turn]]
    ) -> list[list[MarkedRange]]:
        """Split each response of a conversation's rows into its parts, such as the reasoning and
        the answer, with the weights that the recipe's `train_parts` gives them. The arguments are
        those of `mark_rows`.
        """
        template, prepared = self.prepare(conversation, Counter())
        ranges = list[list[MarkedRange]]()
        for row, answers in zip(rows, match_answers(prepared, rows), strict=True):
            for answer, (prompt, response) in zip(answers, row, strict=True):
                parts = find_parts(template, prepared, answer, prompt, response)
                ranges.append([self._mark_part(answer_part) for answer_part in parts])
        return ranges

    def _mark_part(self, answer_part: PartRange) -> MarkedRange:
        """Return the characters of one part of an answer, such as its reasoning, with the number of
        the part and the loss weight that the recipe's `train_parts` gives it.
        """
        number = PARTS.index(answer_part.name) + 1
        weight = float(self.encoding.train_parts[answer_part.name])
        return MarkedRange(answer_part.start, answer_part.stop, number, weight)

    def unread_variables(self, conversation: Conversation) -> Iterator[str]:
        """Yield the variables of the conversation that the chat template does not read, except
        those that are empty, such as `chat_template_kwargs.enable_thinking`.
        """
        for name, value in (conversation.variables or {}).items():
            is_empty = not value and not isinstance(value, (int, float))  # as "", [] and {}
            if name not in self.chat.reads and not is_empty:
                yield f"{VARIABLES}.{name}"


def _list_images(
    conversations: Sequence[Conversation], positions: Sequence[int]
) -> list[Sequence[Any]]:
    """Return the images of the conversations at these positions."""
    if isinstance(conversations, PlainConversations):
        return [()] * len(positions)
    return [conversations[position].images for position in positions]


def names_characters(conversation: Conversation) -> bool:
    """Check whether a conversation says which characters of an answer are trained, by the key
    `train_detail` of a message.
    """
    return any(loss and loss.spans is not None for loss in conversation.losses or ())
