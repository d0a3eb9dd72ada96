"""What preferences and unpaired preferences have in common: answers to a prompt that were judged,
as chosen and rejected or by a label. Each answer is tokenized together with its prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from mdsmix.encode import chat
from mdsmix.errors import RecipeError
from mdsmix.kinds.finetuning import WINDOW_BYTES
from mdsmix.kinds.template_kind import TemplateKind, find_decoder_faults, template_variables
from mdsmix.kinds.turn_renderer import TurnRenderer
from mdsmix.kinds.turn_rows import (
    TurnRows,
    count_message_texts,
    count_placeholders,
    tokenize_pairs,
)
from mdsmix.lazy_numpy import np
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, Pair
from mdsmix.shards.token_ids import Ids, Turn
from mdsmix.tokenizer.card import Tokenizer

Answer = Pair | Conversation
"""An answer with its prompt: a pair of two strings, or a conversation whose last message is the
answer.
"""


class TokenizedAnswers(NamedTuple):
    """Answers with their prompts as token ids, and what was found in their texts."""

    turns: list[Turn | str]
    """For each answer the ids of its prompt and of itself. A str in place of the ids is a reason
    code, such as `template_error`: the answer cannot be tokenized.
    """
    with_specials: set[int]
    "Positions of the answers that contain the string of a special token, or whose prompts do."
    unread: Counter[str]
    "Field that the chat template does not print -> number of answers whose conversation has it."


class LastAnswerRenderer(TurnRenderer):
    """Renders a conversation as one turn: all text up to its last answer, and that answer."""

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[chat.Turn]]:
        """Return one row with one turn: all text up to the last answer, and this answer.

        Raises RecordRefused if the chat template fails on the conversation.

        Args:
            conversation: the record.
            unread: counts the fields that the template does not print; they are added here.
        """
        # The parent's last row ends with the last answer. The new prompt is the text of all earlier
        # turns, joined, and the prompt of the last turn.
        last_row = super().rows_of(conversation, unread)[-1]
        *earlier_turns, (prompt, answer) = last_row
        whole_prompt = "".join(chain(*earlier_turns, [prompt]))
        return [[(whole_prompt, answer)]]

    def render_history(self, conversation: Conversation) -> str:
        """Return the text of all messages before the last answer."""
        template, conversation = self.prepare(conversation, Counter())
        return template.render(
            conversation.messages[:-1], add_generation_prompt=False, tools=conversation.tools
        )


class JudgedAnswers(TemplateKind):
    """The base of the kinds of preferences and of unpaired preferences."""

    word = "preference"
    window_bytes = WINDOW_BYTES
    has_targets = False
    ends_in_eos: ClassVar[bool] = True
    "Whether each answer is stored with EOS as its last token."

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the settings that all kinds of judged answers add to the stream's Encoding (the
        settings that a published stream stores), as field -> value: the chat template's variables,
        and fixed values of settings that such streams do not have. Subclasses add `columns`.

        Raises RecipeError if answers end in EOS, and the tokenizer has no EOS.
        """
        if cls.ends_in_eos and tokenizer.eos_id is None:
            raise RecipeError(
                f"stream {stream.name}: answers of preferences end in EOS, but the tokenizer "
                f"{tokenizer.name} has no EOS token: set tokenizer.kwargs.eos_token in the recipe."
            )
        return {
            "target_prompts": "none",
            "target_responses": "last",
            "rewritten_history": "last",
            "template": template_variables(recipe, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each setting of the recipe that is wrong for preferences, or
        contradicts another setting.
        """
        yield from find_decoder_faults(recipe, stream, "preferences")
        yield from super().contradictions(recipe, stream)

    @cached_property
    def renderer(self) -> LastAnswerRenderer:
        return LastAnswerRenderer(self.encoding, self.tokenizer, self.backend)

    def tokenize(self, answers: Sequence[Answer]) -> TokenizedAnswers:
        """Tokenize answers with their prompts. Return for each answer the ids of its prompt and its
        own ids, or a reason code if it cannot be tokenized. Return also which answers contain the
        string of a special token, and how many have each field that the template does not print.

        All pairs are tokenized at once, and then all conversations.
        """
        turns: list[Turn | str] = ["" for _ in answers]
        with_specials = set[int]()
        unread = Counter[str]()
        tokenizers: list[tuple[type, Callable[[Sequence[Any]], TurnRows]]] = [
            (Pair, self._tokenize_pairs),
            (Conversation, self.renderer.render),
        ]
        for answer_type, tokenize in tokenizers:
            numbers = [i for i, answer in enumerate(answers) if isinstance(answer, answer_type)]
            # A position in `rows` counts only the answers of this type: `numbers` leads back.
            rows = tokenize([answers[number] for number in numbers])
            for position, reason in rows.rejected.items():
                turns[numbers[position]] = reason
            for row, position in enumerate(rows.positions):
                # Each row has one turn: its prompt and its answer are two successive lists of ids.
                prompt = rows.turns.ids[2 * row]
                answer = rows.turns.ids[2 * row + 1]
                turns[numbers[position]] = Turn(prompt, self.end_answer(answer))
            with_specials |= {numbers[position] for position in rows.with_specials}
            unread.update(rows.unread)
        return TokenizedAnswers(turns, with_specials, unread)

    def _tokenize_pairs(self, pairs: Sequence[Pair]) -> TurnRows:
        return tokenize_pairs(pairs, self.encoding, self.tokenizer, self.backend)

    def end_answer(self, answer: Ids) -> Ids:
        """Return the answer as it is stored: with EOS as its last token, unless the kind stores it
        without a further EOS (`ends_in_eos`). An empty answer stays empty.
        """
        if not self.ends_in_eos or not len(answer) or answer[-1] == self.tokenizer.eos_id:
            return answer
        return np.append(answer, self.tokenizer.eos_id or 0)


def count_answer_placeholders(answers_of_records: Sequence[Sequence[Answer]]) -> dict[str, int]:
    """Return placeholder -> number of records that contain it, for placeholders of images, videos
    and sounds such as `<image>`, and for texts that are lists of messages (MESSAGES_AS_TEXT).

    Args:
        answers_of_records: for each record its answers with their prompts: two for a preference,
            one for an unpaired preference.
    """
    texts_of_records = list[list[str]]()
    pairs = list[list[str]]()
    for answers in answers_of_records:
        texts = list[str]()
        pair = list[str]()
        for answer in answers:
            texts += answer if isinstance(answer, Pair) else answer.texts
            pair += answer if isinstance(answer, Pair) else ()
        texts_of_records.append(texts)
        pairs.append(pair)
    all_texts = chain.from_iterable(texts_of_records)
    return {
        **count_placeholders(all_texts, map("\n".join, texts_of_records)),
        **count_message_texts(chain.from_iterable(pairs), pairs),
    }
