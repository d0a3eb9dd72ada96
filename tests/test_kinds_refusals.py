"""What cannot be right in a recipe about a stream is one sentence, before any source is looked at; `test_shapes_functions` has a command's."""

from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from tests.converting import documents, write_recipe

SHARE = "holdout .* must be a share between 0 and 1"
NOTHING = "take it out, it would change nothing"
SOURCES = [
    ({"conversations": "c", "tags": {"role": "role"}}, "source.tags.role is not a known tag; did you mean role_tag"),
    ({"shape": "alpaca", "instruction": "q"}, "source.shape is alpaca, which reads instruction and output"),
    ({"shape": "text", "text": "t", "joined_by": ""}, "source.shape is text; finetuning reads"),
    ({"shape": "alpaca", "instruction": "q", "output": "a", "text": "t"}, "the source names text and instruction and output"),
    ({"messages": "messages", "joined_by": ""}, "joined_by is for records of the shape alpaca, and these are messages"),
    ({"instruction": "q", "response": "a"}, "or messages, or conversations, or conversation, or instruction and output."),
    ({"shape": "x/none.py:"}, "which names no function"),
    ({"shape": "not a name:read"}, "which names no function"),
    ({"shape": "x/fine.py:read", "prompt": "q"}, "take prompt out"),
    ({"prompt": "q", "response": "a", "gives": "pair"}, "gives is pair, which is for a function"),
]  # fmt: skip
STREAMS = [
    *(({"sample": share}, "sample.*(5%|[Tt]rue)") for share in (0, "0%", 0.0, "101%", "-5%", ".nan", "nan", "some", "", True, "3/2", 2)),
    *(({"holdout": share}, SHARE) for share in ("0%", 1, "some")),
    ({"holdout": "5%", "split": "val"}, "holdout takes a share of what is trained on, and split is val"),
    ({"held_out_of": "web"}, "held_out_of is not a known key"),
    ({"source": None, "local": "out/web", "sample": "5%"}, "sample is for streams with a source"),
]  # fmt: skip
SEEING = [
    ({"shape": "x/fine.py:read", "gives": "conversation"}, {}, "take images out"),
    ({"shape": "llava"}, {"field": []}, "images.field names no field"),
    ({"shape": "qwen_vl"}, {"field": "pic"}, f"those of qwen_vl stand in them; {NOTHING}"),
]
FINETUNING = {"kind": "finetuning"}
MESSAGES = {"path": "a", "messages": "m"}
CASES: list[tuple[dict[str, Any], str]] = [
    *((FINETUNING | {"source": {"path": "a", **source}}, said) for source, said in SOURCES),
    *((documents("a", **more), said) for more, said in STREAMS),
    *((FINETUNING | {"images": i, "source": {"path": "a", **s}}, said) for s, i, said in SEEING),
    (FINETUNING | {"source": MESSAGES, "too_long": "filter"}, "stands beside decoder_only_format"),
]


def test_one_sentence_refuses(tmp_path: Path) -> None:
    for stream, said in CASES:
        known = {key: value for key, value in stream.items() if value is not None}
        more = {"decoder_only_format": False} if "too_long" in stream else {}
        recipe = write_recipe(tmp_path, tmp_path, streams={"web": known}, **more)
        with pytest.raises(RecipeError, match=said) as refusal:
            open_recipe(recipe)
        assert "\n" not in str(refusal.value), stream


def test_what_fits_is_not_refused(tmp_path: Path) -> None:
    """A document without EOS is refused under the finetuning loader alone, and `too_long: filter` for encoder-decoders alone."""
    plain = documents("a", layout="document", add_eos=False)
    chat = FINETUNING | {"source": MESSAGES, "too_long": "filter"}
    for name, streams in (("text", {"web": plain}), ("finetuning", {"chat": chat})):
        loader = {"name": name}
        assert open_recipe(write_recipe(tmp_path, tmp_path, streams=streams, train_loader=loader))
    streams = {"web": plain}
    with pytest.raises(RecipeError, match="needs add_eos: true"):
        open_recipe(
            write_recipe(tmp_path, tmp_path, streams=streams, train_loader={"name": "finetuning"})
        )


def test_any_share_may_be_written_and_a_holdout_has_a_name_of_its_own(tmp_path: Path) -> None:
    for share in ("0.001%", 0.00001, "1.0", 1, "99.99%"):
        streams = {"web": documents("a", sample=share)}
        assert open_recipe(write_recipe(tmp_path, tmp_path, streams=streams)).sourced
    streams = {"web": documents("a", holdout="5%"), "web-eval": documents("a")}
    said = "holdout makes a stream web-eval, and the recipe has one of that name"
    with pytest.raises(RecipeError, match=said):
        open_recipe(write_recipe(tmp_path, tmp_path, streams=streams))
