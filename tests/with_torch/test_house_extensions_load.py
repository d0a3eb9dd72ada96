"""What a test adds as a kind, a shape and a codec is loaded as any stream."""

from pathlib import Path

from mdsmix.load import build_loader
from tests.converting import mdsmix
from tests.test_house_extensions import converted  # noqa: F401


def test_a_new_kind_with_a_new_codec_is_loaded(converted: Path) -> None:  # noqa: F811
    train = converted.with_name("train.yaml")
    assert mdsmix("render-yaml", converted, "-o", train, "train_loader.num_workers=0").code == 0
    (batch,) = build_loader(str(train), batch_size=2)
    assert sorted(row[:2].tolist() for row in batch["input_ids"]) == [[3, 5], [5, 5]]
