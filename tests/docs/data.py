"""What readers of a page have in their folder, or what has happened to it, where the page says so:
`<!-- data: NAME -->`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import yaml

from tests.converting import run_ok
from tests.pictures import drawing, record, seeing_tokenizer, write_drawings
from tests.tool_styles import QWEN_2_5, QWEN_3


def sights() -> None:
    """The six records of docs/images.md with their pictures, and a tokenizer that knows an
    image.
    """
    seeing_tokenizer(Path("tokenizer").rename("plain"), Path("tokenizer"))
    write_drawings(Path("pictures"), 3, (90, 70))
    (Path("pictures") / "4.jpg").write_bytes(drawing(size=(90, 70), seed=4)[:-200])
    shape = record("0.jpg", question="Which shape is this?", answer="A square.")
    two = record("1.png", "2.webp", question="Which is larger?", answer="Both are the same.")
    bad = map(record, ("3.jpg", "4.jpg", "http://example.org/5.jpg"))
    none = record(question="And without a picture?", answer="That is a record too.")
    _write("vqa.jsonl", [shape, two, *bad, none])


def seeing_model() -> dict[str, Any]:
    """The folder of a model that sees: its tokenizer and its processor; and records for it."""
    from mdsmix.load.vision import load_processor
    from tests.processors import TOKENS, make_processor, make_tiny_model

    model = seeing_tokenizer(Path("plain"), Path("model"), tokens=TOKENS)
    make_processor("qwen", model).save_pretrained(model)
    write_drawings(Path(), 7, (90, 70))
    named = ["0.jpg", "1.png,2.webp", "3.jpg", "4.png", "5.webp", "6.jpg", "0.jpg"]
    pictures = [*(names.split(",") for names in named), [], [], []]
    _write("a.jsonl", [record(*images) for images in pictures])
    seeing = load_processor(str(model))
    return {"model": make_tiny_model(len(seeing.tokenizer), seeing)}


def seeing_preferences() -> None:
    """Preferences on the drawings of `seeing_model`, as TRL writes them."""
    records = []
    for number, name in enumerate(["0.jpg", "1.png", "2.webp", "3.jpg"]):
        prompt = [{"role": "user", "content": "What is it?"}]
        answers = {"chosen": "A drawing.", "rejected": "No idea. " * (1 + number)}
        sides = {key: [{"role": "assistant", "content": text}] for key, text in answers.items()}
        records.append({"images": [name], "prompt": prompt, **sides})
    _write("likes.jsonl", records)


def small_llama() -> dict[str, Any]:
    """A model of transformers that has learned nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"vocab_size": 2048, "hidden_size": 16, "intermediate_size": 16}
    few = dict.fromkeys(("num_key_value_heads", "num_attention_heads", "num_hidden_layers"), 1)
    return {"model": LlamaForCausalLM(LlamaConfig(**shape, **few))}


def qwen_2_5() -> None:
    """A template in the manner of Qwen 2.5."""
    _set_template(QWEN_2_5)


def qwen_3() -> None:
    """A template in the manner of Qwen 3."""
    _set_template(QWEN_3)


def _set_template(template: str) -> None:
    config = Path("tokenizer/tokenizer_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))


def few() -> None:
    """demo/train.yaml of 32 samples an epoch, for those who read all of it."""
    recipe = yaml.safe_load(Path("yamls/demo.yaml").read_text())
    recipe["mix"] = {name: {"choose": 8} for name in ("web", "docs", "faq", "chat")}
    Path("yamls/few.yaml").write_text(yaml.safe_dump(recipe))
    run_ok("render-yaml", "yamls/few.yaml", "-o", "demo/train.yaml")


def table_and_chats() -> None:
    """web.parquet and chats.csv with some bad rows, and a parquet file that is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [orjson.loads(line)["text"] for line in _corpus_lines("docs")[:300]] + [None, None]
    urls = [f"https://example.org/{n}" for n in range(len(texts))]
    meta = [{"n": n} for n in range(len(texts))]
    pq.write_table(pa.table({"text": texts, "url": urls, "meta": meta}), "web.parquet")
    rows = [
        f'{n},"[{{""role"": ""user"", ""content"": ""What is {n}?""}}, {{""role"": ""assistant"", ""content"": ""{n}.""}}]"'
        for n in range(60)
    ]
    lines = ["id,messages", *rows, "60,one,two", '61,"not json"', ""]
    Path("chats.csv").write_text("\n".join(lines))
    Path("copied.parquet").write_bytes(Path("web.parquet").read_bytes()[:-100])


def texts() -> None:
    _write_documents("data/a.jsonl", "data/b.jsonl")


def _write_documents(*names: str) -> None:
    """Files of 200 documents each."""
    lines = _corpus_lines("docs")
    for n, path in enumerate(map(Path, names)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\n".join([*lines[n * 200 : n * 200 + 200], b""]))


def broken_lines() -> None:
    """1,000 records about 20 images; one in fifty is broken: its answer is a number, or its image
    is lost.
    """
    seeing_tokenizer(Path("tokenizer").rename("plain"), Path("tokenizer"))
    paths = [path.name for path in write_drawings(Path("pictures"), 20)]
    talks = [(f"Number {n}?", f"Drawing {n}.") for n in range(1000)]
    records = [record(paths[n % 20], question=q, answer=a) for n, (q, a) in enumerate(talks)]
    for n in range(50, 1000, 100):
        records[n]["image"] = "missing.jpg"
        records[n - 50]["conversations"][1]["value"] = 7
    _write("talks.jsonl", records)


def others_chats() -> None:
    """Conversations as the files of LLaMA-Factory and axolotl hold them, and a
    dataset_info.json.
    """
    Path("data").mkdir()
    said = [
        ("How many shards?", "Three."),
        ("And samples?", "Twelve."),
        ("Which loader?", "The finetuning loader."),
    ]
    talks = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in said]
    _write("data/alpaca.jsonl", [{"instruction": q, "input": "", "output": a} for q, a in said])
    _write("data/sharegpt.jsonl", [{"conversations": talk} for talk in talks])
    _write("data/wiki.jsonl", [{"text": a * 20} for _, a in said])
    ranked = [{"instruction": q, "chosen": a, "rejected": "None."} for q, a in said]
    _write("data/ranked.jsonl", ranked)
    info = {
        "alpaca": {"file_name": "alpaca.jsonl"},
        "sharegpt": {"file_name": "sharegpt.jsonl", "formatting": "sharegpt"},
        "wiki": {"file_name": "wiki.jsonl", "columns": {"prompt": "text"}},
        "ranked": {"file_name": "ranked.jsonl", "ranking": True},
    }
    Path("data/dataset_info.json").write_text(json.dumps(info))


def _corpus_lines(name: str) -> list[bytes]:
    return (Path("../../../corpus/demo/corpus") / f"{name}.jsonl").read_bytes().splitlines()


def _write(name: str, records: Iterable[Any]) -> None:
    """As Python's own json writes lines."""
    Path(name).write_text("".join(json.dumps(each) + "\n" for each in records), "utf-8")
