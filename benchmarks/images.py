"""Streams of images: memory and speed compared with scripts that people write, and a million lines
with planted faults.

    .venv/bin/python -m benchmarks.images MODE [--count N] [--into DIR]

- `memory`: 1,000, 3,000 and 7,500 images of 1,120 x 1,120 with --memory 1GiB
- `loops`: the MDSWriter loop as people write it, and one that copies bytes unchecked
- `tools`: two processes of mdsmix, of MDSWriter scripts and of litData's `optimize` (.venv-bench)
- `batches`: `mdsmix.load` with a processor, and a bare StreamingDataset that calls the same one
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
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import Run, measure
from benchmarks.start_up import STARTS, find_start_up_fault, subtract_start_up

ROOT = Path(__file__).parents[1]
MDSMIX = Path(sys.executable).with_name("mdsmix")
SIDE = 1120
SEED = 5
MB = 1_000_000


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
        f"{size / run.wall / MB:,.0f} | {count / run.cpu:,.0f} | {size / run.cpu / MB:,.0f} | "
        f"{run.peak / MB:,.0f} | {run.foreign_share:.0%} |"
    )


HEAD = (
    "| case | images | wall s | CPU s | images/s | MB/s | images/CPU s | MB/CPU s | peak MB | "
    "other load |\n|---|---|---|---|---|---|---|---|---|---|"
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
    ways: dict[str, Callable[[int], Run]] = {
        "MDSWriter, Image.open, convert('RGB'), jpeg": lambda n: _loop(into, AS_WRITTEN, paths[:n]),
        "MDSWriter, bytes unchecked": lambda n: _loop(into, COPIES, paths[:n]),
        "mdsmix, decode: header": lambda n: _ours(into, paths[:n], decode="header"),
        "mdsmix, decode: full": lambda n: _ours(into, paths[:n]),
    }
    yield from subtract_few_images(ways, paths, rounds)


def subtract_few_images(
    ways: Mapping[str, Callable[[int], Run]], paths: Sequence[Path], rounds: int
) -> Iterator[str]:
    """Run the ways in turn, and yield a row for each: the costs of all images minus those of eight,
    the median of at least `STARTS` runs. A row whose start-up takes too much says so.

    Args:
        ways: name -> runs a tool on the first images.
        paths: all images.
        rounds: how often each way runs; a row has the run with the median of CPU seconds.
    """
    count = len(paths)
    size = sum(path.stat().st_size for path in paths)
    runs_of: dict[str, list[Run]] = {name: [] for name in ways}
    starts_of: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            starts_of[name] += [run(8) for _ in range(math.ceil(STARTS / rounds))]
            runs_of[name].append(run(count))
    yield HEAD
    for name, runs in runs_of.items():
        if fault := find_start_up_fault(runs, starts_of[name]):
            yield f"| {name} | {count:,} | {fault} |"
            continue
        net = subtract_start_up(runs, starts_of[name])
        yield row(name, sorted(net, key=lambda run: run.cpu)[len(net) // 2], size, count)


IN_TWO_PROCESSES = """
import json, sys
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from PIL import Image
from streaming import MDSWriter
from streaming.base.util import merge_index

def write(number, lines, root, out, converts):
    columns = {"image": "jpeg", "conversations": "json"}
    with MDSWriter(out=f"{out}/{number}", columns=columns, size_limit=1 << 26) as writer:
        for line in lines[number::2]:
            record = json.loads(line)
            image = Image.open(Path(root) / record["image"])
            if converts:
                image = image.convert("RGB")
            writer.write({"image": image, "conversations": record["conversations"]})

if __name__ == "__main__":
    file, root, out, converts = sys.argv[1:]
    lines = open(file).readlines()
    task = partial(write, lines=lines, root=root, out=out, converts=converts == "yes")
    with Pool(2) as pool:
        pool.map(task, [0, 1])
    merge_index(out)
