"""Conversations: rendered by the tokenizer's chat template, and cut into the turns that Foundry's
converter makes.

The tokenizer is called once a batch, with the texts of all turns in one list. All later steps are
arithmetic on lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mdsmix.encode import forms
from mdsmix.encode.answer_ends import (
    EndNote,
    Stops,
    describe_doubled_eos,
    find_lead,
    find_stream_ends,
    is_ended_by_next,
    make_end_notes,
)
from mdsmix.encode.backends import make_token_search
from mdsmix.encode.chat import (
    ChatTemplate,
    Turn,
    add_variables,
    find_trained_answers,
    open_tokenizer_template,
    render_rows,
)
from mdsmix.encode.control_words import ControlWords, open_control_words
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Turns, move_stop_tokens
from mdsmix.errors import RecipeError
from mdsmix.kinds.finetuning import PLACEHOLDERS, Finetuning, TurnRows, placeholders_in
from mdsmix.messages import suggest_key
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, RecordRefused, RichConversation
from mdsmix.shapes.extras import OWN_VARIABLES, VARIABLES
from mdsmix.tokenizer.card import Tokenizer

OF_RECORDS = OWN_VARIABLES | {"documents", "date_string"}
"""Variables of a template that a recipe cannot set: a stream's date_string gives the day, and a
record its documents.
"""


def template_variables(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """The variables of the chat template that the recipe sets (tokenizer.template). RecipeError
    where the template does not read one, or mdsmix sets it itself.
    """
    given = recipe.tokenizer.template
    reads = open_tokenizer_template(tokenizer, {}).reads if given else frozenset[str]()
    for name in given:
        if name in OF_RECORDS:
            raise RecipeError(
                f"tokenizer.template.{name} is given by mdsmix itself, of a record or by the stream's date_string: take it out."
            )
        if name not in reads:
            raise RecipeError(
                f"tokenizer.template.{name} would change nothing, since the chat template of {tokenizer.name} does not "
                f"read it: {suggest_key(name, sorted(reads - OF_RECORDS))}"
            )
    return dict(given)


class Prepared(NamedTuple):
    """A conversation as its template takes it."""

    template: ChatTemplate
    conversation: Conversation


class Conversations(Finetuning):
    name = "conversations"
    reads: ClassVar[type] = Conversation
    called: ClassVar[tuple[str, ...]] = ("finetuning", "messages", "messages without images")
    reasons: ClassVar[Mapping[str, str]] = {
        "template_error": "The chat template fails on the conversation.",
        "split_token": (
            "A prompt or an answer would end inside a control token of the tokenizer; the "
            "detail holds both sides."
        ),
        "not_prefix_stable": (
            "The chat template prints earlier messages otherwise once there are more; the "
            "detail holds both texts where they part."
        ),
        "untrained_in_prompt": (
            "An answer that is not trained is in a prompt, and target_prompts trains prompts."
        ),
        "tools_not_printed": (
            "The chat template prints no tool, call or result of the conversation."
        ),
        "image_not_printed": "The chat template prints no image token for an image.",
    }
    has_template = True

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        found = super().settings(recipe, stream, tokenizer)
        if stream.columns == "turns" and not stream.pack:
            found["columns"] = {"turns": "json"}
        return {
            **found,
            "compact": stream.columns == "compact",
            "date_string": stream.date_string,
            "rewritten_history": stream.rewritten_history,
            "template": template_variables(recipe, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        yield from super().contradictions(recipe, stream)
        policies = (recipe.target_prompts, recipe.target_responses)
        if stream.columns == "compact" and policies != ("none", "last"):
            yield (
                "columns: compact holds only what target_prompts: none and target_responses: last train on; "
                f"the recipe says {'/'.join(policies)}: use columns: turns."
            )
        if stream.columns == "compact" and stream.pack:
            yield "columns: compact is for conversations with a row each, and pack: true joins several into a row: take one of the two out."
        if stream.rewritten_history == "each" and recipe.target_responses != "all":
            yield (
                "rewritten_history: each trains every answer of a conversation whose history the chat template rewrites, "
                "and target_responses: last only the last one of the others: set target_responses: all, or "
                "rewritten_history: last."
            )

    @property
    def splits_records(self) -> bool:
        return self.encoding.rewritten_history == "each"

    def template(self, tokenizer: Tokenizer) -> ChatTemplate:
        variables = tokenizer.template_variables | self.encoding.template
        return open_tokenizer_template(tokenizer, variables, self.encoding.date_string)

    @cached_property
    def chat(self) -> ChatTemplate:
        return self.template(self.tokenizer)

    def prints_null(self, conversation: RichConversation, role: str, key: str) -> bool:
        template = self.chat.for_tools(conversation.tools)
        return forms.prints_null(add_variables(template, conversation.variables), role, key)

    @property
    def controls(self) -> Sequence[str]:
        """The strings that the tokenizer takes for tokens of its own."""
        return self.tokenizer.special_tokens

    @cached_property
    def specials(self) -> Callable[[str], bool]:
        return make_token_search(self.controls)

    @cached_property
    def words(self) -> ControlWords:
        """The tokens that a text may not be cut inside of."""
        return open_control_words((*self.controls, *self.tokenizer.added_tokens))

    @cached_property
    def leads(self) -> list[list[int]]:
        """The ids of the white space that the template may print before a stop token."""
        stops = Stops.of(self.tokenizer, self.encoding.stop_ids)
        found = [find_lead(end, stops) for end in find_stream_ends(self.encoding, self.tokenizer)]
        texts = sorted({lead for lead in found if lead})
        rows = self.backend.encode(texts, match_special=True)
        return [rows[place].tolist() for place in range(len(rows))]

    def ended(self, turns: Turns) -> Turns:
        if not is_ended_by_next(self.encoding):
            return turns
        return move_stop_tokens(turns, self.encoding.stop_ids, self.leads)

    def end_notes(self, tokenizer: Tokenizer) -> list[EndNote]:
        return [*make_end_notes(self.encoding, tokenizer)]

    def doubled_eos(self, tokenizer: Tokenizer) -> str:
        return describe_doubled_eos(self.encoding, tokenizer)

    def encode(self, conversations: Sequence[Conversation]) -> Encoded:
        """One sample per conversation that can be trained on; several under rewritten_history:
        each, where earlier text changes. Columns: `turns` (json); under columns: compact
        `input_ids` and `labels`; under pack `input_ids` and `loss_mask`.
        """
        return self.samples(self.render(conversations))

    def render(self, conversations: Sequence[Conversation]) -> TurnRows:
        """The rows of the conversations, rendered and tokenized."""
        texts = [*chain.from_iterable([each.texts for each in conversations])]
        # Few texts hold the first character of any, which is found in a tenth of the time of a
        # token.
        begins = {token[0] for token in (*self.controls, *PLACEHOLDERS) if token}
        odd = "\n".join(dict.fromkeys(text for begin in begins for text in texts if begin in text))
        marked = set[int]()
        if self.specials(odd):
            marked = {i for i, each in enumerate(conversations) if self.specials(each.all_text)}
        rendered, positions, rejected = list[list[Turn]](), list[int](), dict[int, str]()
        unread = Counter[str]()
        for position, conversation in enumerate(conversations):
            try:
                if position in marked and self.encoding.special_tokens_in_text != "allow":
                    raise RecordRefused("special_token_in_text")
                rows = self.rows_of(conversation, unread)
                for row in rows:
                    self.words.refuse_split([*chain.from_iterable(row)])
            except RecordRefused as refused:
                rejected[position] = refused.why
            else:
                rendered += rows
                positions += [position] * len(rows)
        turns_of_all = chain.from_iterable(rendered)
        ids = self.backend.encode([*chain.from_iterable(turns_of_all)], match_special=True)
        turns = Turns(ids, np.array([len(row) for row in rendered], np.int64))
        placeholders = placeholders_in([odd], (each.all_text for each in conversations))
        others = {"unread": unread, "placeholders": placeholders}
        return TurnRows(
            turns,
            positions,
            rejected,
            marked,
            others,
            [conversations[position].images for position in positions],
        )

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[Turn]]:
        """The rows of a conversation, each a list of turns; RecordRefused where it gives none.
        Fields that the template does not print are counted in `unread`.
        """
        if conversation.trained is not None:
            trained, every = (
                find_trained_answers(conversation),
                find_trained_answers(conversation._replace(trained=None)),
            )
            if not trained:
                raise RecordRefused("nothing_trained")
            if self.targets.target_prompts != "none" and every[: len(trained)] != trained:
                raise RecordRefused("untrained_in_prompt")
        template, conversation = self.prepared(conversation, unread)
        rule = self.encoding.rewritten_history
        return render_rows(template, conversation, rule, self.words)

    def prepared(self, conversation: Conversation, unread: Counter[str]) -> Prepared:
        """Return a conversation in the form that its template prints, and the template. Fields that
        the template does not print are counted in `unread`.
        """
        if isinstance(conversation, RichConversation):
            conversation = forms.lift_system_tools(self.chat, conversation)
        chosen = self.chat.for_tools(conversation.tools)
        if conversation.tools == [] and chosen is self.chat:
            conversation = conversation._replace(tools=None)
        template = add_variables(chosen, conversation.variables)
        if isinstance(conversation, RichConversation):
            conversation = forms.fit_tools(chosen, conversation)
            unread.update(set(forms.find_unread_keys(template, conversation)))
        unread.update(self.variables_unread(conversation))
        return Prepared(template, conversation)

    def variables_unread(self, conversation: Conversation) -> Iterator[str]:
        """The variables of the conversation that the chat template does not read:
        `chat_template_kwargs.NAME`.
        """
        names = conversation.variables or ()
        return (f"{VARIABLES}.{name}" for name in names if name not in self.chat.reads)
