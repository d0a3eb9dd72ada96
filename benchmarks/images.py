"""Streams of images: memory and speed compared with scripts that people write, and a million lines
with planted faults.

    .venv/bin/python -m benchmarks.images MODE [--count N] [--into DIR]

- `memory`: 1,000, 3,000 and 7,500 images of 1,120 x 1,120 with --memory 1GiB
- `loops`: the MDSWriter loop as people write it, and one that copies bytes unchecked
- `small`: 100,000 small images in a folder
- `bucket`: 100,000 small images in a real MinIO
- `lines`: 1,000,000 lines over 20,000 small images; 1 % broken in ten ways, 1 % with missing files
- `map`: Hugging Face's `map`, called as in GLM-4's finetuning, in .venv-foundry

`--count N` changes the number of images or lines, `--into DIR` replaces the system's temporary
folder. Linux only.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Run, measure

ROOT = Path(__file__).parents[1]
MDSMIX = Path(sys.executable).with_name("mdsmix")
SIDE = 1120
SEED = 5


def photographs(folder: Path, count: int, side: int = SIDE, quality: int = 90) -> list[Path]:
    """Write JPEGs that compress as photographs do, about 330 KB at 1,120 x 1,120: smooth shapes
    with a little noise. There are 64 different images, and each file has its own comment, so that
    no two files are equal.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    jpegs = list[bytes]()
    for _ in range(min(64, count)):
        coarse = rng.integers(0, 256, (max(2, side // 40), max(2, side // 40), 3), np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))
        noisy = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noisy).save(buffer, "JPEG", quality=quality)
        jpegs.append(buffer.getvalue())
    paths = [folder / f"{number:07}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            note = str(number).encode()
            comment = b"\xff\xfe" + (len(note) + 2).to_bytes(2, "big") + note
            data = jpegs[number % len(jpegs)]
            path.write_bytes(data[:2] + comment + data[2:])
    return paths


def line(number: int, image: str, words: str = "") -> bytes:
    talk = [
        {"from": "human", "value": f"<image>\nWhat is in picture {number}? {words}"},
        {
            "from": "gpt",
            "value": f"Shapes in many colours, as in the {number % 97} before. {words}",
        },
    ]
    return json.dumps({"id": number, "image": image, "conversations": talk}).encode() + b"\n"


def tokenizer(into: Path) -> Path:
    sys.path.insert(0, str(ROOT))
    from tests.corpus import train_tokenizer
    from tests.pictures import seeing_tokenizer

    if not (into / "tokenizer").exists():
        train_tokenizer(into / "plain", documents_n=100)
        seeing_tokenizer(into / "plain", into / "tokenizer")
    return into / "tokenizer"


def recipe(into: Path, name: str, root: Path, **images: Any) -> Path:
    path = into / f"{name}.json"
    source = {"path": str(into / f"{name}.jsonl"), "shape": "llava", "id": "id"}
    see = {"kind": "finetuning", "source": source, "images": {"root": str(root), **images}}
    tree = {
        "tokenizer": str(tokenizer(into)),
        "max_seq_len": 2048,
        "local": str(into / f"out-{name}"),
        "streams": {"see": see},
    }
    path.write_text(json.dumps(tree))
    return path


def convert(into: Path, path: Path, *options: str, memory: bool = False) -> Run:
    """Measure a first conversion; its tokenizer snapshot may be in the cache already."""
    tree = json.loads(path.read_text())
    shutil.rmtree(tree["local"], ignore_errors=True)
    env = os.environ | {"MDSMIX_CACHE": str(into / "cache")}
    command = [MDSMIX, "convert", path, *options]
    for stamps in (into / "cache/seen").glob("*.jsonl"):
        stamps.unlink()
    return measure(command, env, into / "log", memory=memory)


def manifest(path: Path) -> dict[str, Any]:
    tree = json.loads(path.read_text())
    content = (Path(tree["local"]) / "see/train/mdsmix.manifest").read_text()
    published: dict[str, Any] = json.loads(content)
    return published


def row(case: str, run: Run, size: int, count: int) -> str:
    return (
        f"| {case} | {count:,} | {run.wall:.1f} | {run.cpu:.1f} | {count / run.wall:,.0f} | "
        f"{size / run.wall / 1e6:,.0f} | {run.peak / 1e6:,.0f} | {run.foreign_share:.0%} |"
    )


HEAD = (
    "| case | images | wall s | CPU s | images/s | MB/s | peak MB | other load |\n"
    "|---|---|---|---|---|---|---|---|"
)


def memory(into: Path, count: int) -> Iterator[str]:
    """Convert 1,000 images up to all of them: the peak must not grow."""
    paths = photographs(into / "photographs", count)
    yield HEAD
    for images in sorted({min(1000, count), min(3000, count), count}):
        name = f"memory-{images}"
        lines_of_images = (line(n, path.name) for n, path in enumerate(paths[:images]))
        (into / f"{name}.jsonl").write_bytes(b"".join(lines_of_images))
        recipe_path = recipe(into, name, paths[0].parent)
        run = convert(into, recipe_path, "--memory", "1GiB", "--workers", "2", memory=True)
        size = manifest(recipe_path)["totals"]["image_bytes"]
        assert manifest(recipe_path)["totals"]["images"] == images
        yield row("mdsmix --memory 1GiB --workers 2", run, size, images)


AS_WRITTEN = """
import json, sys
from pathlib import Path
from PIL import Image
from streaming import MDSWriter
lines, root, out = sys.argv[1:]
columns = {"image": "jpeg", "conversations": "json"}
with MDSWriter(out=out, columns=columns, size_limit=1 << 26) as writer:
    for line in open(lines):
        record = json.loads(line)
        image = Image.open(Path(root) / record["image"]).convert("RGB")
        writer.write({"image": image, "conversations": record["conversations"]})
"""
COPIES = """
import json, sys
from pathlib import Path
from streaming import MDSWriter
lines, root, out = sys.argv[1:]
columns = {"image": "bytes", "conversations": "json"}
with MDSWriter(out=out, columns=columns, size_limit=1 << 26) as writer:
    for line in open(lines):
        record = json.loads(line)
        data = (Path(root) / record["image"]).read_bytes()
        writer.write({"image": data, "conversations": record["conversations"]})
"""


def loops(into: Path, count: int, rounds: int = 1) -> Iterator[str]:
    """Run in turn: the loop that people write, one that copies bytes, and mdsmix with both ways to
    check an image. The cost of eight images is subtracted, since the imports of Streaming (5 s on
    an idle machine) would hide the rest.
    """
    paths = photographs(into / "photographs", count)
    size = sum(path.stat().st_size for path in paths[:count])
    ways: dict[str, Callable[[int], Run]] = {
        "MDSWriter, Image.open, convert('RGB'), jpeg": lambda n: _loop(into, AS_WRITTEN, paths[:n]),
        "MDSWriter, bytes unchecked": lambda n: _loop(into, COPIES, paths[:n]),
        "mdsmix, decode: header": lambda n: _ours(into, paths[:n], decode="header"),
        "mdsmix, decode: full": lambda n: _ours(into, paths[:n]),
    }
    runs_of: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            start = run(8)
            whole = run(count)
            net = replace(whole, wall=whole.wall - start.wall, cpu=whole.cpu - start.cpu)
            runs_of[name].append(net)
    yield HEAD
    for name, runs in runs_of.items():
        yield row(name, sorted(runs, key=lambda run: run.cpu)[len(runs) // 2], size, count)


def _lines(into: Path, name: str, paths: list[Path]) -> Path:
    file = into / f"{name}.jsonl"
    file.write_bytes(b"".join(line(n, path.name) for n, path in enumerate(paths)))
    return file


def _ours(into: Path, paths: list[Path], **images: Any) -> Run:
    _lines(into, "loops", paths)
    return convert(into, recipe(into, "loops", paths[0].parent, **images))


def _loop(into: Path, code: str, paths: list[Path]) -> Run:
    output = into / "out-loop"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-c", code, _lines(into, "loop", paths), paths[0].parent, output]
    return measure([str(word) for word in command], os.environ, into / "log")


def small(into: Path, count: int) -> Iterator[str]:
    """Measure the cost of many small files in one folder, and a second run."""
    paths = photographs(into / "small", count, side=96, quality=80)
    (into / "small.jsonl").write_bytes(b"".join(line(n, paths[n].name) for n in range(count)))
    recipe_path = recipe(into, "small", paths[0].parent)
    yield HEAD
    run = convert(into, recipe_path, memory=True)
    yield row("mdsmix, 96 x 96", run, manifest(recipe_path)["totals"]["image_bytes"], count)
    env = os.environ | {"MDSMIX_CACHE": str(into / "cache")}
    command = [MDSMIX, "convert", recipe_path]
    again = measure(command, env, into / "log", memory=True)
    yield row("the second run, nothing to do", again, 0, count)


def bucket(into: Path, count: int) -> Iterator[str]:
    """Convert the same images from a bucket. Each image is one request, and planning makes none; a
    second run lists the images.
    """
    sys.path.insert(0, str(ROOT))
    import boto3

    from mdsmix.storage import locate, map_threads
    from tests.minio import start_own_minio

    paths = photographs(into / "small", count, side=96, quality=80)
    os.environ["MINIO_PROMETHEUS_AUTH_TYPE"] = "public"
    with start_own_minio(into / "minio") as server:
        os.environ.update(server.settings)
        endpoint = server.settings["S3_ENDPOINT_URL"]
        store = boto3.client("s3", endpoint_url=endpoint)
        with suppress(store.exceptions.BucketAlreadyOwnedByYou):
            store.create_bucket(Bucket="small")
        root = locate("s3://small/pictures")
        stored = {name for name, _ in root.list()}
        map_threads(
            lambda path: (root / path.name).write(path.read_bytes()),
            [path for path in paths if path.name not in stored],
        )
        yield from _in_flight(into, paths[: min(count, 2000)], root.url, endpoint)
        recipe_path = _bucket_recipe(into, "bucket", paths, root.url)
        yield HEAD
        before = _count_requests(endpoint)
        run = convert(into, recipe_path, memory=True)
        yield row(
            "mdsmix, 96 x 96, from MinIO",
            run,
            manifest(recipe_path)["totals"]["image_bytes"],
            count,
        )
        middle = _count_requests(endpoint)
        yield f"requests to the store: {dict(middle - before)}"
        env = os.environ | {"MDSMIX_CACHE": str(into / "cache")}
        again = measure([MDSMIX, "convert", recipe_path], env, into / "log", memory=True)
        yield row("the second run, nothing to do", again, 0, count)
        yield f"requests to the store: {dict(_count_requests(endpoint) - middle)}"


def _bucket_recipe(into: Path, name: str, paths: list[Path], root: str) -> Path:
    _lines(into, name, paths)
    recipe_path = recipe(into, name, paths[0].parent)
    tree = json.loads(recipe_path.read_text())
    tree["streams"]["see"]["images"]["root"] = root
    recipe_path.write_text(json.dumps(tree))
    return recipe_path


def _in_flight(into: Path, paths: list[Path], root: str, endpoint: str) -> Iterator[str]:
    """Count the simultaneous requests for images to a store that takes 20 ms for each."""
    from tests.faults import Rule, make_failing_proxy

    with make_failing_proxy(endpoint) as proxy:
        proxy.rules = [Rule("", "GET", times=10**9, then=partial(time.sleep, 0.02))]
        os.environ["S3_ENDPOINT_URL"] = proxy.endpoint
        run = convert(into, _bucket_recipe(into, "in-flight", paths, root))
        os.environ["S3_ENDPOINT_URL"] = endpoint
        reads = [request for request in proxy.requests if request.operation == "GET"]
    begins = [(read.began, 1) for read in reads]
    ends = [(read.ended, -1) for read in reads]
    moments = sorted(begins + ends)
    highest = max(accumulate(change for _, change in moments))
    waited = sum(read.ended - read.began for read in reads) / 1e9
    span = (moments[-1][0] - moments[0][0]) / 1e9
    yield (
        f"{len(paths):,} images from a store that takes 20 ms: {len(proxy.requests):,} requests, "
        f"{len(reads):,} of them reads, at most {highest} at once, "
        f"{waited / span:.1f} on average over {span:.1f} s ({run.wall:.1f} s in all)"
    )


def _count_requests(endpoint: str) -> Counter[str]:
    """Return the number of requests of each type, as MinIO counts them. It updates its figures
    every 10 s.
    """
    time.sleep(12)
    with urllib.request.urlopen(f"{endpoint}/minio/v2/metrics/cluster", timeout=10) as answer:
        totals = re.findall(
            r'minio_s3_requests_total\{api="(\w+)"[^}]*\} ([\d.e+]+)', answer.read().decode()
        )
    return Counter({api: int(float(count)) for api, count in totals})


BREAKS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "not_json": lambda text, rng: text[: rng.randrange(20, len(text) - 2)],
    "invalid_utf8": lambda text, _: text.replace(b"Shapes", b"Sh\xffpes"),
    "missing_field": lambda text, _: text.replace(b'"conversations"', b'"conversation"'),
    "messages_not_a_list": lambda text, _: json.dumps(
        json.loads(text) | {"conversations": "none"}
    ).encode(),
    "no_messages": lambda text, _: json.dumps(json.loads(text) | {"conversations": []}).encode(),
    "unknown_role": lambda text, _: text.replace(b'"gpt"', b'"narrator"'),
    "empty_answer": lambda text, _: _answered(text, ""),
    "content_not_text": lambda text, _: _answered(text, None),
    "image_count": lambda text, _: text.replace(b"<image>", b"<image><image>"),
    "bad_image": lambda text, _: json.dumps(json.loads(text) | {"image": 7}).encode(),
}
"Ten ways to break a line, by the reason that mdsmix must give."


def _answered(text: bytes, value: str | None) -> bytes:
    record = json.loads(text)
    record["conversations"][1]["value"] = value
    return json.dumps(record).encode()


def lines(into: Path, count: int) -> Iterator[str]:
    """Check that each planted fault is found with its reason, and that read = written + filtered +
    quarantined.
    """
    images = photographs(into / "small", min(20_000, count), side=96, quality=80)
    rng = random.Random(SEED)
    planted = Counter[str]()
    ways = list(BREAKS)
    with (into / "lines.jsonl").open("wb") as file:
        for number in range(count):
            text = line(number, images[number % len(images)].name).rstrip()
            draw = rng.random()
            if draw < 0.01:
                way = ways[planted.total() % len(ways)]
                text = BREAKS[way](text, rng)
                planted[way] += 1
            elif draw < 0.02:
                text = line(number, f"lost/{number}.jpg").rstrip()
                planted["image_not_found"] += 1
            file.write(text + b"\n")
    recipe_path = recipe(into, "lines", images[0].parent)
    run = convert(into, recipe_path, memory=True)
    records = manifest(recipe_path)["records"]
    quarantined = records["quarantined"]
    yield HEAD
    yield row("mdsmix, lines", run, manifest(recipe_path)["totals"]["image_bytes"], count)
    yield (
        f"read {records['read']:,} = written {records['written']:,} "
        f"+ filtered {records['filtered']} + quarantined {quarantined}"
    )
    yield f"planted: {dict(planted)}"
    missed = {way: n for way, n in planted.items() if quarantined.get(way) != n}
    yield f"not found, or with another reason: {missed or 'none'}"
    assert not missed
    assert records["read"] == count == records["written"] + sum(quarantined.values())


MAP = """
import sys
from pathlib import Path
from datasets import Dataset
from PIL import Image
root, count = Path(sys.argv[1]), int(sys.argv[2])
names = sorted(str(path) for path in root.iterdir())[:count]

def process(batch):
    import numpy as np
    images = []
    for name in batch["image"]:
        image = Image.open(name).convert("RGB").resize((1120, 1120))
        images.append((np.asarray(image, np.float32) / 255).transpose(2, 0, 1))
    return {"pixel_values": images}

data = Dataset.from_dict({"image": names})
data.map(process, batched=True, num_proc=1, remove_columns=["image"], cache_file_name=sys.argv[3])
"""


def hugging_face(into: Path, count: int) -> Iterator[str]:
    """Measure `map(process_batch, batched=True, num_proc=1)`, as in GLM-4's `finetune_demo`: a
    thousand images per batch, as float32 pixels.
    """
    paths = photographs(into / "photographs", count)
    python = ROOT / ".venv-foundry/bin/python"
    python = Path(os.environ.get("MDSMIX_FOUNDRY_PYTHON", python))
    cache = into / "map.arrow"
    yield HEAD
    command = [python, "-c", MAP, paths[0].parent, str(count), cache]
    size = sum(path.stat().st_size for path in paths[:count])
    try:
        run = measure(
            [str(c) for c in command],
            os.environ | {"HF_DATASETS_CACHE": str(into / "hf")},
            into / "log",
            memory=True,
        )
        yield row("datasets.map", run, size, count)
        yield f"it wrote {cache.stat().st_size / 1e9:.1f} GB"
    except RuntimeError as error:
        yield f"datasets.map of {count} images ended: {str(error)[-300:]}"
    finally:
        cache.unlink(missing_ok=True)


MODES: Mapping[str, tuple[Callable[..., Iterator[str]], int]] = {
    "memory": (memory, 7500),
    "loops": (loops, 1000),
    "small": (small, 100_000),
    "bucket": (bucket, 100_000),
    "lines": (lines, 1_000_000),
    "map": (hugging_face, 1000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--count", type=int)
    parser.add_argument("--into", type=Path, default=Path(tempfile.gettempdir()) / "mdsmix-images")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    mode, count = MODES[arguments.mode]
    began = time.perf_counter()
    for text in mode(arguments.into, arguments.count or count):
        print(text, flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
