"""The made records as files of every format, and images of every format that needs no library to be
written.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.formats import PACKERS, encode_arrow, encode_parquet, encode_tar, write_mds
from tests.golden import made
from tests.golden.made import Draws, Record

BAD_LINES = (
    b'{"text": "cut',
    b"[1]",
    b'{"text": 5}',
    b"\xff\xfe",
    b'{"other": "field"}',
    b"",
    b" ",
)
JPEGS = Path(__file__).parent / "jpegs"


def write_sources(folder: Path) -> None:
    folder.mkdir()
    documents = list(made.documents("documents", 90))
    lines(folder / "documents.jsonl", documents, bad=BAD_LINES)
    lines(folder / "documents.ndjson", documents[:60])
    for packing, pack in PACKERS.items():
        packed = pack((folder / "documents.jsonl").read_bytes())
        (folder / f"documents.jsonl{packing}").write_bytes(packed)
    (folder / "documents.json").write_text(json.dumps(documents[:60], indent=1))
    plain = [{"text": d["text"] or "empty", "id": d["id"]} for d in documents]
    texts = [each["text"] for each in plain]
    (folder / "lines.txt").write_text("\n".join(t.replace("\n", " ") for t in texts))
    (folder / "paragraphs.txt.gz").write_bytes(PACKERS[".gz"]("\n\n \n".join(texts).encode()))
    (folder / "texts").mkdir()
    for number in range(0, 90, 3):
        (folder / "texts" / f"{number}.txt").write_text("\n".join(texts[number : number + 3]))
    table(folder / "documents.csv", plain, ",")
    table(folder / "headless.tsv.zst", plain, "\t", pack=PACKERS[".zst"])
    for name, mode in (("documents.tar", "w"), ("documents.tgz", "w:gz")):
        (folder / name).write_bytes(encode_tar(({"txt": text} for text in texts), mode))
    columns(folder, "documents", plain)
    write_mds(folder / "documents.mds", plain)

    pairs = list(made.pairs("pairs", 100))
    lines(folder / "pairs.jsonl", pairs, bad=BAD_LINES)
    columns(folder, "pairs", [pair | {"id": str(pair["id"])} for pair in pairs])
    chats = list(made.messages("messages", 90))
    lines(folder / "messages.jsonl", chats, bad=(b'{"messages": "none"}', b"{}", b"null"))
    table(folder / "messages.csv", chats, ",")
    columns(folder, "messages", chats)
    (folder / "messages.json.xz").write_bytes(PACKERS[".xz"](json.dumps(chats).encode()))
    write_mds(folder / "messages.mds", chats)
    renamed = {"user": "asks", "assistant": "says", "from": "who", "value": "what"}
    lines(folder / "tagged.jsonl", made.sharegpt("tagged", 60, **renamed))
    for make in (made.openai, made.sharegpt, made.alpaca, made.rounds, made.masked, made.judged):
        lines(folder / f"{make.__name__}.jsonl", make(make.__name__, 90))
    for key, no, yes in (
        ("loss_mask", 0, 1),
        ("training", False, True),
        ("trainable", False, True),
    ):
        lines(folder / f"{key}.jsonl", made.marked("marked", 60, key, no, yes))
    write_json_columns(folder)
    write_pictures(folder)


def write_json_columns(folder: Path) -> None:
    """Parquet files and Arrow streams with columns of JSON, and with maps, as `datasets` and DuckDB
    write them.
    """
    pairs = list(made.pairs("json columns", 100))
    mixed = [_mixed(number, pair["response"]) for number, pair in enumerate(pairs)]
    prompts = pa.array([pair["prompt"] for pair in pairs])
    extended(folder / "mixed", {"prompt": prompts, "response": json_column(mixed)})
    chats = list(made.openai("json columns", 60))
    messages = json_column([chat["messages"] for chat in chats])
    tools = json_column([chat.get("tools") for chat in chats])
    # Beside lines: where messages that are JSON are not read, the stream is not empty.
    whole = folder / "whole"
    whole.mkdir()
    lines(whole / "a.jsonl", made.openai("whole", 40))
    extended(whole / "b", {"messages": messages, "tools": tools})
    # A list of messages whose contents alone are JSON, and tools whose parameters are a map.
    talks = [chat["messages"] for chat in made.messages("json columns", 60)]
    said = [message for talk in talks for message in talk]
    roles = pa.array([message["role"] for message in said])
    contents = json_column([message["content"] for message in said])
    ends = [0]
    for talk in talks:
        ends.append(ends[-1] + len(talk))
    structs = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), structs)
    tool = {"name": "look", "parameters": [("at", {"type": "string"}), ("in", {"type": "number"})]}
    kind = pa.map_(pa.string(), pa.struct([("type", pa.string())]))
    names = pa.list_(pa.struct([("name", pa.string()), ("parameters", kind)]))
    described = pa.array([[tool] if n % 3 else None for n in range(len(talks))], names)
    extended(folder / "mapped", {"messages": lists, "tools": described})


def _mixed(number: int, text: str) -> Any:
    """A text; now and then another value of JSON, as one column of `datasets` may hold them."""
    others: dict[int, Any] = {7: number, 17: {"answer": text}, 27: None, 37: True}
    return others.get(number, text)


def json_column(values: list[Any]) -> pa.Array:
    """Values as Arrow's extension type of JSON."""
    texts = [None if v is None else json.dumps(v, ensure_ascii=False) for v in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def extended(path: Path, arrays: dict[str, pa.Array]) -> None:
    """The columns as a parquet file and as an Arrow stream."""
    table = pa.table(arrays)
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=5)
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def write_pictures(folder: Path) -> None:
    """Records with images, in each way in which a record may hold them."""
    images = folder / "images"
    images.mkdir()
    for jpeg in sorted(JPEGS.glob("*.jpg")):
        shutil.copy(jpeg, images)
    for number in range(6):
        (images / f"{number}.png").write_bytes(png(20 + 9 * number, 40 - 5 * number, number))
        (images / f"{number}.bmp").write_bytes(bmp(8 + number, 12 + 3 * number, number))
    (images / "cut.png").write_bytes(png(30, 30, 9)[:400])
    (images / "none.jpg").write_bytes(b"no image")
    names = [*sorted(path.name for path in images.iterdir()), "missing.png"]
    found = list(made.pictured("pictures", 70, names))
    llava = (r | ({"image": n[0] if len(n) == 1 else n} if n else {}) for r, n in found)
    lines(folder / "llava.jsonl", llava)
    lines(folder / "qwen_vl.jsonl", (_inside(*each) for each in found))
    lines(folder / "parts.jsonl", (_parts(images, *each) for each in found))
    there = [(r, [images / n for n in of]) for r, of in found if "missing.png" not in of]
    whole = [
        r | {"images": [{"bytes": n.read_bytes(), "path": None} for n in of]} for r, of in there
    ]
    talk = pa.struct([("from", pa.string()), ("value", pa.string())])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("conversations", pa.list_(talk)), ("images", pa.list_(image))])
    pq.write_table(pa.Table.from_pylist(whole, schema), folder / "images.parquet", row_group_size=5)
    members = [r | {of[0].suffix[1:]: of[0].read_bytes()} for r, of in there if len(of) == 1]
    (folder / "images.tar").write_bytes(encode_tar(members))


