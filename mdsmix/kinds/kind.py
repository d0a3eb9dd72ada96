"""The base class of kinds of stream: all that differs between pretraining text, pairs,
conversations, preferences and further kinds.

The recipe's `kind:` is pretraining, finetuning or preference. The Kind follows from that word and
the shape of the records. No other room asks which kind a stream is of: it calls the methods of the
Kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Flags, Labels, Lengths, Targets, Turns
from mdsmix.foundry_yaml.loader_keys import EXTRA_LOADERS, ExtraLoader
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
"Token ids of a stored sample, and whether they are trained."


class Kind(ABC):
    """A kind of stream. The class checks recipes. An object is made from a stream's encoding; after
    `open` it encodes records.
    """

    name: ClassVar[str]
    word: ClassVar[str]
    "The recipe's `kind:`."
    version: ClassVar[int] = 1
    "Raised when the same records give other rows. A subclass inherits it."
    reads: ClassVar[type]
    "The type that its shapes give: Document, Pair, Conversation or Preference."
    window_bytes: ClassVar[int] = WINDOW_BYTES
    "Uncompressed source bytes of a work unit."
    called: ClassVar[tuple[str, ...]] = ()
    "The words by which keys of the recipe name the kinds that they are for (`only_of`)."
    has_template: ClassVar[bool] = False
    "A chat template renders its records."
    has_images: ClassVar[bool] = False
    "Its records have images, which are read beside them."
    has_targets: ClassVar[bool] = True
    "The run's target policies decide which tokens are trained. False: they do not apply."
    keeps_long: ClassVar[bool] = False
    """Samples longer than a row are kept whole, and the tokens that the loader will cut off are
    counted.
    """
    reasons: ClassVar[Mapping[str, str]] = {}
    "Reason codes that only this kind and its shapes give -> their explanations."
    loader: ClassVar[ExtraLoader | None] = None
    "The loader of its streams, where neither LLM-Foundry's loaders nor that of mdsmix read them."

    tokenizer: Tokenizer
    "Set by `open`, as `backend` is."
    backend: Backend

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def open(self, tokenizer: Tokenizer, backend: Backend) -> Kind:
        """Sets the tokenizer and the backend; returns the kind itself, ready to encode."""
        self.tokenizer, self.backend = tokenizer, backend
        return self

    @abstractmethod
    def encode(self, records: Any) -> Encoded:
        """The samples of records, a list of what its shapes give (`reads`). `open` comes first."""

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Sentences on settings of a recipe that contradict each other for a stream of
        this kind.
        """
        wanted = cls.loader.name if cls.loader else None
        if (recipe.loader in EXTRA_LOADERS or wanted) and recipe.loader != wanted:
            yield f"kind: {cls.word} is read by train_loader.name: {wanted or 'text, finetuning or mdsmix'} alone, and the recipe's is {recipe.loader}."
        if cls.loader and (fault := cls.loader.fault(recipe.max_seq_len)):
            yield f"has rows of max_seq_len: {recipe.max_seq_len}, and {fault}: set another max_seq_len."
        if stream.pack and (recipe.loader != "mdsmix" or not recipe.decoder_only_format):
            yield (
                "pack: true joins samples into rows of one sequence, whose documents train_loader.name: mdsmix alone can tell apart, and none "
                "under decoder_only_format: false: set the name to mdsmix or leave it out, or take pack out."
            )

    @classmethod
    @abstractmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Fields of Encoding that this kind sets: `columns` (name -> MDS encoding), and settings
        that only this kind has. RecipeError where the tokenizer lacks a token that the stream
        needs.
        """

    def template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The chat template that renders the stream's records; None for a kind without one."""
        return None

    def prints_null(self, conversation: RichConversation, role: str, key: str) -> bool:
        """Return whether the template of a conversation may print a key of a role's messages if it
        is null.
        """
        return True

    def end_notes(self, tokenizer: Tokenizer) -> list[EndNote]:
        """Return what a user should know of the ends of answers: whether a model stops there."""
        return []

    def doubled_eos(self, tokenizer: Tokenizer) -> str:
        """Return a sentence if EOS is trained twice at the end of a row; else ""."""
        return ""

    def open_rows(self, layout: ShardLayout, dtype: str) -> Assembler:
        """The assembler that joins encoded batches to the rows of a work unit. `dtype`: of the
        tokens.
        """
        whole = PackedRows if self.encoding.pack else SampleRows
        return (JoinedRows if self.joins_units else whole)(layout, self.encoding.max_seq_len, dtype)

    @property
    def joins_units(self) -> bool:
        """Whether rows are cut from joined documents (layout: concat), so that each unit leaves
        tokens for the stream's last part.
        """
        return False

    @property
    def splits_records(self) -> bool:
        """Whether a record may become several rows."""
        return False

    @property
    def untrained(self) -> int | None:
        """The id of a token that no policy trains, such as the image token; None where there is
        none.
        """
        return None

    @abstractmethod
    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        """int64 [n]: how many positions of each stored sample give a loss."""

    def cut(self, tokens: Tokens) -> Lengths:
        """int64 [n]: how many tokens of each stored sample the loader cuts off."""
        return np.zeros(len(tokens.turns) - 1, np.int64)

    def appended_eos(self, sample: Sample, eos: int | None) -> int | None:
        """Return the EOS that the finetuning loader appends to a stored sample, and trains; None if
        it appends none: the sample ends in EOS, fills the row, or is read by a loader that appends
        nothing.
        """
        flags = self.appended(decode_sample_tokens(sample), eos)
        return eos if flags is not None and flags[0] else None

    @property
    def gets_eos(self) -> bool:
        """Whether the loader appends EOS to rows of the stream that end without it."""
        return self.has_targets and not self.encoding.pack

    def appended(self, tokens: Tokens, eos: int | None) -> Flags | None:
        """Return bool [n]: to which stored samples the loader appends EOS. None for a kind whose
        rows get none.
        """
        return None

    def pieces(self, sample: Sample) -> Iterator[Piece]:
        """A stored sample as pieces in order: neighbouring tokens that are all trained, or all not.
        `sample`: its decoded columns.
        """
        policies = self.encoding.target_prompts, self.encoding.target_responses
        return stored_pieces(sample, *policies, self.untrained)


