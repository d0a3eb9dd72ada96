"""Samples of a stream as they are shown: which samples, their text with marks around trained tokens
and control tokens, and their images.

A sample is a list of segments, each trained or not. What is trained follows from the target
policies in the manifest, as for the finetuning loader's labels. The first token of a row is never
predicted, so it is never marked. A packed row shows where each of its documents begins, with its
number and length.

A control token is recognised by its id, never by its text. `<|im_start|>` that a person typed, or
that a template wrote for a tokenizer without such a token, consists of ordinary tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from mdsmix.errors import RecipeError
from mdsmix.frozen import frozen
from mdsmix.kinds import Piece, kind_of, stored_pieces
from mdsmix.kinds.kind import split_trained_runs
from mdsmix.messages import WRITTEN, make_printable, plural
from mdsmix.report.show import Run
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import PublishedStream
from mdsmix.shards.shard_samples import Sample, read_first_samples, read_sample_table
from mdsmix.shards.side_files import RecordName
from mdsmix.shards.token_ids import (
    LOSS_WEIGHTS,
    PACKED_COLUMNS,
    find_id_columns,
    has_images,
    split_documents,
)
from mdsmix.storage import map_threads
from mdsmix.table import Tree
from mdsmix.tokenizer.decoder import Decoder

TRAINED, CONTROL, DOCUMENT = "⟦⟧", "⟨⟩", "⟪⟫"
"Brackets around trained tokens, around a control token, and around a packed document's heading."
SHARED = "⟮⟯"
"Brackets around tokens that two samples share."
_MARKS = str.maketrans({mark: ascii(mark)[1:-1] for mark in TRAINED + CONTROL + DOCUMENT + SHARED})
DOUBLED_WITHIN = 3
"Only white space can follow an EOS that is among the last 3 tokens of an answer."
FORMATS = {
    b"\xff\xd8": "JPEG",
    b"\x89PNG": "PNG",
    b"RIFF": "WebP",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*": "TIFF",
    b"MM": "TIFF",
    b"": "unknown",
}
"""An image's first bytes -> its format. AVIF, the only other format that conversions store, has its
name further in.
"""


@frozen(slots=True)
class Segment:
    """A run of tokens that are all trained or all not trained."""

    ids: list[int]
    is_trained: bool
    document: int | None = None
    "In a packed row, the number of the segment's document, from 0."
    before: int | None = None
    "The token in front of the segment. A decoder may need it to decode the first token."
    gap: int = 0
    "Tokens in front of the segment that are not shown."
    is_appended: bool = False
    "Whether it is the EOS that the loader appends, which is not stored."
    weight: float = 1.0
    "The loss weight of its tokens, if they are trained."


Shown = list[Segment] | Sample
"The segments of a sample with token ids, or the columns of another sample (raw text, bytes)."


def cut_into_segments(sample: Sample, manifest: Manifest | None) -> Shown:
    """Return the segments of a decoded sample. A sample without token ids, such as raw text, is
    returned unchanged.
    """
    names = find_id_columns(sample)
    if not names:
        return sample
    if manifest is None and any(isinstance(sample[name], bytes) for name in names):
        return sample  # without a manifest, the type of the ids is unknown
    if names == PACKED_COLUMNS:
        segments = list[Segment]()
        for number, document in enumerate(split_documents(sample)):
            for segment in make_segments(split_trained_runs(*document)):
                segments.append(replace(segment, document=number))
        return split_by_weight(segments, sample)
    if manifest is None:  # what is trained follows from LLM-Foundry's default policies
        return make_segments(stored_pieces(sample))
    kind = kind_of(manifest.encoding)
    eos = kind.appended_eos(sample, manifest.tokenizer.eos_id)
    return split_by_weight(make_segments(kind.pieces(sample), eos), sample)


def split_by_weight(segments: list[Segment], sample: Sample) -> list[Segment]:
    """Return the segments of a sample, split where the loss weight of trained tokens changes, with
    their weights. An EOS that is appended has the weight of the token before it.

    Args:
        segments: the segments of all tokens of the sample.
        sample: its decoded columns. Without the column `loss_weights`, nothing is changed.
    """
    if LOSS_WEIGHTS not in sample:
        return segments
    weights = sample[LOSS_WEIGHTS].tolist()
    split = list[Segment]()
    position = 0
    for segment in segments:
        of_tokens = weights[position : position + len(segment.ids)] or weights[-1:]
        position += len(segment.ids)
        if not segment.is_trained:
            split.append(segment)
            continue
        before = segment.before
        for weight, run in groupby(zip(segment.ids, of_tokens, strict=True), itemgetter(1)):
            ids = [token for token, _ in run]
            split.append(replace(segment, ids=ids, weight=weight, before=before))
            before = ids[-1]
    return split


def make_segments(pieces: Iterable[Piece], eos: int | None = None) -> list[Segment]:
    """Return the segments of a sample: neighbouring tokens that are all trained or all not trained.

    Args:
        pieces: runs of token ids, each with whether the model is trained on it.
        eos: the id of the EOS that the loader appends, as a segment of its own; None if it appends
            none.
    """
    tokens = list[tuple[int, bool]]()
    for piece_ids, is_piece_trained in pieces:
        tokens += [(int(token), is_piece_trained) for token in piece_ids]
    if tokens:
        first_token, _ = tokens[0]
        tokens[0] = (first_token, False)  # nothing predicts the first token
    segments = list[Segment]()
    before = None
    for is_trained, run in groupby(tokens, itemgetter(1)):
        ids = [token for token, _ in run]
        segments.append(Segment(ids, is_trained, before=before))
        before = ids[-1]
    if eos is not None:
        segments.append(Segment([eos], True, before=before, is_appended=True))
    return segments


def doubles_eos(sample: Shown) -> bool:
    """Return whether the loader appends EOS to an answer that ends in EOS and white space."""
    if isinstance(sample, Mapping) or len(sample) < 2 or not sample[-1].is_appended:
        return False
    appended_eos = sample[-1].ids[0]  # the last segment is this EOS, the one before is the answer
    answer_end = sample[-2].ids[-DOUBLED_WITHIN:]
    return appended_eos in answer_end


def shorten(segments: Sequence[Segment], limit: int) -> list[Segment]:
    """Return the segments of at most `limit` tokens. Of a longer sample, keep the first and the
    last `limit` / 2 tokens: its end is usually trained.
    """
    tokens = [(segment, token) for segment in segments for token in segment.ids]
    if len(tokens) <= limit:
        return list(segments)
    half = limit // 2
    first = _join_by_segment(tokens[:half])
    last = _join_by_segment(tokens[-half:])
    _, token_before = tokens[-half - 1]
    last[0] = replace(last[0], before=token_before, gap=len(tokens) - 2 * half)
    return [*first, *last]


def _join_by_segment(tokens: Sequence[tuple[Segment, int]]) -> list[Segment]:
    """Return segments that contain only the given tokens.

    Args:
        tokens: pairs (segment, one of its token ids), in order. Neighbours of one segment are
            joined.
    """
    joined = []
    for segment, run in groupby(tokens, itemgetter(0)):
        joined.append(replace(segment, ids=[token for _, token in run]))
    return joined


def split_sample_into_runs(
    sample: Shown, decoder: Decoder | None, marks: str = TRAINED
) -> Iterator[Run]:
    """Yield a sample as text: trained tokens in ⟦ ⟧, each control token in ⟨ ⟩. Without a decoder,
    token ids are shown.

    Escape codes in a text are escaped, since anyone may have written the text. These brackets are
    escaped too.

    Args:
        marks: the brackets around segments with `is_trained`. A caller that uses this flag for
            other tokens, such as shared ones, passes other brackets.
    """
    if isinstance(sample, Mapping):
        yield make_printable(str(sample), WRITTEN), "text"
        return
    for document, run in groupby(sample, lambda segment: segment.document):
        segments = list(run)
        if document is not None:
            tokens = plural(sum(len(segment.ids) for segment in segments), "token")
            heading = f"document {document}, {tokens}".join(DOCUMENT)  # between the two marks
            is_first_document = segments[0] is sample[0]
            if not is_first_document:
                heading = f"\n{heading}"
            yield f"{heading}\n", "mark"
        for segment in segments:
            if segment.gap:
                yield f" ... {segment.gap:,} tokens ... ", "text"
            if segment.is_trained:
                yield marks[0], "mark"
            yield from _split_into_runs(segment, decoder)
            if segment.is_trained:
                yield marks[1], "mark"
            if segment.is_trained and segment.weight != 1:
                yield f"×{segment.weight:.6g}", "mark"


def _split_into_runs(segment: Segment, decoder: Decoder | None) -> Iterator[Run]:
    """Yield a segment in runs: pairs of a text and its sort. The sort is `control` for one control
    token, whose text is put between two marks, and `text` for the tokens between control tokens.
    Without a decoder, yield one run with the ids.
    """
    if decoder is None:
        yield " ".join(map(str, segment.ids)) + " ", "text"
        return
    before = segment.before
    for is_control, run in groupby(segment.ids, decoder.control.__contains__):
        tokens = list(run)
        # Each control token is marked on its own; other tokens are decoded together.
        pieces = [[token] for token in tokens] if is_control else [tokens]
        for ids in pieces:
            text = make_printable(decoder.text(ids, before), WRITTEN).translate(_MARKS)
            if is_control:
                yield text.join(CONTROL), "control"  # the text between the two marks
            else:
                yield text, "text"
            before = ids[-1]


def sample_to_json(sample: Shown, decoder: Decoder | None) -> Any:
    """Return a sample as JSON: its columns, or its segments. A segment's `control` lists the
    positions of control tokens in its ids.
    """
    if isinstance(sample, Mapping):
        return {
            name: value if isinstance(value, str) else repr(value) for name, value in sample.items()
        }
    return [_segment_to_json(segment, decoder) for segment in sample]


def _segment_to_json(segment: Segment, decoder: Decoder | None) -> Tree:
    """Return a segment as JSON. `text` and `control` are None without a decoder."""
    text = None
    control = None
    if decoder:
        text = decoder.text(segment.ids, segment.before)
        control = [i for i, token in enumerate(segment.ids) if token in decoder.control]
    return {
        "document": segment.document,
        "ids": segment.ids,
        "trained": segment.is_trained,
        **({"weight": round(segment.weight, 6)} if segment.weight != 1 else {}),
        "appended": segment.is_appended,
        "text": text,
        "control": control,
    }


@frozen
class Picture:
    """An image of a sample, as stored."""

    height: int
    width: int
    "Height and width in pixels, after the rotation that EXIF asks for."
    data: bytes

    @property
    def format(self) -> str:
        """The name of the image's format, such as `JPEG`, by its first bytes; or `unknown`."""
        if self.data[4:11] == b"ftypavi":
            return "AVIF"
        # The last key is empty, so it fits all images that no other key fits.
        return next(name for start, name in FORMATS.items() if self.data.startswith(start))

    def __str__(self) -> str:
        return f"{self.width:,} x {self.height:,} {self.format}, {plural(len(self.data), 'byte')}"

    def as_json(self) -> Tree:
        """Return the size and the format, without the image itself."""
        return {
            "height": self.height,
            "width": self.width,
            "bytes": len(self.data),
            "format": self.format,
        }


