"""The base class of all kinds of stream. A kind is everything that differs between pretraining
text, pairs, conversations, images and preferences.

The recipe's `kind:` is pretraining, finetuning or preference. The Kind follows from that word and
from the shape of the records. Other packages call the methods of the Kind, and rarely ask which
kind a stream is of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Flags, Labels, Lengths, Targets, Turns
from mdsmix.foundry_yaml.loader_keys import DATASETS, ExtraLoader
from mdsmix.kinds.assemble import Assembler, JoinedRows, PackedRows, SampleRows
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import RichConversation
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.shard_files import ShardLayout
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import (
    PACKED_COLUMNS,
    STARTS,
    Tokens,
    decode_sample_tokens,
    decode_turns,
    find_id_columns,
    split_documents,
)
from mdsmix.sources import WINDOW_BYTES
from mdsmix.tokenizer.card import Tokenizer

if TYPE_CHECKING:
    from mdsmix.encode.answer_ends import EndNote
    from mdsmix.encode.chat import ChatTemplate

Piece = tuple[Sequence[int], bool]
"A run of token ids of a stored sample, and whether the model is trained on them."


class Kind(ABC):
    """A kind of stream. The class methods check recipes. An object is made from the encoding of a
    stream; only an object that `open` returned can encode records.
    """

    name: ClassVar[str]
    word: ClassVar[str]
    "The recipe's `kind:`."
    version: ClassVar[int] = 1
    "Increased when a change of code makes other rows of the same records. Subclasses inherit it."
    reads: ClassVar[type]
    "The type of its records: Document, Pair, Conversation or Preference."
    window_bytes: ClassVar[int] = WINDOW_BYTES
    "Uncompressed source bytes of a work unit."
    key_groups: ClassVar[tuple[str, ...]] = ()
    """The groups of streams that this kind is in. A key of a recipe may apply to one group only
    (`key(only_for=...)`).
    """
    has_template: ClassVar[bool] = False
    "A chat template renders its records."
    has_images: ClassVar[bool] = False
    "Its records have images."
    has_targets: ClassVar[bool] = True
    "The run's target policies decide which tokens the model is trained on. False: they do not."
    keeps_long: ClassVar[bool] = False
    """Samples longer than a row are stored whole, and the tokens that the loader will truncate are
    counted.
    """
    reasons: ClassVar[Mapping[str, str]] = {}
    "Reason codes of bad records that only this kind and its shapes use -> their explanations."
    loader: ClassVar[ExtraLoader | None] = None
    "The loader of its streams, if neither LLM-Foundry's loaders nor that of mdsmix read them."

    tokenizer: Tokenizer
    "Set by `open`."
    backend: Backend
    "Set by `open`."

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def open(self, tokenizer: Tokenizer, backend: Backend) -> Self:
        """Return a new object of the kind that can encode. This one stays as it is."""
        opened = type(self)(self.encoding)
        opened.tokenizer = tokenizer
        opened.backend = backend
        return opened

    @abstractmethod
    def encode(self, records: Any) -> Encoded:
        """Encode records, a list of the type in `reads`, to samples. Call `open` first."""

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each setting that is wrong for a stream of this kind, or contradicts
        another setting. The caller has checked that the recipe's loader exists.
        """
        own_loader = cls.loader.name if cls.loader else None
        # A loader that belongs to one kind reads only that kind, and only it reads that kind.
        is_special_loader = recipe.loader not in DATASETS
        if (is_special_loader or own_loader) and recipe.loader != own_loader:
            loaders = own_loader or "text, finetuning or mdsmix"
            yield (
                f"kind: {cls.word} is read only by train_loader.name: {loaders}, but the recipe's "
                f"is {recipe.loader}."
            )
        fault = cls.loader.fault(recipe.max_seq_len) if cls.loader else ""
        if fault:
            yield (
                f"has rows of max_seq_len: {recipe.max_seq_len}, and {fault}: set another "
                "max_seq_len."
            )
        if stream.pack and (recipe.loader != "mdsmix" or not recipe.decoder_only_format):
            yield (
                "pack: true needs train_loader.name: mdsmix and cannot be used with "
                "decoder_only_format: false, since only that loader keeps the samples of a row "
                "apart: correct these keys, or remove pack."
            )

    @classmethod
    @abstractmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the fields of Encoding that this kind sets: `columns` (name -> MDS encoding), and
        settings that only this kind has.

        Raises RecipeError if the tokenizer lacks a token that the stream needs.
        """

    def template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Return the chat template that renders the stream's records; None for a kind without
        one.
        """
        return None

    def prints_null(self, conversation: RichConversation, role: str, key: str) -> bool:
        """Check whether the conversation's template may print a key that is null in a message.

        Args:
            role: the role of the message.
            key: the key of the message that is null.
        """
        return True

    def end_notes(self, tokenizer: Tokenizer) -> list[EndNote]:
        """Return notes for the user on the ends of answers: whether a model stops there."""
        return []

    def doubled_eos(self, tokenizer: Tokenizer) -> str:
        """Return a message if rows end in two EOS that the model is trained on; empty otherwise."""
        return ""

    def open_rows(self, layout: ShardLayout, dtype: str) -> Assembler:
        """Return the assembler that joins encoded batches to the rows of a work unit.

        Args:
            layout: the columns of the shards.
            dtype: the NumPy dtype of the stream's tokens, such as `uint16`.
        """
        if self.joins_units:
            assembler: type[Assembler] = JoinedRows
        elif self.encoding.pack:
            assembler = PackedRows
        else:
            assembler = SampleRows
        return assembler(layout, self.encoding.max_seq_len, dtype)

    @property
    def joins_units(self) -> bool:
        """Whether rows are split from joined documents (`layout: concat`). The tokens after the
        last full row of each work unit then go to the last part of the stream.
        """
        return False

    @property
    def splits_records(self) -> bool:
        """Whether a record may become several rows."""
        return False

    @property
    def untrained(self) -> int | None:
        """The id of a token that the model is never trained on, such as the image token; None if
        there is no such token.
        """
        return None

    @abstractmethod
    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        """Return int64 [n]: how many positions of each stored sample give a loss."""

    def cut(self, tokens: Tokens) -> Lengths:
        """Return int64 [n]: how many tokens of each stored sample the loader truncates."""
        return np.zeros(len(tokens.turns) - 1, np.int64)

    def appended_eos(self, sample: Sample, eos: int | None) -> int | None:
        """Return the id of the EOS that the finetuning loader appends to a stored sample.

        None if it appends no EOS: the sample already ends in EOS, it fills the row, or its loader
        never appends anything.
        """
        flags = self.appended(decode_sample_tokens(sample), eos)
        return eos if flags is not None and flags[0] else None

    @property
    def gets_eos(self) -> bool:
        """Whether the loader appends EOS to rows of the stream that end without it."""
        return self.has_targets and not self.encoding.pack

    def appended(self, tokens: Tokens, eos: int | None) -> Flags | None:
        """Return bool [n]: whether the loader appends EOS to each stored sample. None for a kind
        whose loader never appends it.
        """
        return None

    def pieces(self, sample: Sample) -> Iterator[Piece]:
        """Split a stored sample into pieces: runs of tokens that the model is trained on, and runs
        that it is not trained on.

        Args:
            sample: its decoded columns.
        """
        policies = self.encoding.target_prompts, self.encoding.target_responses
        return stored_pieces(sample, *policies, self.untrained)


