"""A plain StreamingDataset of the installed Streaming opens what is stored of images, lazily, and an empty list too."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from streaming import StreamingDataset

from mdsmix.errors import MixRefused
from mdsmix.load import build_loader
from tests.converting import run_recipe, write_jsonl, write_recipe
from tests.pictures import record, seeing_tokenizer, stream, write_drawings
from tests.with_torch.load_streams import IDS, config


def test_a_plain_streaming_dataset_opens_the_images_and_no_loader_trains_bare_placeholders(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    paths = write_drawings(tmp_path / "img")
    names = [f"img/{path.name}" for path in paths]
    data = write_jsonl(tmp_path / "a.jsonl", [record(*names), record(), record(names[2])])
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "tokenizer")
    run_recipe(write_recipe(tmp_path, tokenizer, max_seq_len=99, streams={"see": stream(data)}))
    found = StreamingDataset(local=str(tmp_path / "out/see/train"), batch_size=1, shuffle=False)
    rows = [found[i] for i in range(3)]
    assert [row["sizes"] for row in rows] == [[[30, 40]] * 3, [], [[30, 40]]]
    formats = [[image.format for image in row["images"]] for row in rows]
    assert formats == [["JPEG", "PNG", "WEBP"], [], ["WEBP"]]
    for image, path in zip(rows[0]["images"], paths, strict=True):
        stored = np.asarray(Image.open(io.BytesIO(path.read_bytes())))
        assert np.array_equal(np.asarray(image), stored)

    streams = {"see": {"local": str(tmp_path / "out/see"), "split": "train"}}
    loader = build_loader(config(streams, "mdsmix", max_seq_len=99, num_workers=0), 1, ids=IDS)
    with pytest.raises(MixRefused, match="one bare placeholder in its tokens, and no processor"):
        list(loader)
