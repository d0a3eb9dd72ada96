"""What `mdsmix mix` draws from streams that Streaming wrote, Streaming reads."""

from collections import Counter
from pathlib import Path

import numpy as np

from tests.published import write_mix
from tests.test_mix_offline import mix


def test_streaming_reads_what_was_mixed_from_streams_that_it_wrote(tmp_path: Path) -> None:
    from streaming import MDSWriter, StreamingDataset

    columns = {"id": "int", "text": "str", "tokens": "ndarray:int32"}
    for name, compression in (("a", None), ("b", "zstd"), ("c", "gz")):
        with MDSWriter(
            out=str(tmp_path / name / "train"),
            columns=columns,
            compression=compression,
            hashes=["sha1", "xxh64"],
            size_limit=4096,
        ) as writer:
            for i in range(100):
                row = np.arange(1 + i % 9, dtype=np.int32)
                writer.write({"id": i, "text": f"{name}{i}", "tokens": row})
    recipe = write_mix(tmp_path, "a", "b", "c", train_loader={"name": "text"})
    folder = mix(recipe, "mix.b.repeat=2")
    read = list(StreamingDataset(local=str(folder), shuffle=False, batch_size=1))
    texts = Counter(sample["text"] for sample in read)
    assert texts == Counter({f"{n}{i}": 1 + (n == "b") for n in "abc" for i in range(100)})
    for sample in read:
        assert sample["text"][1:] == str(sample["id"])
        assert sample["tokens"].tolist() == list(range(1 + sample["id"] % 9))
