"""What a test adds as a kind, a shape, a codec or a format is loaded as any stream."""

from pathlib import Path

import pytest

from mdsmix.load import build_loader
from mdsmix.shards.codecs import CODECS, Codec
from tests.converting import mdsmix
from tests.test_house_extensions import KINDS, Scored, converted, lengths
from tests.test_house_formats import recipe_of, zips

__all__ = ["lengths", "zips"]


@pytest.mark.usefixtures("lengths")
def test_a_new_kind_with_a_new_codec_is_loaded(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CODECS, "str_decimal", lambda: Codec(decode=bytes.decode))
    KINDS[-1] = Scored
    recipe = converted(tmp_path, tokenizer_folder, "length")
    train = tmp_path / "train.yaml"
    assert mdsmix("render-yaml", recipe, "-o", train, "train_loader.num_workers=0").code == 0
    (batch,) = build_loader(str(train), batch_size=2)
    assert sorted(row[:2].tolist() for row in batch["input_ids"]) == [[3, 5], [5, 5]]


def test_a_stream_of_a_new_format_is_loaded(zips: Path, tokenizer_folder: Path) -> None:
    recipe, train = recipe_of(zips, tokenizer_folder), zips / "train.yaml"
    assert mdsmix("convert", recipe).code == 0
    assert mdsmix("render-yaml", recipe, "-o", train, "train_loader.num_workers=0").code == 0
    rows = [row for batch in build_loader(str(train), batch_size=7) for row in batch["input_ids"]]
    assert len(rows) == 140
