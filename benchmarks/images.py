"""Streams of images: memory and speed beside the ways in which people write them, and a million
lines with planted faults.

    .venv/bin/python -m benchmarks.images memory      # 1,000, 3,000 and 7,500 images of 1,120 x
    1,120 under --memory 1GiB
    .venv/bin/python -m benchmarks.images loops       # the MDSWriter loop as people write it, and
    one that copies bytes unchecked
    .venv/bin/python -m benchmarks.images small       # 100,000 small images in a folder
    .venv/bin/python -m benchmarks.images bucket      # 100,000 small images in a real MinIO
    .venv/bin/python -m benchmarks.images lines       # 1,000,000 lines over 20,000 small images: 1
    % broken in ten ways, 1 % lost files
    .venv/bin/python -m benchmarks.images map         # Hugging Face's `map` as GLM-4's finetuning
    calls it, in .venv-foundry

`--count N` takes another number; `--into DIR` another folder than the system's temporary one. Linux
only.
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
    """JPEGs that compress as photographs do, about 330 KB at 1,120 x 1,120: smooth shapes and a
    little noise. Of 64 different ones, each file ends in a comment of its own, so that no two are
    equal.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng, made = np.random.default_rng(SEED), list[bytes]()
    for _ in range(min(64, count)):
        coarse = rng.integers(0, 256, (max(2, side // 40), max(2, side // 40), 3), np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))
        noisy = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(noisy).save(out, "JPEG", quality=quality)
        made.append(out.getvalue())
    paths = [folder / f"{number:07}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            note = str(number).encode()
            comment = b"\xff\xfe" + (len(note) + 2).to_bytes(2, "big") + note
            data = made[number % len(made)]
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
    """A first conversion, of whose first tokenizer snapshot nothing is measured."""
    tree = json.loads(path.read_text())
    shutil.rmtree(tree["local"], ignore_errors=True)
    env = os.environ | {"MDSMIX_CACHE": str(into / "cache")}
    command = [MDSMIX, "convert", path, *options]
    for seen in (into / "cache/seen").glob("*.jsonl"):
        seen.unlink()
    return measure(command, env, into / "log", memory=memory)


def manifest(path: Path) -> dict[str, Any]:
    tree = json.loads(path.read_text())
    found: dict[str, Any] = json.loads(
        (Path(tree["local"]) / "see/train/mdsmix.manifest").read_text()
    )
    return found


def row(what: str, run: Run, bytes_of: int, count: int) -> str:
    return (
        f"| {what} | {count:,} | {run.wall:.1f} | {run.cpu:.1f} | {count / run.wall:,.0f} | "
        f"{bytes_of / run.wall / 1e6:,.0f} | {run.peak / 1e6:,.0f} | {run.others:.0%} |"
    )


HEAD = (
    "| what | images | wall s | CPU s | images/s | MB/s | peak MB | others |\n"
    "|---|---|---|---|---|---|---|---|"
)


def memory(into: Path, count: int) -> Iterator[str]:
    """Flat from a thousand to all."""
    paths = photographs(into / "photographs", count)
    yield HEAD
    for part in sorted({min(1000, count), min(3000, count), count}):
        name = f"memory-{part}"
        (into / f"{name}.jsonl").write_bytes(b"".join(line(n, paths[n].name) for n in range(part)))
        at = recipe(into, name, paths[0].parent)
        run = convert(into, at, "--memory", "1GiB", "--workers", "2", memory=True)
        size = manifest(at)["totals"]["image_bytes"]
        assert manifest(at)["totals"]["images"] == part
        yield row("mdsmix --memory 1GiB --workers 2", run, size, part)


AS_WRITTEN = """
import json, sys
from pathlib import Path
from PIL import Image
from streaming import MDSWriter
lines, root, out = sys.argv[1:]
with MDSWriter(out=out, columns={"image": "jpeg", "conversations": "json"}, size_limit=1 << 26) as writer:
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
with MDSWriter(out=out, columns={"image": "bytes", "conversations": "json"}, size_limit=1 << 26) as writer:
    for line in open(lines):
        record = json.loads(line)
        data = (Path(root) / record["image"]).read_bytes()
        writer.write({"image": data, "conversations": record["conversations"]})
"""


def loops(into: Path, count: int, rounds: int = 1) -> Iterator[str]:
    """A B C D, A B C D ...: what a person writes, what copies bytes, and mdsmix in both ways to
    look at an image. What each takes for eight images is taken off: the imports of Streaming, 5 s
    of an idle machine, would hide the rest.
    """
    paths = photographs(into / "photographs", count)
    size = sum(path.stat().st_size for path in paths[:count])
    ways: dict[str, Callable[[int], Run]] = {
        "MDSWriter, Image.open, convert('RGB'), jpeg": lambda n: _loop(into, AS_WRITTEN, paths[:n]),
        "MDSWriter, bytes unchecked": lambda n: _loop(into, COPIES, paths[:n]),
        "mdsmix, decode: header": lambda n: _ours(into, paths[:n], decode="header"),
        "mdsmix, decode: full": lambda n: _ours(into, paths[:n]),
    }
    found: dict[str, list[Run]] = {what: [] for what in ways}
    for _ in range(rounds):
        for what, run in ways.items():
            start, all_of = run(8), run(count)
            net = replace(all_of, wall=all_of.wall - start.wall, cpu=all_of.cpu - start.cpu)
            found[what].append(net)
    yield HEAD
    for what, runs in found.items():
        yield row(what, sorted(runs, key=lambda run: run.cpu)[len(runs) // 2], size, count)


def _lines(into: Path, name: str, paths: list[Path]) -> Path:
    at = into / f"{name}.jsonl"
    at.write_bytes(b"".join(line(n, path.name) for n, path in enumerate(paths)))
    return at


def _ours(into: Path, paths: list[Path], **images: Any) -> Run:
    _lines(into, "loops", paths)
    return convert(into, recipe(into, "loops", paths[0].parent, **images))


def _loop(into: Path, code: str, paths: list[Path]) -> Run:
    out = into / "out-loop"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", code, _lines(into, "loop", paths), paths[0].parent, out]
    return measure([str(each) for each in command], os.environ, into / "log")


def small(into: Path, count: int) -> Iterator[str]:
    """Many small files in one folder: what they cost beside their bytes, and a second run."""
    paths = photographs(into / "small", count, side=96, quality=80)
    (into / "small.jsonl").write_bytes(b"".join(line(n, paths[n].name) for n in range(count)))
    at = recipe(into, "small", paths[0].parent)
    yield HEAD
    run = convert(into, at, memory=True)
    yield row("mdsmix, 96 x 96", run, manifest(at)["totals"]["image_bytes"], count)
    env = os.environ | {"MDSMIX_CACHE": str(into / "cache")}
    command = [MDSMIX, "convert", at]
    again = measure(command, env, into / "log", memory=True)
    yield row("the second run, nothing to do", again, 0, count)


def bucket(into: Path, count: int) -> Iterator[str]:
    """The same from a bucket: each image is one request, none of them when the run is planned; a
    second run lists them.
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
        there = {name for name, _ in root.list()}
        map_threads(
            lambda path: (root / path.name).write(path.read_bytes()),
            [path for path in paths if path.name not in there],
        )
        yield from _in_flight(into, paths[: min(count, 2000)], root.url, endpoint)
        at = _bucket_recipe(into, "bucket", paths, root.url)
        yield HEAD
        before = _asked(endpoint)
        run = convert(into, at, memory=True)
        yield row("mdsmix, 96 x 96, from MinIO", run, manifest(at)["totals"]["image_bytes"], count)
        yield f"the store was asked: {dict((middle := _asked(endpoint)) - before)}"
        env = os.environ | {"MDSMIX_CACHE": str(into / "cache")}
        again = measure([MDSMIX, "convert", at], env, into / "log", memory=True)
        yield row("the second run, nothing to do", again, 0, count)
        yield f"the store was asked: {dict(_asked(endpoint) - middle)}"


def _bucket_recipe(into: Path, name: str, paths: list[Path], root: str) -> Path:
    _lines(into, name, paths)
    at = recipe(into, name, paths[0].parent)
    tree = json.loads(at.read_text())
    tree["streams"]["see"]["images"]["root"] = root
    at.write_text(json.dumps(tree))
    return at


def _in_flight(into: Path, paths: list[Path], root: str, endpoint: str) -> Iterator[str]:
    """How many images are asked for at one moment of a store that takes 20 ms for each."""
    from tests.faults import Rule, make_failing_proxy

    with make_failing_proxy(endpoint) as proxy:
        proxy.rules = [Rule("", "GET", times=10**9, then=partial(time.sleep, 0.02))]
        os.environ["S3_ENDPOINT_URL"] = proxy.endpoint
        run = convert(into, _bucket_recipe(into, "in-flight", paths, root))
        os.environ["S3_ENDPOINT_URL"] = endpoint
        reads = [each for each in proxy.requests if each.operation == "GET"]
    moments = sorted([(each.began, 1) for each in reads] + [(each.ended, -1) for each in reads])
    most = max(accumulate(change for _, change in moments))
    waited = sum(each.ended - each.began for each in reads) / 1e9
    span = (moments[-1][0] - moments[0][0]) / 1e9
    yield (
        f"{len(paths):,} images of a store that takes 20 ms: {len(proxy.requests):,} requests, {len(reads):,} of them reads, "
        f"{most} at one moment, {waited / span:.1f} on average over {span:.1f} s ({run.wall:.1f} s in all)"
    )


def _asked(endpoint: str) -> Counter[str]:
    """Requests by what they ask for, as MinIO itself counts them; it brings its figures up to date
    every 10 s.
    """
    time.sleep(12)
    with urllib.request.urlopen(f"{endpoint}/minio/v2/metrics/cluster", timeout=10) as answer:
        found = re.findall(
            r'minio_s3_requests_total\{api="(\w+)"[^}]*\} ([\d.e+]+)', answer.read().decode()
        )
    return Counter({api: int(float(count)) for api, count in found})


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
"Ten ways in which a line is broken, and the reason by which each is to be found."


def _answered(text: bytes, value: str | None) -> bytes:
    record = json.loads(text)
    record["conversations"][1]["value"] = value
    return json.dumps(record).encode()


def lines(into: Path, count: int) -> Iterator[str]:
    """Whether each planted fault is found under its reason, and read = written + filtered +
    quarantined.
    """
    images = photographs(into / "small", min(20_000, count), side=96, quality=80)
    rng, planted, ways = random.Random(SEED), Counter[str](), list(BREAKS)
    with (into / "lines.jsonl").open("wb") as out:
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
            out.write(text + b"\n")
    at = recipe(into, "lines", images[0].parent)
    run = convert(into, at, memory=True)
    records = manifest(at)["records"]
    said = records["read"], records["written"], records["filtered"], records["quarantined"]
    yield HEAD
    yield row("mdsmix, lines", run, manifest(at)["totals"]["image_bytes"], count)
    yield f"read {said[0]:,} = written {said[1]:,} + filtered {said[2]} + quarantined {said[3]}"
    yield f"planted: {dict(planted)}"
    missed = {way: n for way, n in planted.items() if records["quarantined"].get(way) != n}
    yield f"found under another reason, or not: {missed or 'none'}"
    assert not missed
    assert said[0] == count == said[1] + sum(said[3].values())


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
    """GLM-4's `finetune_demo`: `map(process_batch, batched=True, num_proc=1)`, a thousand images a
    batch as pixels in float32.
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
    asked = parser.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    mode, count = MODES[asked.mode]
    began = time.perf_counter()
    for text in mode(asked.into, asked.count or count):
        print(text, flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
