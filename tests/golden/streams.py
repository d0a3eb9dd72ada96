"""The recipes. Together they have every kind, shape, format, compression, loader and policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]


def documents(path: str, source: Tree | None = None, **settings: Any) -> Tree:
    return {
        "kind": "pretraining",
        "source": {"path": path, "text": "text", **(source or {})},
    } | settings


def finetuning(path: str, source: Tree | str, **settings: Any) -> Tree:
    """Return a stream of pairs or conversations. If `source` is a word, it is the field that the
    shape follows from.
    """
    named = {source: source} if isinstance(source, str) else source
    return {"kind": "finetuning", "source": {"path": path, **named}, **settings}


PAIR = {"prompt": "prompt", "response": "response"}
ALPACA = {key: key for key in ("instruction", "input", "output", "history")}
SHAREGPT = {"conversations": "conversations", "system": "system"}
TOOLS = {"messages": "messages", "tools": "tools"}
TAGS = {"role_tag": "who", "content_tag": "what", "user_tag": "asks", "assistant_tag": "says"}
WHERE = "lang == 'en' and (score > 0.3 or len(text) < 60)"
MERGE = {"consecutive_roles": "merge"}
TEMPLATE = "# {meta.title}\n\n{text}"


def alone(kind: str, source: Tree) -> Tree:
    """Return a stream of a kind that needs a run of its own, with these fields of its records."""
    return {"kind": kind, "source": {"path": "judged.jsonl", **source}}


def pairs(path: str = "pairs.jsonl", **settings: Any) -> Tree:
    return finetuning(path, PAIR, **settings)


def chats(path: str = "messages.jsonl", **settings: Any) -> Tree:
    return finetuning(path, "messages", **settings)


def pictured(path: str = "llava.jsonl", source: Tree | str | None = None, **images: Any) -> Tree:
    """Return a stream of records with images, by default LLaVA's."""
    images = {"root": "images", "token": "<|image|>", **images}
    return finetuning(path, source or {"shape": "llava"}, images=images)


CONVERSATIONS: dict[str, Tree] = {
    "pairs": pairs(),
    "messages": chats(),
    "compact": chats(columns="compact"),
    "merged": chats(**MERGE),
    "openai": finetuning("openai.jsonl", TOOLS),
    "openai-nulls": finetuning("openai.jsonl", TOOLS | {"nulls": "drop"}, **MERGE),
    "openai-untooled": finetuning("openai.jsonl", {"messages": "messages", "shape": "openai"}),
    "sharegpt": finetuning("sharegpt.jsonl", {**SHAREGPT, "tools": "tools"}),
    "tagged": finetuning("tagged.jsonl", {**SHAREGPT, "tags": TAGS}),
    "alpaca": finetuning("alpaca.jsonl", ALPACA),
    "alpaca-joined": finetuning("alpaca.jsonl", {**ALPACA, "joined_by": ""}),
    "rounds": finetuning("rounds.jsonl", "conversation"),
}
"Each shape of finetuning, as it is under any loader that reads them."
LONG: dict[str, Tree] = {
    f"{name}-{policy}": stream | {"too_long": policy}
    for name, stream in (("pairs", pairs()), ("messages", chats()))
    for policy in ("filter", "first_turns")
}
TEXTS = ("jsonl.gz", "jsonl.zst", "jsonl.bz2", "jsonl.xz", "ndjson", "json", "csv")
TABLES = ("parquet", "feather", "saved", "mds")
TALKS = [f"messages.{name}" for name in ("csv", "parquet", "saved", "mds", "json.xz")]
FORMATS: dict[str, Tree] = {
    **{name: documents(f"documents.{name}") for name in TEXTS},
    "tsv.zst": documents("headless.tsv.zst", {"header": ["text", "id"]}),
    "lines": documents("lines.txt", {"split_by": "line"}),
    "paragraphs.gz": documents("paragraphs.txt.gz", {"split_by": "paragraph"}),
    "files": documents("texts/*.txt", {"split_by": "file"}),
    "tar": documents("documents.tar", {"text": "txt"}),
    "tgz": documents("documents.tgz", {"text": "txt"}),
    **{name: documents(f"documents.{name}", layout="document") for name in TABLES},
    **{name: pairs(name) for name in ("pairs.parquet", "pairs.feather")},
    **{name: chats(name) for name in TALKS},
}
LAYOUTS: dict[str, Tree] = {
    "concat": documents("documents.jsonl"),
    "concat-bos": documents("documents.jsonl", add_bos=True, min_tokens=8, max_tokens=90),
    "concat-plain": documents("documents.jsonl", add_eos=False),
    "document": documents("documents.jsonl", layout="document"),
    "document-bos": documents("documents.jsonl", layout="document", add_bos=True, min_tokens=8),
}
RECORDS: dict[str, Tree] = {
    "where": documents("documents.jsonl", {"where": WHERE}),
    "template": documents("documents.jsonl", {"text": TEMPLATE, "where": "exists(meta.title)"}),
    "path": documents("documents.jsonl", {"text": "meta.title", "id": "id"}, layout="document"),
    "sample": documents("documents.jsonl", sample="40%"),
    "dropped": documents("documents.jsonl", duplicates="drop"),
    "held": documents("documents.jsonl", holdout="30%", duplicates="drop", sample=0.8),
    "several": documents("documents.*json*", duplicates="drop"),
}
"Policies that say which records are in a stream."
PACKED: dict[str, Tree] = {
    "document": documents("documents.jsonl", layout="document", pack=True),
    "document-bos": documents("documents.jsonl", layout="document", pack=True, add_bos=True),
    "pairs": pairs(pack=True),
    "pairs-filtered": pairs(pack=True, too_long="filter", duplicates="drop"),
    "messages": chats(pack=True),
    "messages-first": chats(pack=True, too_long="first_turns", **MERGE),
    "sharegpt": finetuning("sharegpt.jsonl", {**SHAREGPT, "tools": "tools"}, pack=True),
}
PICTURES: dict[str, Tree] = {
    "llava": pictured(),
    "llava-few": pictured(max_images=1, max_pixels=2000, decode="header"),
    "llava-long": pictured() | {"too_long": "first_turns"},
    "resized": pictured(resize={"longest": 24}),
    "reencoded": pictured(reencode={"format": "png"}),
    "qwen_vl": pictured("qwen_vl.jsonl", {"shape": "qwen_vl"}),
    "parts": pictured("parts.jsonl", "messages", root="."),
    "parquet": pictured("images.parquet"),
    "tar": pictured("images.tar", field=["png", "bmp", "jpg"]),
}

