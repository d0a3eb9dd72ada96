"""Every check fires on the one mix that is wrong in its way, and is silent on the same mix put
right.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.findings import Finding
from mdsmix.mix.check import is_refused, list_checks, run_checks, run_one_check
from mdsmix.mix.checks import conversion
from mdsmix.mix.epoch.figures import measure_epoch
from mdsmix.mix.streams.resolve import make_stream_mix
from mdsmix.shards.manifest import MANIFEST
from mdsmix.shards.published import StreamFault
from mdsmix.tokenizer import card

# isort: off
from tests.mixes import BARE, CHAT, CHUNKS, DOCS, FAQ, INT32, MESSAGES, OF_TURNS, PACK, PACKS
from tests.mixes import PICKLES, RAW, SEES, TEXT, THEIRS, TWO, UINT16, WEB, Make, Sort, bad, batched
from tests.mixes import (
    bytes_changed,
    cached,
    converted_by,
    damaged,
    evals,
    fetched_by_nodes,
    finetuning,
)
from tests.mixes import (
    lone_eval,
    model,
    of_mix,
    own,
    placed,
    read_by,
    preferring,
    pretrained,
    read_through,
    second,
)
from tests.mixes import own_place, text, theirs, tokenized, tokenizer, totals, two_sided
from tests.mixes import ended, evaluated, with_mask

# isort: on
from tests.published import CARD, CONCAT, LENGTH, TOKENIZER, edit

A = {"a": 0}
HALTED = WEB(card={"index_hash": "0" * 32})
UNEVEN = DOCS(card={"layout": "document"})
SHORT = Sort("short", {"tokens": "ndarray:uint16:2"}, {"tokens": [5, 0]})
HALF = Sort("short", {"tokens": "ndarray:uint16:4"}, {"tokens": [5, 6, 7, 0]})
LENIENT = {"loader": {"pin_memory": None, "persistent_workers": None}}
NO_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
NUMBERED = Sort("raw", RAW.columns | {"id": "str"}, RAW.row | {"id": "1"}, THEIRS)
FIVES = Sort("web", CONCAT, {"tokens": [5] * LENGTH}, {"card": {"add_eos": False}})
LENGTH_4 = CHAT(card={"target_prompts": "length>=4"})
COMPACT = CHAT(card={"compact": True})
PROCESSOR = {"processor": "./none"}
AGAIN = placed(lambda local: {"local": local.replace("again", "web"), "split": "train"}, "again")
CACHED = placed(lambda local: {"remote": local, "local": "/none", "split": "train"})
BY_URL = placed(lambda local: {"remote": f"file://{local}", "local": "/none", "split": "train"})
UNCACHED = placed(lambda local: {"remote": local, "split": "train"})
WITHOUT_SPLIT = placed(lambda local: {"local": local})
CHATML = replace(
    TOKENIZER, special_tokens=["<|im_end|>"], special_ids=[9], added_tokens={"<|im_end|>": 9}
)
OTHER_TEMPLATE = MESSAGES | {"tokenizer": replace(CARD, chat_template_hash="c")}
ONCE = StreamFault(rule="shard-contents", file="a.mds", problem="its xxh128 is 1")
CUTS = {"cut_rows": 3, "cut_tokens": 16, "tokens": 160, "longest": LENGTH + 9}
CUT = CHAT(card=OF_TURNS | MESSAGES | {"totals": CUTS})
MPT = model("mpt_causal_lm")
MASKED = {"attn_config": {"attn_uses_sequence_id": True}, "max_seq_len": LENGTH}
OTHER_COLUMNS = {"column_encodings": ["ndarray:int32"], "column_sizes": [None]}
LONG, FULL = (totals(CHAT, longest=LENGTH + more) for more in (1, 0))
SIDE = {"name": f"{'0' * 32}.ids.side", "bytes": 3, "hash": "0" * 32, "kind": "ids", "shard": ""}
SIDED = replace(WEB, change=lambda at: edit(at / MANIFEST, lambda t: t | {"side_files": [SIDE]}))
REPEATED, PART = WEB | {"repeat": 1}, WEB | {"proportion": 1}
INT32_PAIR = dict.fromkeys(("input_ids", "labels"), "ndarray:int32")
FAR_OFFSET = bytes_changed(BARE, lambda data: data[:4] + b"\xff\xff\xff\x7f" + data[8:])
ONE_GONE = replace(TWO, change=lambda at: (at / "shard.00001.mds").unlink())
ELSEWHERE = WEB | {"remote": "gs://bucket/mix"}
LONGER = text(bytes_changed(WEB, lambda data: data + b"x"))
MASKED_LABELS = Sort("hf", INT32_PAIR, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, THEIRS)
OTHER_ANSWER = replace(MASKED_LABELS, row={"input_ids": [5, 6, 7], "labels": [5, 6, 8]})
BATCH_OF_8: dict[str, Any] = {"top": {"global_train_batch_size": 8}}
MANY = CACHED(n=40, shards=40)
"Shards of 218 bytes, and an index of 13,666."
ALL_OF_MANY, MANY_26 = 13_666 + 40 * 218, 13_666 + 26 * 218
TWO_OF_2 = {"global_train_batch_size": 4, "device_train_batch_size": 2}
CASES: dict[str, tuple[Make, Make]] = {
    "columns-loader": (finetuning(WEB, CHAT), finetuning(CHUNKS, CHAT)),
    "columns-text-and-tokens": (text(WEB, TEXT(card={})), text(WEB, WEB("raw"))),
    "columns-unlike": (preferring(True, False), preferring(True, True)),
    "columns-exact": (finetuning(NUMBERED), finetuning(RAW)),
    "columns-encoding": (text(Sort("raw", {"text": "bytes"}, {"text": b"a"}, THEIRS)), text(TEXT)),
    "columns-shards": (second(lambda shards: shards[1].update(OTHER_COLUMNS)), text(TWO)),
    "columns-unsafe": (text(PICKLES), text(PICKLES, allow_unsafe_types=True)),
    "columns-raw-and-tokenized": (finetuning(RAW, CHAT), finetuning(RAW)),
    "images-loader": (finetuning(SEES), own(SEES)),
    "images-processor": (own(SEES), own(SEES, **PROCESSOR)),
    "images-unplanned": (own(SEES, **PROCESSOR), own(WEB, **PROCESSOR)),
    "tokens-dtype": (text(INT32), text(INT32, token_encoding_type="int32")),
    "labels-repeated": (finetuning(MASKED_LABELS), finetuning(OTHER_ANSWER)),
    "id-vocabulary": (text(totals(WEB, largest_id=512)), text(totals(WEB, largest_id=511))),
    "rows-too-long": (text(max_seq_len=LENGTH - 1), text()),
    "rows-cut": (finetuning(LONG), finetuning(FULL)),
    "sides-unseen": (two_sided(2 * LENGTH, LENGTH + 1), two_sided(2 * LENGTH, LENGTH)),
    "rows-short": (text(max_seq_len=2 * LENGTH), text()),
    "rows-uneven": (text(UNEVEN), text(DOCS)),
    "pad-missing": (tokenized(text(UNEVEN), pad_id=None), tokenized(text(), pad_id=None)),
    "separator-absent": (text(FIVES, eos_token_id=0), text(BARE, eos_token_id=0)),
    "sample-unusable": (theirs((2, 2), (2, 0)), theirs((2, 2), (2, 1))),
    "tokenizer-differs": (text(WEB(card={"tokenizer": replace(CARD, hash="b" * 32)})), text()),
    "template-differs": (finetuning(CHAT(card=OTHER_TEMPLATE)), finetuning(CHAT(card=MESSAGES))),
    "tokenizer-unknown": (text(BARE), text()),
    "tokenizer-unseen": (of_mix(text(), tokenizer_problem="not here"), text()),
    "tokenizer-lone-file": (text(**tokenizer("none/tokenizer.json")), text(**tokenizer(""))),
    "tokenizer-class": (read_by(class_changes="its class gives other ids"), read_by()),
    "tokenizer-read": (read_by(read_as="saved by transformers 5"), read_by()),
    "tokenizer-unpublished": (fetched_by_nodes(".tokenizer.old"), fetched_by_nodes(".tokenizer")),
    "answer-end-untrained": (ended(TOKENIZER), ended(TOKENIZER, target_responses="last")),
    "answer-end-unknown": (ended(CHATML), ended(replace(CHATML, stop_ids=[9]))),
    "mask-missing": (with_mask(None), with_mask("<mask>")),
    "eos-missing": (tokenized(text(), eos_id=None), text()),
    "pad-eos-text": (tokenized(text(), pad_id=0), text()),
    "pad-eos-finetuning": (tokenized(finetuning(CHUNKS), pad_id=0), finetuning(CHUNKS)),
    "pad-eos-preference": (tokenized(preferring(True), pad_id=None), preferring(True)),
    "separator-differs": (text(eos_token_id=5), text(eos_token_id=0)),
    "format-differs": (finetuning(CHAT(card={"decoder_only_format": False})), finetuning()),
    "format-pretraining": (finetuning(CHUNKS, decoder_only_format=False), finetuning(CHUNKS)),
    "targets-narrower": (finetuning(LENGTH_4), finetuning(LENGTH_4, target_prompts="length>=4")),
    "targets-wider": (finetuning(target_responses="all"), finetuning()),
    "targets-packed": (own(PACKS, target_responses="all"), own(PACKS)),
    "targets-compact": (finetuning(COMPACT, target_prompts="all"), finetuning(COMPACT)),
    "recipe-changed": (converted_by(add_eos=False), converted_by()),
    "sources-changed": (converted_by(b"{}"), converted_by()),
    "recipe-unseen": (converted_by(None), converted_by()),
    "rows-outdated": (text(WEB(card={"rules": {"kind.pretraining": 99}})), text()),
    "documents-unseparated": (finetuning(CHUNKS), finetuning(FAQ(card={"layout": "document"}))),
    "documents-unmarked": (own(WEB, CHAT), own(WEB, CHAT, eos_token_id=0)),
    "documents-unmasked": (own(PACKS, **MPT), own(PACKS, **model("mpt_causal_lm", **MASKED))),
    "weights-zero": (text(WEB | {"repeat": 0.02}, DOCS), text(WEB | {"repeat": 0.03}, DOCS)),
    "weights-off": (text(WEB | {"choose": 0}, DOCS), text(WEB | {"choose": 1}, DOCS)),
    "weights-repeated": (text(WEB | {"repeat": 4.1}), text(WEB | {"repeat": 4})),
    "weights-tokens": (text(WEB, SHORT), text(WEB, HALF)),
    "shuffle-off": (text(WEB, DOCS, shuffle=False), text(shuffle=False)),
    "epoch-too-small": (batched("random", 41, 40), batched("random", 40, 40)),
    "canonical-nodes": (finetuning(num_canonical_nodes=41), finetuning(num_canonical_nodes=40)),
    "batching-infeasible": (batched("per_stream", 8, 40, 7), batched("per_stream", 8, 40, 8)),
    "batching-drops": (batched("per_stream", 8, 41), batched("per_stream", 8, 40)),
    "batching-unknown": (batched("stratified", 0, 30, 10), batched("random", 0, 30, 10)),
    "remote-cut": (text(WEB | {"remote": "gs://bucket/c#/mix"}), text()),
    "remote-unseen": (text(ELSEWHERE, DOCS), text(WEB, DOCS)),
    "shard-damaged": (text(FAR_OFFSET), text(BARE)),
    "validate-hash": (text(validate_hash="sha1"), text(validate_hash="xxh128")),
    "index-stale": (cached(b'{"version": 2, "shards": []}'), cached(None)),
    "cache-limit-small": (text(cache_limit=4 * 998 - 1), text(cache_limit=4 * 998)),
    "cache-limit-tight": (
        text(MANY, cache_limit=ALL_OF_MANY - 1, predownload=1, **BATCH_OF_8),
        text(MANY, cache_limit=ALL_OF_MANY, predownload=1, **BATCH_OF_8),
    ),
    "shard-missing": (text(ONE_GONE), text(TWO)),
    "shard-size": (LONGER, text()),
    "shard-contents": (damaged(b"!"), damaged(b"")),
    "shard-basenames": (second(lambda s: s[1].update(raw_data=s[0]["raw_data"])), text(TWO)),
    "publication-interrupted": (text(HALTED), text()),
    "manifest-contradicts": (text(totals(WEB, samples=41)), text()),
    "side-files": (text(SIDED), text()),
    "quarantine": (read_through(bad(2)), read_through(bad(0))),
    "damage-in-transit": (read_through(text(BARE), ONCE), read_through(text(BARE))),
    "records-bad": (bad(2), bad(1)),
    "records-duplicate": (bad(0, duplicates=2), bad(0, duplicates=1)),
    "index-empty": (text(WEB(n=0), DOCS), text(WEB(n=1), DOCS)),
    "shard-format": (second(lambda shards: shards[1].update(format="jsonl")), text(TWO)),
    "length-model": (text(**model(max_seq_len=LENGTH - 1)), text(**model(max_seq_len=LENGTH))),
    "length-differs": (text(**model(max_seq_len=LENGTH + 1)), text(**model(max_seq_len=LENGTH))),
    "model-encoder": (text(**model("hf_t5")), text(**MPT)),
    "model-tokenizer": (
        pretrained({"a": 0, "b": 1}, {"b": 0, "a": 1}),
        pretrained({"a": 0, "<r>": 101}, {"a": 0, "c": 1, "<|im_start|>": 101}),
    ),
    "model-tokenizer-unseen": (pretrained(A, {"b": 0}, is_seen=False), pretrained(A, A)),
    "evaluation-varies": (evaluated(repeat=0.5), evaluated(repeat=2)),
    "eval-label": (evals("held", ""), evals("held", "other")),
    "loader-unknown": (text(loader={"name": "denoising"}), text()),
    "key-dropped": (text(packing_ratio=2), text(predownload=2)),
    "key-rejected": (finetuning(eos_token_id=0), finetuning(pad_to_longest=True)),
    "key-missing": (text(loader={"drop_last": ...}), finetuning(loader={"drop_last": ...})),
    "streams-and-remote": (text(remote="s3://bucket/web"), text()),
    "remote-alone": (finetuning(CHUNKS, streams=...), text(streams=...)),
    "streams-none": (text(streams={}), text(streams=...)),
    "split-inherited": (text(WITHOUT_SPLIT, split="train"), text(split="train")),
    "local-duplicate": (text(WEB, AGAIN), text(WEB, WEB("again"))),
    "remote-file": (text(BY_URL), text(CACHED)),
    "local-unset": (text(UNCACHED), text()),
    "cache-limit-local": (text(cache_limit="1gb"), text(CACHED, cache_limit="1gb")),
    "length-invalid": (text(max_seq_len=...), text()),
    "length-odd": (preferring(True, max_seq_len=LENGTH - 1), preferring(True)),
    "setting-null": (text(shuffle_seed=None), own(WEB, shuffle_seed=None)),
    "split-nested": (own_place("web/train"), own_place("train")),
    "weights-none": (
        text(WEB | {"repeat": 0}, DOCS | {"choose": 0}),
        text(WEB | {"repeat": 0}, DOCS),
    ),
    "setting-value": (text(shuffle_algo="py3"), text(shuffle_algo="py1s")),
    "workers": (text(loader={"num_workers": 0}), text(loader=NO_WORKERS)),
    "targets-invalid": (finetuning(target_prompts="some"), finetuning(target_prompts="all")),
    "packing-invalid": (finetuning(max_leftover_bins_to_keep=2), finetuning(packing_ratio="auto")),
    "resume-devices": (
        text(WEB, DOCS, batching_method="per_stream", **BATCH_OF_8),
        own(WEB, DOCS, batching_method="per_stream", **BATCH_OF_8),
    ),
    "packing-high": (finetuning(packing_ratio=5), finetuning(packing_ratio=2)),
    "unsafe-types": (own(WEB, allow_unsafe_types=True), text(allow_unsafe_types=True)),
    "changed-accepted": (own(WEB, loader={"accept_changed": True}), own(WEB)),
    "separators-both": (text(eos_token_id=0, bos_token_id=0), text(bos_token_id=0)),
    "weights-scheme": (text(WEB | {"proportion": 0.5}, DOCS), text(WEB | {"repeat": 0.5}, DOCS)),
    "weights-number": (text(WEB | {"repeat": "0.5"}), text(WEB | {"repeat": 0.5})),
    "weights-epoch-size": (text(REPEATED, epoch_size=10), text(PART, epoch_size="1k")),
}
NAMED = "set train_loader.name: {}, which reads all of these streams, or convert the stream again for this loader with --reencode"
AS_INT16 = "the bytes of old are uint16, and train_loader reads all bytes columns as int16."
OWN_LOADER: dict[str, Any] = {"eos_token_id": 0}
PADDED = tokenized(own(WEB, CHUNKS("split"), **OWN_LOADER), pad_id=0)
SIDES = {"decoder_only_format": False}
MORE: list[tuple[Make, str, str]] = [
    # One sample ahead, one behind and the one that is read, and 5 batches of 1 on either side: 13
    # for each of 2 workers.
    (
        text(MANY, cache_limit=MANY_26 - 1, predownload=1),
        "cache-limit-small",
        f"need at least {MANY_26:,}: 26 samples in up to 26 shards",
    ),
    (text(MANY, cache_limit=MANY_26, predownload=1), "", ""),
    # 23 samples for each worker of two devices with batches of 2.
    (
        text(MANY, cache_limit=ALL_OF_MANY - 1, predownload=1, top=TWO_OF_2),
        "cache-limit-small",
        f"on a node of 2 devices: cache_limit is {ALL_OF_MANY - 1} ({ALL_OF_MANY - 1:,} bytes), and the shards that the workers of a node read and "
        f"prepare ahead need {ALL_OF_MANY:,}: 92 samples in up to 40",
    ),
    (text(MANY, cache_limit=ALL_OF_MANY, predownload=1, top=TWO_OF_2), "", ""),
    (text(CHUNKS("split")), "columns-loader", NAMED.format("finetuning")),
    (finetuning(WEB), "columns-loader", NAMED.format("text")),
    (own(WEB, RAW), "columns-loader documents-unmarked", "for this stream in a run of its own"),
    (text(PACKS), "columns-loader", NAMED.format("mdsmix")),
    (bad(6), "records-bad", "6 of 100 records of web (6.0%) were bad"),
    (text(UINT16, token_encoding_type="int16"), "tokenizer-unknown tokens-dtype", AS_INT16),
    (text(shuffle_seed=1.0), "setting-value", "shuffle_seed is 1.0. "),
    (text(shuffle_block_size=1e5, **LENIENT), "", ""),
    (finetuning(hf_kwargs=None, **LENIENT), "", ""),
    (text(loader=NO_WORKERS | {"timeout": 5}), "workers", "is 0 and timeout is 5."),
    (text(loader={"num_canonical_nodes": 8}), "key-rejected", "move it to dataset, where"),
    (lone_eval(label="x"), "key-rejected", "or write eval_loader as a list of one."),
    (text(num_canonical_nodes=41), "canonical-nodes", "num_canonical_nodes: 41"),
    (text(num_canonical_nodes=41, shuffle_algo="py1s"), "", ""),
    (
        finetuning(packing_ratio=2.0, top={"global_train_batch_size": 21}),
        "epoch-too-small",
        "is 21 and packing_ratio 2.0 with drop_last: true",
    ),
    (evaluated(repeat=0.5, sampling_method="fixed"), "", ""),
    (finetuning(packing_ratio=0.5), "setting-value", "train_loader: packing_ratio is 0.5. "),
    (finetuning(packing_ratio="many"), "setting-value", "packing_ratio is 'many'. "),
    (text(cache_limit="much"), "cache-limit-local setting-value", "cache_limit is 'much'. "),
    (text(shuffle_seed=-1), "setting-value", "shuffle_seed is -1. "),
    (
        batched("stratified", 10, 100, 9),
        "batching-drops resume-devices",
        "90 of the epoch's 109 samples in batches of 10",
    ),
    (text(ELSEWHERE, DOCS, num_canonical_nodes=99), "remote-unseen", "gs://bucket/mix, which"),
    # Streaming draws nothing of a stream of weight 0, and under these methods it then fails.
    (
        text(WEB | {"repeat": 0}, DOCS, batching_method="per_stream", **BATCH_OF_8),
        "batching-infeasible resume-devices weights-off",
        "draws too few samples of web for their share",
    ),
    (text(WEB | {"repeat": 0}, DOCS | {"choose": 0}), "weights-none weights-off", "no sample"),
    (evals("held", "held"), "eval-label", "entry 1 of eval_loader has the label held."),
    (LONGER, "shard-size", "shard.00000.mds of web: expected 998 bytes, found 999."),
    (text(UNCACHED, UNCACHED("b"), WEB("c")), "local-unset", "[web, b]: web, b: no local"),
    (text(WEB, HALF), "rows-short rows-uneven", "[web, short]"),
    (finetuning(CUT), "rows-cut", "3 of 40 samples of chat are cut, by 16 of 160 tokens (10.0%"),
    (finetuning(CUT, max_seq_len=LENGTH + 1), "length-differs rows-cut", "sample of chat has 17"),
    # Packed and unpacked streams beside each other, as the loaders read them.
    (
        own(WEB, CHUNKS("split"), CHAT, **OWN_LOADER, packing_ratio=2),
        "documents-unseparated packing-high",
        "",
    ),
    (own(PACKS, **model("hf_causal_lm", pretrained=False)), "documents-unmasked", ""),
    (own(PACKS, WEB, FAQ), "documents-unmarked documents-unseparated", ""),
    (finetuning(CHAT(card=SIDES), **SIDES, **model("hf_t5")), "", ""),
    (own(WEB, CHAT, mlm_probability=0.1, **OWN_LOADER), "key-rejected", ""),
    (text(loader={"accept_changed": True}), "key-rejected", ""),
    (text(loader=NO_WORKERS | {"prefetch_factor": 0}), "workers", ""),
    (text(loader=NO_WORKERS | {"persistent_workers": True}), "workers", ""),
    (own(WEB, CHAT, loader={"accept_changed": "yes"}, **OWN_LOADER), "setting-value", ""),
    (own(WEB, CHAT, eos_token_id=5), "separator-differs", ""),
    (own(WEB, CHAT, **OWN_LOADER, loader={"num_workers": 0}), "", ""),
    (text(totals(HALTED, largest_id=9999)), "publication-interrupted", ""),
    # Long turns are refused only where no target is left; a context and a target have a row each,
    # so that no sum is too long.
    (theirs((2, LENGTH)), "rows-cut tokenizer-unknown", ""),
    (theirs((LENGTH, LENGTH)), "rows-cut sample-unusable tokenizer-unknown", ""),
    (theirs((LENGTH, LENGTH), **SIDES), "sides-unseen tokenizer-unknown", ""),
    (two_sided(2 * LENGTH, 2 * LENGTH - 1), "sides-unseen", ""),
    (two_sided(LENGTH, 2 * LENGTH - 1, cut_rows=1), "rows-cut", ""),
    (two_sided(LENGTH - 1, 2 * LENGTH - 1), "", ""),
    (two_sided(LENGTH - 1, 2 * LENGTH - 1, cut_rows=1), "sides-unseen", ""),
    # A padding token that is EOS is told of plain rows alone, and weights that are not loaded want
    # no tokenizer.
    (PADDED, "documents-unseparated pad-eos-finetuning pad-eos-text", "pad-eos-text [web]"),
    (PADDED, "documents-unseparated pad-eos-finetuning pad-eos-text", "pad-eos-finetuning [split]"),
    (pretrained(A, {"b": 0}, pretrained=False), "", ""),
    (pretrained(A, {"b": 0}, name="mpt_causal_lm"), "", ""),
    (tokenized(preferring(True), vocab_size=5), "id-vocabulary", ""),
    (finetuning(MASKED_LABELS), "id-vocabulary labels-repeated tokenizer-unknown", "id -100, and"),
    (tokenized(preferring(True), vocab_size=6), "", ""),
]
"A mix, all that is found of it, and words of that."


def ids(found: list[Finding], severity: str = "") -> set[str]:
    return {each.id for each in found if each.severity.startswith(severity)}


def told(make: Make, home: Path, id: str) -> list[Finding]:
    """What that check says."""
    return run_one_check(make(home), id)


@pytest.fixture(autouse=True)
def _nothing_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer or a processor that is not here is told without a process that looks for it."""
    for module, look in ((card, "open_tokenizer"), (conversion, "open_processor")):
        monkeypatch.setattr(module, look, Mock(side_effect=RecipeError("not here")))