def packed_columns(tokenizer: Tokenizer, has_targets: bool) -> dict[str, str]:
    """Column -> MDS encoding of packed rows. LLM-Foundry's loaders do not know these columns, and
    fail at the first row; under columns that they know they would train without masks between the
    documents of a row.
    """
    mask = {"loss_mask": "ndarray:uint8"} if has_targets else {}
    return {"input_ids": f"ndarray:{tokenizer.dtype}", **mask, STARTS: "ndarray:int32"}


def stored_pieces(
    sample: Sample,
    target_prompts: str = "none",
    target_responses: str = "last",
    untrained: int | None = None,
) -> Iterator[Piece]:
    """The pieces of a stored sample in any layout that a loader reads, told by its columns.
    `untrained`: an id that no policy trains.
    """
    if find_id_columns(sample) == PACKED_COLUMNS:
        for document in split_documents(sample):
            yield from runs(*document)
        return
    targets = Targets(
        max_seq_len=1, target_prompts=target_prompts, target_responses=target_responses
    )
    sides = [side for turn in decode_turns(sample) for side in turn]
    turns = Turns(Ragged.from_rows(sides, np.int64), np.array([len(sides) // 2]))
    yield from runs(turns.ids.values, Labels(targets, turns, None, untrained).trained)


def runs(ids: NDArray[np.int64], trained: Flags) -> Iterator[Piece]:
    """Cuts ids into runs of neighbours that are all trained, or all not. `trained`: bool, a flag
    for each id.
    """
    ends = np.flatnonzero(np.diff(trained)) + 1
    for run, flags in zip(np.split(ids, ends), np.split(trained, ends), strict=True):
        yield run.tolist(), bool(flags[:1].any())
