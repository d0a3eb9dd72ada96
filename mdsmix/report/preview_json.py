"""What `mdsmix preview --json` prints: all that is shown, and the sample ids that Streaming gives."""

from __future__ import annotations

from typing import Any

from mdsmix.encode.decoder import Decoder
from mdsmix.preview.rows import SampleRow
from mdsmix.preview.verdict import Preview, Step, verdict
from mdsmix.report.preview import epoch_table, row_segments, shard_of, step_table, windows_table
from mdsmix.report.segments import sample_json
from mdsmix.table import as_json


def preview_json(preview: Preview, decoder: Decoder | None) -> dict[str, Any]:
    """All of it for programs: every sample id of every step, by device."""
    world, layout = preview.asked.world, preview.layout
    first = preview.epochs[0]
    return {
        "nodes": world.nodes,
        "gpus": world.gpus,
        "workers": world.workers,
        "rows_a_step": world.batch,
        "rows_a_device": world.rows,
        "packing_ratio": preview.ratio,
        "samples_a_device": layout.batch_size,
        "epoch_size": layout.epoch_size,
        "steps_an_epoch": first.first + len(first.ids),
        "batching_method": layout.batching_method,
        "shuffle": layout.shuffle,
        "shuffle_algo": layout.shuffle_algo,
        "shuffle_seed": layout.shuffle_seed,
        "shuffle_block_size": layout.shuffle_block_size,
        "num_canonical_nodes": layout.num_canonical_nodes,
        "steps": [_step_json(preview, step, decoder) for step in preview.steps],
        "epoch": as_json(epoch_table(preview))
        | {
            "epoch": first.epoch,
            "first_step": first.first,
            "steps": len(first.ids),
            "windows_of": "tokens" if preview.windows.of_tokens else "samples",
            "windows": as_json(windows_table(preview))["rows"],
            "lengths": {
                name: lengths and {"exact": lengths.is_exact, "from": lengths.how}
                for name, lengths in zip(preview.streams, preview.lengths, strict=True)
            },
        },
        "said": [said._asdict() for said in verdict(preview)],
        "read": preview.read,
    }


def _step_json(preview: Preview, step: Step, decoder: Decoder | None) -> dict[str, Any]:
    made = step.content
    return {
        "epoch": step.epoch,
        "step": step.step,
        "drawn": step.drawn,
        "read": step.looked,
        "rows": made and made.rows,
        "padding": made and made.padding,
        "documents": made and list(made.documents),
        "waiting": step.waiting,
        "streams": as_json(step_table(preview, step))["rows"],
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node,
                "worker": rank.worker,
                "samples": [
                    {
                        "id": id,
                        "stream": preview.streams[p.stream],
                        "shard": shard_of(preview, p),
                        "row": p.position,
                    }
                    for id, p in zip(rank.ids, rank.places, strict=True)
                ],
            }
            for rank in step.ranks
        ],
        "shown": [
            {
                "rank": shown.rank,
                "stream": preview.streams[shown.row.place.stream],
                "shard": shard_of(preview, shown.row.place),
                "row": shown.row.place.position,
                **({"images": _images(shown.row)} if shown.row.images else {}),
                "sample": sample_json(row_segments(shown.row), decoder),
            }
            for shown in step.shown
        ],
    }


def _images(row: SampleRow) -> list[dict[str, int]]:
    return [dict(zip(("height", "width", "tokens"), each, strict=True)) for each in row.images]