def test_each_check_fires_on_what_is_wrong_and_on_nothing_else(tmp_path: Path) -> None:
    assert CASES.keys() == {check.id for check in list_checks()}, "every check has a case"
    for id, (wrong, right) in CASES.items():
        found = told(wrong, tmp_path / id / "wrong", id)
        assert found, f"{id} did not fire"
        for sentence in (part for f in found for part in (f.message, f.why, f.fix)):
            assert re.fullmatch(r".+[^.,;:]\.", sentence), id
            assert not re.search(r"[.,;:][.,;]|  |\{(loader|streams)\}", sentence), id
        assert not told(right, tmp_path / id / "right", id), id


def test_a_fresh_process_knows_all_checks() -> None:
    """They are registered when their package is imported, which other tests do."""
    program = "from mdsmix.mix.check import list_checks; print(len(list_checks()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) == len(CASES)


def test_all_is_found_and_said_with_its_numbers(tmp_path: Path) -> None:
    for number, (make, expected, words) in enumerate(MORE):
        found = run_checks(make(tmp_path / str(number)))
        assert ids(found) == set(expected.split()), number
        assert words in "\n".join(map(str, found)), number


def test_images_fit_processor_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {"token": "<i>", "id": 5, "processor": "a" * 32}
    for number, (given, length, said) in enumerate(
        (("b", 1, ["processor"]), ("a", 2, ["processor"]), ("a", 1, []), ("", 1, ["unplanned"]))
    ):
        found = SimpleNamespace(hash=given * 32, folder=None) if given else None
        monkeypatch.setattr(conversion, "find_processor", lambda *_, found=found: found)
        see = SEES(card=OF_TURNS | MESSAGES | {"images": images, "max_seq_len": length * LENGTH})
        told = ids(run_checks(own(see, processor="p")(tmp_path / str(number))))
        assert [id[7:] for id in told if id.startswith("images-")] == said, number


