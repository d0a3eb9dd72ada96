"""The kind of prompts, to which the model itself writes the answers in reinforcement learning, in
the columns that ComposeRL's PromptStreamingDataset reads (`prompt_loader.py`).

The column `prompt` has int64 token ids (little endian) as plain bytes, up to where the model begins
to write. If the recipe names a field for it, the column `verified_answer` has the right answer as a
string, with which a reward function compares what the model writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from mdsmix.encode import chat
from mdsmix.encode.answer_ends import EndNote
from mdsmix.encode.encoded import Encoded, add_special_tokens, make_encoded
from mdsmix.encode.labels import Lengths
from mdsmix.encode.special_tokens import encode_texts
from mdsmix.foundry_yaml.prompt_loader import MAX_GEN_LEN, PROMPT_LOADER
from mdsmix.kinds.finetuning import WINDOW_BYTES
from mdsmix.kinds.kind import Piece
from mdsmix.kinds.template_kind import TemplateKind, find_decoder_faults, template_variables
from mdsmix.kinds.turn_renderer import TurnRenderer
from mdsmix.kinds.turn_rows import count_texts
from mdsmix.lazy_numpy import np
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, NoRecord
from mdsmix.shapes.prompt import ANSWER, PROMPT_REASONS, Prompt
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import Ids, Tokens, decode_prompt
from mdsmix.tokenizer.card import Tokenizer


class TokenizedPrompts(NamedTuple):
    """Prompts as token ids, and what was found in their texts."""

    prompts: list[Ids | str]
    "The ids of each prompt. A str is the reason code of a prompt that cannot be tokenized."
    with_specials: Set[int]
    "Positions of the prompts whose text contains the string of a special token."
    placeholders: Mapping[str, int]
    "Placeholder, such as `<image>` -> number of prompts that contain it."
    unread: Counter[str]
    "Field that the chat template does not print -> number of prompts that have it."


class PromptRenderer(TurnRenderer):
    """Renders a conversation as one turn with an empty response: all of its text, and the words
    with which the template asks the model to answer.
    """

    trains_answers = False

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[chat.Turn]]:
        """Return one row with one turn, whose response is empty.

        Raises RecordRefused if the template fails on the conversation.

        Args:
            unread: counts the fields that the template does not print; they are added here.
        """
        template, conversation = self.prepare(conversation, unread)
        prompt = template.render(
            conversation.messages, add_generation_prompt=True, tools=conversation.tools
        )
        return [[(prompt, "")]]


class Prompts(TemplateKind):
    """The kind of prompts. A sample has the token ids of a prompt, and perhaps the answer that is
    known to be right, in the columns that ComposeRL reads.
    """

    name = "prompts"
    word = "prompt"
    reads = Prompt
    key_groups = ("prompt",)
    window_bytes = WINDOW_BYTES
    has_targets = False
    may_have_images = False
    loader = PROMPT_LOADER
    reasons: ClassVar[Mapping[str, str]] = PROMPT_REASONS

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the settings that this kind adds to the stream's Encoding (the settings that a
        published stream stores), as field -> value: the columns, the tokens that the model may
        write, the chat template's variables, and fixed values of settings that prompts do not have.
        """
        assert stream.source is not None
        answers = {ANSWER: "str"} if ANSWER in stream.source.fields else {}
        return {
            "columns": {**PROMPT_LOADER.columns, **answers},
            "max_gen_len": _read_dataset_section(recipe)[MAX_GEN_LEN],
            "target_prompts": "none",
            "target_responses": "last",
            "template": template_variables(recipe, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each setting of the recipe that is wrong for prompts, or contradicts
        another setting. The check of `max_gen_len` comes after the checks that all kinds share.
        """
        yield from find_decoder_faults(recipe, stream, "prompts")
        yield from super().contradictions(recipe, stream)
        longest = _read_dataset_section(recipe).get(MAX_GEN_LEN)
        key = f"train_loader.dataset.{MAX_GEN_LEN}"
        if type(longest) is not int or longest < 1:
            state = "is not set" if longest is None else f"is {longest!r}"
            yield (
                f"has prompts, and {key} {state}: set it to the tokens that the model may write "
                "after a prompt, such as 512. Longer prompts than max_seq_len minus this number "
                "are left out."
            )
        elif longest >= recipe.max_seq_len:
            yield (
                f"has prompts, and {key} is {longest}, which leaves no token of max_seq_len: "
                f"{recipe.max_seq_len} for a prompt: set a larger max_seq_len or a smaller "
                f"{MAX_GEN_LEN}."
            )

    @cached_property
    def renderer(self) -> PromptRenderer:
        return PromptRenderer(self.encoding, self.tokenizer, self.backend)

    def end_notes(self, tokenizer: Tokenizer) -> list[EndNote]:
        return []  # no answer is trained

    def doubled_eos(self, tokenizer: Tokenizer) -> str:
        return ""

    @property
    def longest_prompt(self) -> int:
        """The most tokens that a prompt may have, so that the answer fits after it."""
        return self.encoding.max_seq_len - (self.encoding.max_gen_len or 0)

    def encode(self, prompts: Sequence[Prompt]) -> Encoded:
        """Encode each prompt that leaves room for an answer to one sample. A longer prompt is left
        out, and never cut.

        The columns of a sample are `prompt` (bytes of int64 ids) and, if the recipe names its
        field, `verified_answer` (UTF-8).
        """
        tokenized = self._tokenize(prompts)
        # Select the prompts that can be used.
        usable = dict[int, Ids]()
        faults = dict[int, str]()
        for position, prompt in enumerate(prompts):
            verdict = self._judge(prompt, tokenized.prompts[position])
            if isinstance(verdict, str):
                faults[position] = verdict
            else:
                usable[position] = verdict
        # Lay out the ids in columns. An int64 id has 8 bytes.
        ids = Ragged.from_rows(usable.values(), "<i8")
        columns = {"prompt": Ragged(ids.values.view(np.uint8), ids.offsets * 8)}
        if self._has_answers:
            answers = [prompts[position].answer.encode() for position in usable]
            columns[ANSWER] = Ragged.from_rows(answers, np.uint8)
        return make_encoded(
            columns,
            [ids],
            [*usable],
            loss_tokens=0,
            specials=len(tokenized.with_specials),
            unread=tokenized.unread + self._count_unstored(prompts, usable),
            placeholders=tokenized.placeholders,
            rejected=faults,
        )

    def _tokenize(self, prompts: Sequence[Prompt]) -> TokenizedPrompts:
        """Tokenize prompts. Strings are tokenized together, and conversations together."""
        texts = dict[int, str]()
        conversations = dict[int, Conversation]()
        for number, prompt in enumerate(prompts):
            if isinstance(prompt.prompt, str):
                texts[number] = prompt.prompt
            else:
                conversations[number] = prompt.prompt
        of_texts = self._tokenize_texts([*texts.values()])
        of_conversations = self._tokenize_conversations([*conversations.values()])
        # Put both results into the order of the records.
        ids: list[Ids | str] = ["" for _ in prompts]
        with_specials = set[int]()
        for keys, tokenized in ((texts, of_texts), (conversations, of_conversations)):
            numbers = [*keys]
            for number, prompt_ids in zip(numbers, tokenized.prompts, strict=True):
                ids[number] = prompt_ids
            with_specials |= {numbers[position] for position in tokenized.with_specials}
        placeholders = Counter(of_texts.placeholders) + Counter(of_conversations.placeholders)
        return TokenizedPrompts(ids, with_specials, placeholders, of_conversations.unread)

    def _tokenize_texts(self, texts: Sequence[str]) -> TokenizedPrompts:
        """Tokenize prompts that are strings.

        A string gets the tokens that the tokenizer puts before a text, such as BOS. It gets none
        after it, since the model continues there.
        """
        rule = self.encoding.special_tokens_in_text
        bare, with_specials, refused = encode_texts(self.backend, texts, rule, self.tokenizer)
        whole = add_special_tokens(bare, self.tokenizer.prefix_ids, [], self.tokenizer.dtype)
        ids = list[Ids | str]()
        for number in range(len(texts)):
            ids.append(whole[number] if len(bare[number]) else "empty_prompt")
        for number in refused:
            ids[number] = "special_token_in_text"
        placeholders = count_texts(texts, [[text] for text in texts])
        return TokenizedPrompts(ids, set(with_specials), placeholders, Counter())

    def _tokenize_conversations(self, conversations: Sequence[Conversation]) -> TokenizedPrompts:
        """Render and tokenize prompts that are conversations."""
        rows = self.renderer.render(conversations)
        ids: list[Ids | str] = ["" for _ in conversations]
        for row, position in enumerate(rows.positions):
            # A conversation is one turn with an empty response: row n has its prompt at 2 n.
            ids[position] = rows.turns.ids[2 * row]
        for position, reason in rows.rejected.items():
            ids[position] = reason
        placeholders = {**rows.placeholders, **rows.count_faults({*rows.positions})}
        return TokenizedPrompts(ids, rows.with_specials, placeholders, Counter(rows.unread))

    def _judge(self, prompt: Prompt, ids: Ids | str) -> Ids | str:
        """Return the token ids of a prompt that can be used. For any other prompt return a reason
        code (a str).

        Args:
            prompt: the record.
            ids: its token ids, or the reason code of a prompt that was not tokenized.
        """
        if self._has_answers and not prompt.answer.strip():
            return "bad_answer"
        if isinstance(ids, str):
            return ids
        if not len(ids):
            return "empty_prompt"
        if len(ids) > self.longest_prompt:
            return NoRecord("prompt_too_long", tokens=len(ids), room=self.longest_prompt)
        return ids

    def _count_unstored(self, prompts: Sequence[Prompt], usable: Iterable[int]) -> Counter[str]:
        """Return name -> number of records: for the field of verified answers, if no column stores
        them.

        Args:
            prompts: the records.
            usable: the positions of the records that become samples.
        """
        if self._has_answers:
            return Counter()
        return Counter({ANSWER: len([n for n in usable if prompts[n].answer])})

    @property
    def _has_answers(self) -> bool:
        """Whether the stream stores verified answers."""
        return ANSWER in self.encoding.columns

    def count_losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return np.zeros(len(tokens.turns) - 1, np.int64)

    def pieces(self, sample: Sample) -> Iterator[Piece]:
        """Yield the prompt, which is not trained."""
        yield decode_prompt(sample).tolist(), False


def _read_dataset_section(recipe: Recipe) -> Mapping[str, Any]:
    """Return the section `train_loader.dataset` of the recipe; empty if it has none."""
    dataset = recipe.train_loader.get("dataset")
    return dataset if isinstance(dataset, Mapping) else {}
