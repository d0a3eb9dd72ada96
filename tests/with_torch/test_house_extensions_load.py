"""What a test adds as a kind, a shape and a codec is loaded as any stream."""

from pathlib import Path

import pytest

from mdsmix.load import build_loader
from mdsmix.shards.codecs import CODECS, Codec
from tests.converting import mdsmix
from tests.test_house_extensions import KINDS, Scored, converted, lengths

__all__ = ["lengths"]


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