def list_pictures(sample: Sample) -> list[Picture]:
    """Return the images of a decoded sample; an empty list if the stream has no images."""
    if not has_images(sample) or not isinstance(sample["images"], list):
        return []
    pairs = zip(sample["sizes"], sample["images"], strict=False)
    return [Picture(height, width, data) for (height, width), data in pairs]


def find_values(sample: Sample) -> dict[str, str | int | float]:
    """Return the strings and numbers in the columns of a decoded sample with token ids, such as its
    verified answer; {} for a sample without token ids, which is shown with all its columns.
    """
    if not find_id_columns(sample):
        return {}
    return {name: value for name, value in sample.items() if isinstance(value, (str, int, float))}


@frozen(kw_only=True)
class Choice:
    """Which samples to show: at most one of `numbers`, `longest` and `seed` is set. Without them
    the first samples are shown.
    """

    count: int
    numbers: Sequence[int] = ()
    "Numbers of samples, from 0."
    longest: bool = False
    seed: int | None = None
    "Show `count` random samples; the same seed gives the same samples."

    @property
    def is_first(self) -> bool:
        return not self.numbers and self.seed is None and not self.longest


@frozen
class Chosen:
    """A sample and its number in the stream."""

    number: int
    sample: Shown
    pictures: Sequence[Picture]
    values: Mapping[str, str | int | float]
    "Its columns that are neither token ids nor images, such as a verified answer."
    ids: Sequence[RecordName]
    "The id of its record, or the ids of a packed row's records; [] if the stream keeps no ids."


