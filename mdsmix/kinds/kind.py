"""What a kind of stream is: all that differs between pretraining text, pairs, conversations and whatever comes next.

The recipe's `kind:` has two words, pretraining and finetuning; the Kind follows from that word and the shape of the
records. No other room asks which kind a stream is of: it asks the Kind for what it needs to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Flags, Lengths, Targets, Turns, label
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.kinds.assemble import Assembler, JoinedRows, PackedRows, SampleRows
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.shard_files import ShardLayout
from mdsmix.shards.token_ids import PACKED, STARTS, Tokens, documents_of, layout_of, turns_of
from mdsmix.sources import WINDOW_BYTES
from mdsmix.training.loader_keys import OTHERS, OtherLoader

if TYPE_CHECKING:
    from mdsmix.encode.chat import ChatTemplate

Piece = tuple[Sequence[int], bool]
"Token ids of a stored sample, and whether they are trained."


class Kind(ABC):
    """A stream of one kind. The class answers for recipes; an object is made of a stream's encoding, and encodes once it is opened."""

    name: ClassVar[str]
    word: ClassVar[str]
    "The recipe's `kind:`."
    reads: ClassVar[type]
    "What a shape must give: Document, Pair or Conversation."
    window_bytes: ClassVar[int] = WINDOW_BYTES
    "Uncompressed source bytes of a work unit."
    line_bytes: ClassVar[int | None] = None
    "The same in files of lines, where it is less."
    called: ClassVar[tuple[str, ...]] = ()
    "The words by which keys of the recipe say that they are for it (`only_of`)."
    has_template: ClassVar[bool] = False
    "A chat template shapes its samples."
    has_images: ClassVar[bool] = False
    "Its records have images, which are read beside them."
    has_targets: ClassVar[bool] = True
    "The run's target policies decide what of a sample is trained; else all of it is."
    keeps_long: ClassVar[bool] = False
    "Samples of more than a row stay, and what the loader cuts of them is counted."
    reasons: ClassVar[Mapping[str, str]] = {}
    "Codes of bad records that only its shapes and it give, with their texts."
    loader: ClassVar[OtherLoader | None] = None
    "What reads its streams where neither LLM-Foundry's loaders nor that of mdsmix do."

    tokenizer: Tokenizer
    backend: Backend
    "Given when it is opened."

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def open(self, tokenizer: Tokenizer, backend: Backend) -> Kind:
        """Itself, ready to encode the records that its shapes give."""
        self.tokenizer, self.backend = tokenizer, backend
        return self

    @abstractmethod
    def encode(self, records: Any) -> Encoded:
        """The samples of records, once it is opened."""

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Sentences on what cannot be right in a recipe about such a stream."""
        wanted = cls.loader.name if cls.loader else None
        if (recipe.loader in OTHERS or wanted) and recipe.loader != wanted:
            yield f"kind: {cls.word} is read by train_loader.name: {wanted or 'text, finetuning or mdsmix'} alone, and the recipe's is {recipe.loader}."
        if stream.pack and (recipe.loader != "mdsmix" or not recipe.decoder_only_format):
            yield (
                "pack: true joins samples into rows of one sequence, whose documents train_loader.name: mdsmix alone can tell apart, and none "
                "under decoder_only_format: false: set the name to mdsmix or leave it out, or take pack out."
            )

    @classmethod
    @abstractmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Keys of Encoding: `columns` (name -> MDS encoding), and what shapes its samples beyond what all kinds share. RecipeError where
        the stream wants what the tokenizer does not have."""

    def template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The chat template that renders its records; None where none does."""
        return None

    def open_rows(self, layout: ShardLayout, dtype: str) -> Assembler:
        """What puts encoded batches together as the rows of a work unit."""
        whole = PackedRows if self.encoding.pack else SampleRows
        rows = JoinedRows if self.joins_units else whole
        return rows(layout, self.encoding.max_seq_len, dtype)

    @property
    def joins_units(self) -> bool:
        """Whether a row may hold parts of several records, so that every unit leaves tokens over for the last part."""
        return False

    @property
    def splits_records(self) -> bool:
        """Whether a record may become several rows."""
        return False

    @property
    def untrained(self) -> int | None:
        """A token that no policy trains."""
        return None

    @abstractmethod
    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        """int64 [n]: the positions of stored samples that give a loss."""

    def cut(self, tokens: Tokens) -> Lengths:
        """int64 [n]: tokens of stored samples that the loader cuts off."""
        return np.zeros(len(tokens.turns) - 1, np.int64)

    def pieces(self, sample: Mapping[str, Any]) -> Iterator[Piece]:
        """A stored sample, decoded, as runs of tokens that are trained or not, in order."""
        policies = self.encoding.target_prompts, self.encoding.target_responses
        return stored_pieces(sample, *policies, self.untrained)


def packed_columns(tokenizer: Tokenizer, has_targets: bool) -> dict[str, str]:
    """The columns of packed rows. No loader of LLM-Foundry knows them: it fails at the first row, where under names that it knows it
    would train rows without masks between their documents."""
    mask = {"loss_mask": "ndarray:uint8"} if has_targets else {}
    return {"input_ids": f"ndarray:{tokenizer.dtype}", **mask, STARTS: "ndarray:int32"}


def stored_pieces(
    sample: Mapping[str, Any],
    target_prompts: str = "none",
    target_responses: str = "last",
    untrained: int | None = None,
) -> Iterator[Piece]:
    """The pieces of a sample of one of the layouts that loaders read, by its columns alone."""
    if layout_of(sample) == PACKED:
        for document in documents_of(sample):
            yield from runs(*document)
        return
    targets = Targets(
        max_seq_len=1, target_prompts=target_prompts, target_responses=target_responses
    )
    sides = [side for turn in turns_of(sample) for side in turn]
    turns = Turns(Ragged.of(sides, np.int64), np.array([len(sides) // 2]))
    yield from runs(turns.ids.values, label(targets, turns, None, untrained).trained)


def runs(ids: NDArray[np.int64], trained: Flags) -> Iterator[Piece]:
    """Neighbouring tokens that are all trained, or all not."""
    ends = np.flatnonzero(np.diff(trained)) + 1
    for run, flags in zip(np.split(ids, ends), np.split(trained, ends), strict=True):
        yield run.tolist(), bool(flags[:1].any())