"""
"An MDSWriter in each process. Without `convert`, the column `jpeg` copies the bytes of the file."
LITDATA = """
import json, sys
from functools import partial
from pathlib import Path
from litdata import optimize
from PIL import Image

def read(line, root):
    record = json.loads(line)
    conversations = json.dumps(record["conversations"])
    return {"image": Image.open(Path(root) / record["image"]), "conversations": conversations}

if __name__ == "__main__":
    file, root, out = sys.argv[1:]
    lines = open(file).readlines()
    optimize(
        fn=partial(read, root=root), inputs=lines, output_dir=out, chunk_bytes="64MB", num_workers=2
    )
"""
"litData copies the bytes of the file, too."


def tools(into: Path, count: int, rounds: int = 1) -> Iterator[str]:
    """Run two processes of each tool in turn. The cost of eight images is subtracted."""
    paths = photographs(into / "photographs", count)
    bench = ROOT / ".venv-bench/bin/python"
    two = ("--workers", "2")
    ways: dict[str, Callable[[int], Run]] = {
        "mdsmix, decode: full": lambda n: _ours(into, paths[:n], *two),
        "mdsmix, decode: header": lambda n: _ours(into, paths[:n], *two, decode="header"),
        "MDSWriter, Image.open, jpeg": lambda n: _script(
            into, sys.executable, IN_TWO_PROCESSES, paths[:n], "no"
        ),
        "MDSWriter, convert('RGB'), jpeg": lambda n: _script(
            into, sys.executable, IN_TWO_PROCESSES, paths[:n], "yes"
        ),
        "litData optimize": lambda n: _script(into, bench, LITDATA, paths[:n]),
    }
    yield from subtract_few_images(ways, paths, rounds)


LENGTH = 2048
BATCH = 8
PIXELS = 1280 * 28 * 28
"The most pixels that the processor keeps of an image: 1,280 tokens, as in Qwen2.5-VL's examples."


def batches(into: Path, count: int, rounds: int = 3) -> Iterator[str]:
    """Draw an epoch from both loaders in turn, in this process, with one thread of torch. Both
    decode the images and put a batch through the same Qwen2.5-VL processor; their batches must have
    the same tokens, labels and pixels.
    """
    import torch

    torch.set_num_threads(1)
    paths = photographs(into / "photographs", count)
    records = [json.loads(line(number, path.name)) for number, path in enumerate(paths)]
    processor = _write_processor(into)
    loaders = {
        "mdsmix.load": _load_with_mdsmix(into, processor, paths),
        "StreamingDataset and a collator": _load_with_script(
            into, processor, records, paths[0].parent
        ),
    }
    for ours, bare in zip(*(loader() for loader in loaders.values()), strict=True):
        for key in ("input_ids", "labels", "attention_mask", "pixel_values", "image_grid_thw"):
            assert torch.equal(ours[key], bare[key]), key
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, loader in loaders.items():
            began = time.process_time()
            rows = sum(len(batch["input_ids"]) for batch in loader())
            seconds[name].append(time.process_time() - began)
            assert rows == count
    size = sum(path.stat().st_size for path in paths)
    yield "| loader | images | CPU s | images per CPU s | MB per CPU s |\n|---|---|---|---|---|"
    for name, runs in seconds.items():
        cpu = median(runs)
        yield f"| {name} | {count:,} | {cpu:.1f} | {count / cpu:.1f} | {size / cpu / MB:.1f} |"


def _write_processor(into: Path) -> Path:
    """Write a Qwen2.5-VL processor with realistic sizes, whose tokenizer is our own."""
    from tests.processors import write_processor

    home = into / "processor"
    if not home.exists():
        tokenizer(into)
        write_processor("qwen", into / "plain", home)
        config = home / "qwen/preprocessor_config.json"
        tree = json.loads(config.read_text())
        tree |= {"max_pixels": PIXELS, "size": {"shortest_edge": 56 * 56, "longest_edge": PIXELS}}
        config.write_text(json.dumps(tree))
    return home / "qwen"


Batches = Callable[[], Iterable[Mapping[str, Any]]]
"Returns the batches of an epoch."


def _load_with_mdsmix(into: Path, processor: Path, paths: list[Path]) -> Batches:
    from mdsmix.load import build_loader
    from mdsmix.mix.render.render import render_recipe

    _lines(into, "batches", paths)
    recipe_path = recipe(into, "batches", paths[0].parent)
    tree = json.loads(recipe_path.read_text())
    loader = {"num_workers": 0, "dataset": {"shuffle": False}}
    tree |= {"processor": str(processor), "train_loader": loader}
    tree["tokenizer"] = str(processor.with_name("qwen-tokenizer"))
    recipe_path.write_text(json.dumps(tree))
    convert(into, recipe_path)
    train_yaml = into / "batches.yaml"
    train_yaml.write_text(render_recipe(recipe_path, [], None)[1])
    return lambda: build_loader(str(train_yaml), BATCH)


def _load_with_script(
    into: Path, processor_folder: Path, records: Sequence[Any], root: Path
) -> Batches:
    """Write the records with MDSWriter, and return a loader as people write it: it prints the chat
    template and trains the answer.
    """
    import torch
    from PIL import Image
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader
    from transformers import AutoProcessor

    output = into / "out-batches-script"
    shutil.rmtree(output, ignore_errors=True)
    columns = {"image": "jpeg", "conversations": "json"}
    with MDSWriter(out=str(output), columns=columns, size_limit=1 << 26) as writer:
        for record in records:
            image = Image.open(root / record["image"])
            writer.write({"image": image, "conversations": record["conversations"]})
    processor = AutoProcessor.from_pretrained(str(processor_folder))
    eos = processor.tokenizer.eos_token
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    padding = {"padding": "max_length", "max_length": LENGTH}

    def collate(samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        prompts = list[str]()
        answers = list[str]()
        for sample in samples:
            question, answer = sample["conversations"]
            text = question["value"].replace("<image>", shown)
            prompts.append(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
            answers.append(f"{answer['value']}<|im_end|>\n{eos}")
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        images = [sample["image"].convert("RGB") for sample in samples]
        batch = processor(text=texts, images=images, return_tensors="pt", **padding)
        # Train the answers, which are at the ends of the rows.
        labels = torch.full_like(batch["input_ids"], -100)
        for row, answer in enumerate(answers):
            length = len(processor.tokenizer(answer)["input_ids"])
            end = int(batch["attention_mask"][row].sum())
            labels[row, end - length : end] = batch["input_ids"][row, end - length : end]
        return {**batch, "labels": labels}

    dataset = StreamingDataset(local=str(output), batch_size=BATCH, shuffle=False)
    return lambda: DataLoader(dataset, batch_size=BATCH, collate_fn=collate)


def _lines(into: Path, name: str, paths: list[Path]) -> Path:
    file = into / f"{name}.jsonl"
    file.write_bytes(b"".join(line(n, path.name) for n, path in enumerate(paths)))
    return file


def _ours(into: Path, paths: list[Path], *options: str, **images: Any) -> Run:
    _lines(into, "loops", paths)
    return convert(into, recipe(into, "loops", paths[0].parent, **images), *options)


def _loop(into: Path, code: str, paths: list[Path]) -> Run:
    return _script(into, sys.executable, code, paths)


def _script(into: Path, python: str | Path, code: str, paths: list[Path], *arguments: str) -> Run:
    """Run a script: its arguments are the file of the lines, the folder of the images, the output's
    folder, and `arguments`. The output is deleted.
    """
    output = into / "out-loop"
    file = into / "loop.py"
    file.write_text(code)
    command = [python, file, _lines(into, "loop", paths), paths[0].parent, output, *arguments]
    try:
        return measure([str(word) for word in command], os.environ, into / "log")
    finally:
        shutil.rmtree(output, ignore_errors=True)


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
    "tools": (tools, 7500),
    "batches": (batches, 160),
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