def test_packed_streams_alone_are_looked_at_as_their_loader_reads_them(tmp_path: Path) -> None:
    folders = [sort.at(tmp_path)["local"] for sort in (PACKS, WEB)]
    assert not ids(run_checks(make_stream_mix(folders)), "error")
    other = PACKS("other", card=PACK | {"target_responses": "all"}).at(tmp_path)["local"]
    assert ids(run_checks(make_stream_mix([*folders, other])), "error") == {"targets-packed"}


def test_streams_of_other_tools_are_read_from_index_and_first_samples(tmp_path: Path) -> None:
    in_bytes = replace(INT32, name="b", row={"tokens": (9).to_bytes(8, "little") * LENGTH})
    for sort in (DOCS("a", card=None), in_bytes, TEXT):
        assert not is_refused(run_checks(text(sort)(tmp_path)))
    beyond = replace(in_bytes, row={"tokens": CARD.vocab_size.to_bytes(8, "little") * LENGTH})
    assert told(text(beyond), tmp_path, "tokens-dtype")
    long = replace(DOCS, row={"tokens": list(range(5, 5 + LENGTH + 1))}, how=THEIRS)
    assert told(text(long(compression="zstd:3")), tmp_path, "rows-too-long")


def test_what_the_loader_cuts_is_no_token_of_the_epoch(tmp_path: Path) -> None:
    assert measure_epoch(finetuning(CUT)(tmp_path).train)[0].tokens == 144
    assert not told(text(CUT), tmp_path, "rows-cut"), "that loader reads none of it"
