"""What drawn samples come to, counted from their tokens: the totals of a mix are exact, whatever was drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.encode.processor_server import SizeCounts
from mdsmix.kinds import kind_of
from mdsmix.shards.counts import Totals, histogram
from mdsmix.shards.index import Shard
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.shard_samples import Cells, Samples, bytes_at, cells
from mdsmix.shards.token_ids import Tokens


def count(tokens: Tokens, copies: NDArray[np.int64], manifest: Manifest | None) -> Totals:
    """What the samples come to, each taken `copies` times; without a manifest no more than their number and tokens."""
    lengths, drawn = tokens.ids.lengths, copies > 0
    plain = Totals(samples=int(copies.sum()), tokens=int(lengths @ copies))
    if manifest is None or not drawn.any():
        return plain
    losses, cut = _losses(tokens, manifest)
    return replace(
        plain,
        loss_tokens=int(losses @ copies),
        largest_id=int(tokens.largest[drawn].max()),
        longest=int(lengths[drawn].max()),
        cut_rows=int((cut > 0) @ copies),
        cut_tokens=int(cut @ copies),
        lengths=histogram(np.repeat(lengths, copies)),
        documents=0 if tokens.trained is None else int(np.diff(tokens.turns) @ copies),
    )


def _losses(tokens: Tokens, manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [n]: the positions of each sample that give a loss, and the tokens that the loader cuts off. A packed row says the
    one itself, and nothing of it is cut."""
    if tokens.trained is not None:
        return tokens.trained, np.zeros_like(tokens.trained)
    kind = kind_of(manifest.encoding)
    return kind.losses(tokens, manifest.tokenizer.eos_id), kind.cut(tokens)


def count_images(
    shard: Shard, samples: Samples, copies: NDArray[np.int64], manifest: Manifest | None
) -> Totals:
    """The images of the samples, each taken `copies` times, and what the processor of the conversion, if there was one, makes of them."""
    found = {part.name: part for part in cells(shard, samples)}
    counts = bytes_at(samples, found["images"].starts + 4, 4).view("<u4")[:, 0].astype(np.int64)
    framing = 8 + 4 * counts
    return Totals(
        images=int(counts @ copies),
        image_bytes=int((found["images"].sizes - framing) @ copies),
        image_tokens=_image_tokens(samples, found["sizes"], copies, manifest),
    )


def _image_tokens(
    samples: Samples, sizes: Cells, copies: NDArray[np.int64], manifest: Manifest | None
) -> int:
    digest = manifest.encoding.images.get("processor") if manifest else None
    if not digest:
        return 0
    spans = zip(sizes.starts.tolist(), sizes.stops.tolist(), copies.tolist(), strict=True)
    drawn = [(orjson.loads(samples.data[start:stop]), n) for start, stop, n in spans if n]
    tokens = SizeCounts(digest).of((h, w) for of, _ in drawn for h, w in of)
    return sum(n * int(tokens[h, w]) for of, n in drawn for h, w in of)