def _inside(record: Record, names: list[str]) -> Record:
    said = [dict(message) for message in record["conversations"]]
    for name in names:
        said[0]["value"] = said[0]["value"].replace("<image>", f"<img>{name}</img>", 1)
    return {"conversations": said}


def _parts(images: Path, record: Record, names: list[str]) -> Record:
    """Parts of OpenAI's messages: the first image by its path, the others as data."""
    messages = list[Record]()
    for message in record["conversations"]:
        role = "user" if message["from"] == "human" else "assistant"
        texts = message["value"].split("<image>\n")
        parts: list[Any] = [{"type": "text", "text": texts[-1]}]
        for number, name in enumerate(names[: len(texts) - 1]):
            url = f"images/{name}"
            if number and (images / name).exists():
                url = f"data:image/png;base64,{b64encode((images / name).read_bytes()).decode()}"
            parts.insert(number, {"type": "image_url", "image_url": {"url": url}})
        messages.append({"role": role, "content": parts if len(parts) > 1 else texts[-1]})
    return {"messages": messages}


def lines(path: Path, records: Iterable[Record], bad: tuple[bytes, ...] = ()) -> None:
    """JSON Lines, with lines that are bad among them."""
    written = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    for number, line in enumerate(bad):
        written.insert(5 + 9 * number, line)
    path.write_bytes(b"\n".join(written) + b"\n")


def table(path: Path, records: list[Record], delimiter: str, pack: Any = bytes) -> None:
    """Cells that hold lists are JSON; a table that is packed has no header."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    if pack is bytes:
        writer.writerow(records[0])
    for number, record in enumerate(records):
        cells = [v if isinstance(v, str) else json.dumps(v) for v in record.values()]
        writer.writerow(cells[:1] if len(cells) > 1 and number == 20 else cells)
    path.write_bytes(pack(out.getvalue().encode()))


def columns(folder: Path, name: str, records: list[Record]) -> None:
    """Parquet, Arrow as a file, as a stream and as `save_to_disk` leaves it."""
    (folder / f"{name}.parquet").write_bytes(encode_parquet(records))
    saved = folder / f"{name}.saved"
    saved.mkdir()
    files = [f"data-{number}.arrow" for number in (3, 0, 2, 1)]
    for number, file in enumerate(files):
        if some := records[25 * number : 25 * (number + 1)]:
            (saved / file).write_bytes(encode_arrow(some, pa.ipc.new_stream))
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": f} for f in files]}))
    (folder / f"{name}.feather").write_bytes(encode_arrow(records, pa.ipc.new_file))


def _pixels(width: int, height: int, seed: int) -> list[bytes]:
    draws = Draws(f"pixels {seed}")
    tile = bytes(draws.below(256) for _ in range(48))
    return [(tile[y % 16 :] + tile * (width // 8 + 1))[: 3 * width] for y in range(height)]


def png(width: int, height: int, seed: int) -> bytes:
    """With its pixels stored as they are, since releases of zlib compress differently."""
    raw = b"".join(b"\0" + row for row in _pixels(width, height, seed))
    stored = struct.pack("<BHH", 1, len(raw), len(raw) ^ 0xFFFF) + raw
    body = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(raw))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def bmp(width: int, height: int, seed: int) -> bytes:
    rows = [row + bytes(-len(row) % 4) for row in _pixels(width, height, seed)]
    body = b"".join(rows)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(body), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(body), 0, 0, 54) + head + body