def make_choice(
    count: int, numbers: Sequence[int], longest: bool, at_random: bool, seed: int | None
) -> Choice:
    """Return which samples to show. A seed is chosen if `at_random` has none.

    Raises RecipeError if more than one way to choose is given.
    """
    if at_random and seed is None:
        seed = random.randrange(1_000_000)  # short enough to be typed again
    ways_to_choose = [bool(numbers), longest, seed is not None]
    if ways_to_choose.count(True) > 1:
        raise RecipeError(
            "--sample, --longest and --random (or --seed) exclude each other: give only one of "
            "them."
        )
    return Choice(count=count, numbers=numbers, longest=longest, seed=seed)


def read_chosen_samples(stream: PublishedStream, choice: Choice) -> Iterator[Chosen]:
    """Yield the chosen samples.

    Raises RecipeError for a number beyond the last sample, and Unreachable if a sample cannot be
    read.
    """
    samples: Iterable[Sample]
    numbers: Iterable[int]
    if choice.is_first:
        shard = stream.first_filled
        numbers = count()
        samples = []
        if shard is not None and choice.count > 0:
            samples = read_first_samples(stream.folder, shard, choice.count)
    else:
        numbers = _choose_numbers(stream, choice)
        samples = stream.read_samples(numbers)
    for number, sample in zip(numbers, samples, strict=False):  # `count()` has no end
        id = stream.read_id(number)
        ids = id if isinstance(id, list) else [id]
        yield Chosen(
            number,
            cut_into_segments(sample, stream.manifest),
            list_pictures(sample),
            find_values(sample),
            [id for id in ids if id is not None],
        )


def _choose_numbers(stream: PublishedStream, choice: Choice) -> Sequence[int]:
    """Return the numbers of the samples to show. Raises RecipeError for one beyond the last."""
    total = stream.index.samples
    if choice.seed is not None:
        return sorted(random.Random(choice.seed).sample(range(total), min(choice.count, total)))
    if choice.longest and total:
        # The table at the head of a shard has the offset of each sample, and of the end: for
        # example [16, 86, 106]. The differences are the sizes of the samples in bytes: [70, 20].
        sizes = map_threads(
            lambda shard: np.diff(read_sample_table(stream.folder, shard)), stream.shards
        )
        return [int(np.concatenate(sizes).argmax())]
    for number in choice.numbers:
        if number >= total:
            raise RecipeError(
                f"--sample {number} does not exist: {stream.folder} has only "
                f"{plural(total, 'sample')}, and the first is 0: name a smaller number."
            )
    return choice.numbers