OPENAI = finetuning("openai.jsonl", TOOLS)
MARKED: dict[str, Tree] = {
    **{
        key: finetuning(f"{key}.jsonl", {"messages": "messages", "shape": "openai"})
        for key in ("loss_mask", "training", "trainable", "masked")
    },
    "masked-messages": chats("masked.jsonl"),
}
"Messages that say, each or by a list of their record, whether they are trained."
EXTENDED: dict[str, Tree] = {
    **{f"mixed.{name}": pairs(f"mixed.{name}") for name in ("parquet", "arrow")},
    **{f"mapped.{name}": finetuning(f"mapped.{name}", TOOLS) for name in ("parquet", "arrow")},
    "whole": finetuning("whole/*", TOOLS),
}
"Columns of JSON, and of maps."
ENDED = {
    "messages": chats(),
    "openai": OPENAI,
    "messages-first": chats(too_long="first_turns", **MERGE),
    "each": chats(rewritten_history="each"),
    "pairs": pairs(),
}
"Streams of a tokenizer whose template has no end of a turn."


def _of(streams: Mapping[str, Tree], *names: str) -> Tree:
    return {name: streams[name] for name in names}


SOME = {
    **_of(CONVERSATIONS, "pairs", "messages"),
    "dropped": chats(duplicates="drop", too_long="first_turns"),
    "compact": chats(columns="compact"),
}
FORGETS, DATED, OPENS = ({"template": {"style": s}} for s in ("forgets", "dated", "opens"))
TEXT, FINETUNING, OWN = ({"train_loader": {"name": n}} for n in ("text", "finetuning", "mdsmix"))
LONGER, WIDE, ZSTD = {"max_seq_len": 320}, {"tokenizer": "wide"}, {"compression": "zstd"}
RESPONSES = {"target_responses": "all"}
ALL = RESPONSES | {"target_prompts": "all", "special_tokens_in_text": "allow"}
LENGTH = {"target_prompts": "length>=12", "special_tokens_in_text": "reject"}
LENGTH |= {"compression": "zstd:3"} | DATED
REWRITTEN = {policy: chats(rewritten_history=policy) for policy in ("each", "last")}
RULED = {"pairs": pairs(), "concat": documents("documents.jsonl"), "reject": chats(), **REWRITTEN}
RULED |= {
    "each-first": chats(rewritten_history="each", too_long="first_turns"),
    "openai": finetuning("openai.jsonl", TOOLS, rewritten_history="each"),
}
DAYS: dict[str, Tree] = {
    "pairs": pairs(),
    "messages": chats(date_string="1 May 2024"),
    "messages-filtered": chats(date_string="2 May 2024", too_long="filter"),
    "concat": documents("documents.jsonl"),
}
HELD = _of(LAYOUTS, "concat", "document") | SOME
HELD |= {"pairs-held": pairs(sample="40%", holdout="20%")}
THOUGHTLESS: Tree = {"train_parts": {"reasoning": False}, "rewritten_history": "each"}
PARTS = {
    "messages": chats(**THOUGHTLESS),
    "messages-packed": chats(pack=True, **THOUGHTLESS),
    "openai": OPENAI | THOUGHTLESS,
}
LABEL = {"label": "label"}
COMPLETION = {"prompt": "prompt", "completion": "completion"}
PREFERENCES: dict[str, Tree] = {
    "messages": alone(
        "preference", {"prompt": "prompt", "chosen": "completion", "rejected": "other"}
    ),
    "texts": alone("preference", {"prompt": "question", "chosen": "said", "rejected": "question"}),
}
UNPAIRED: dict[str, Tree] = {
    "messages": alone("preference", COMPLETION | LABEL),
    "texts": alone("preference", {"prompt": "question", "completion": "said"} | LABEL),
}
PROMPTS: dict[str, Tree] = {
    "messages": alone("prompt", {"prompt": "prompt", "verified_answer": "said"}),
    "texts": alone("prompt", {"prompt": "question"}),
    "instructions": alone("prompt", {"instruction": "question", "verified_answer": "said"}),
}
PAIRWISE, LABELLED = (
    {"train_loader": {"name": name}} for name in ("pairwise_preference", "unpaired_preference")
)
ASKED = {"train_loader": {"name": "prompt", "dataset": {"max_gen_len": 60}}}
EACH = {"messages": chats(pack=True, rewritten_history="each")}
FEW = _of(PACKED, "document", "pairs", "messages-first", "sharegpt") | EACH
FRAMED = _of(LAYOUTS, "concat", "concat-bos", "document")
APART = FINETUNING | ZSTD | {"decoder_only_format": False}
RECIPES: dict[str, tuple[Tree, Tree]] = {
    "text": (TEXT | {"max_seq_len": 48}, LAYOUTS | RECORDS),
    "finetuning": (FINETUNING, FRAMED | CONVERSATIONS | LONG | FORMATS),
    "mdsmix": (OWN, HELD),
    "all": (FINETUNING | ALL | FORGETS, RULED),
    "opens": (FINETUNING | ALL | OPENS, REWRITTEN),
    "length": (OWN | RESPONSES | LENGTH, DAYS),
    "encoder": (APART, _of(SOME, "pairs", "messages", "compact")),
    "packed": (OWN | LONGER, PACKED),
    "packed-all": (OWN | ALL | LONGER | ZSTD | FORGETS, FEW),
    "images": (OWN, PICTURES),
    "images-all": (OWN | ALL, _of(PICTURES, "llava", "parts")),
    "wide": (FINETUNING | WIDE, _of(LAYOUTS, "concat", "concat-plain", "document-bos") | SOME),
    "marks": (OWN | RESPONSES, MARKED),
    "extended": (FINETUNING | RESPONSES, EXTENDED),
    "roles": (FINETUNING | RESPONSES | {"tokenizer": "roles"}, ENDED),
    "roles-packed": (
        OWN | LONGER | RESPONSES | {"tokenizer": "roles"},
        {"openai": OPENAI | {"pack": True}, "messages": chats(pack=True)},
    ),
    "parts": (OWN | RESPONSES | FORGETS, PARTS),
    "preferences": (PAIRWISE | FORGETS, PREFERENCES),
    "unpaired": (LABELLED | FORGETS, UNPAIRED),
    "prompts": (ASKED, PROMPTS),
    "named": (FINETUNING | {"tokenizer": "named"}, {"openai": OPENAI, "messages": chats()}),
    "wide-packed": (OWN | WIDE | LONGER, _of(PACKED, "document-bos", "pairs", "messages")),
}
"Name -> the settings of the recipe, and its streams. `template`: variables of the chat template."