def packed_columns(tokenizer: Tokenizer, has_targets: bool) -> dict[str, str]:
    """Return column -> MDS encoding of packed rows.

    The columns have names that LLM-Foundry's loaders do not know, so that these loaders fail at the
    first row. With names that they know, they would train without masks between the documents of a
    row.
    """
    columns = {"input_ids": f"ndarray:{tokenizer.dtype}"}
    if has_targets:
        columns["loss_mask"] = "ndarray:uint8"
    return {**columns, STARTS: "ndarray:int32"}


def stored_pieces(
    sample: Sample,
    target_prompts: str = "none",
    target_responses: str = "last",
    untrained: int | None = None,
) -> Iterator[Piece]:
    """Split a stored sample into pieces, as `Kind.pieces` does. Its column names tell the layout.

    Args:
        sample: its decoded columns.
        target_prompts: the policy for prompts, as in the recipe.
        target_responses: the policy for responses, as in the recipe.
        untrained: the id of a token that the model is never trained on.
    """
    if find_id_columns(sample) == PACKED_COLUMNS:
        for document in split_documents(sample):
            yield from trained_runs(*document)
        return
    # The maximum length has no effect on which ids are trained, so any number will do.
    targets = Targets(
        max_seq_len=1, target_prompts=target_prompts, target_responses=target_responses
    )
    # The prompt of the first turn, its response, the prompt of the second turn, and so on.
    sides = [side for turn in decode_turns(sample) for side in turn]
    turns = Turns(Ragged.from_rows(sides, np.int64), np.array([len(sides) // 2]))
    yield from trained_runs(turns.ids.values, Labels(targets, turns, None, untrained).trained)


def trained_runs(ids: NDArray[np.int64], trained: Flags) -> Iterator[Piece]:
    """Split token ids into runs that the model is trained on, and runs that it is not trained on.

    Args:
        ids: int64 [n].
        trained: bool [n]: whether the model is trained on each id.
    """
    ends = np.flatnonzero(np.diff(trained)) + 1
    for run, flags in zip(np.split(ids, ends), np.split(trained, ends), strict=True):
        yield run.tolist(), bool(flags[:1].any())  # all flags of a run are equal; [] is False
