"""Each check reports a mix that is wrong in one way, and not the same mix without the fault."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.findings import Finder, Finding, Findings
from mdsmix.mix import check as check_module
from mdsmix.mix.check import is_refused, list_checks, run_checks, run_one_check
from mdsmix.mix.checks import conversion
from mdsmix.mix.epoch.figures import measure_epoch
from mdsmix.mix.streams.resolve import make_stream_mix
from mdsmix.shards.manifest import MANIFEST
from mdsmix.shards.published import StreamFault
from mdsmix.tokenizer import card
from tests.mixes import (
    CHAT,
    CHUNKS,
    DOCS,
    FAQ,
    IMAGE_TURNS,
    INT32,
    MESSAGES_CARD,
    NO_MANIFEST,
    PACKED_CARD,
    PACKS,
    PICKLES,
    RAW,
    TEXT,
    TURNS_CARD,
    TWO_SHARDS,
    UINT16,
    WEB,
    WEB_BARE,
    BuildMix,
    PublishedStream,
    batching_mix,
    cached_index,
    changed_index,
    chats_ended_by,
    damaged_shard,
    deep_checked,
    encoder_decoder,
    evaluation_drawing,
    evaluation_of,
    evaluations,
    finetuning_loader,
    foundry_turns,
    labelled_streams,
    lone_evaluation,
    lone_local_stream,
    mdsmix_loader,
    mix_by_shares,
    model_keys,
    preference_streams,
    pretrained_model,
    prompt_streams,
    recipe_mix,
    records_mix,
    text_loader,
    tokenizer_for_nodes,
    tokenizer_keys,
    with_fields,
    with_local_section,
    with_mask_token,
    with_remote,
    with_shard_bytes,
    with_tokenizer_card,
    with_tokenizer_notes,
    with_totals,
    without_hashes,
)
from tests.published import CARD, CONCAT, LENGTH, TOKENIZER, edit

ONE_TOKEN = {"a": 0}
EIGHTS = {"tokens": [8] * LENGTH}
NINES = replace(WEB("nines"), row={"tokens": [9] * LENGTH})
STREAMS_CALLBACK: Any = {"top": {"callbacks": {"mdsmix_streams": {}}}}
INTERRUPTED = WEB(card={"index_hash": "0" * 32})
UNEVEN = DOCS(card={"layout": "document"})
SHORT_ROWS = PublishedStream("short", {"tokens": "ndarray:uint16:2"}, {"tokens": [5, 0]})
HALF_ROWS = PublishedStream("short", {"tokens": "ndarray:uint16:4"}, {"tokens": [5, 6, 7, 0]})
NULL_SETTINGS = {"loader": {"pin_memory": None, "persistent_workers": None}}
NO_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
RAW_WITH_ID = PublishedStream(
    "raw", RAW.columns | {"id": "str"}, RAW.row | {"id": "1"}, NO_MANIFEST
)
WITHOUT_EOS = PublishedStream("web", CONCAT, {"tokens": [5] * LENGTH}, {"card": {"add_eos": False}})
LENGTH_4 = CHAT(card={"target_prompts": "length>=4"})
COMPACT = CHAT(card={"compact": True})
PARTS = {"reasoning": False, "calls": True, "answer": True}
NO_REASONING = CHAT(card=MESSAGES_CARD | {"train_parts": PARTS})
PROCESSOR = {"processor": "./none"}
SAME_FOLDER = with_local_section(
    lambda local: {"local": local.replace("again", "web"), "split": "train"}, "again"
)
CACHED = with_local_section(lambda local: {"remote": local, "local": "/none", "split": "train"})
FILE_URL = with_local_section(
    lambda local: {"remote": f"file://{local}", "local": "/none", "split": "train"}
)
UNCACHED = with_local_section(lambda local: {"remote": local, "split": "train"})
WITHOUT_SPLIT = with_local_section(lambda local: {"local": local})
CHATML = replace(
    TOKENIZER, special_tokens=["<|im_end|>"], special_ids=[9], added_tokens={"<|im_end|>": 9}
)
OTHER_TEMPLATE = MESSAGES_CARD | {"tokenizer": replace(CARD, chat_template_hash="c")}
FAULT_IN_TRANSIT = StreamFault(rule="shard-contents", file="a.mds", problem="its xxh128 is 1")
CUT_TOTALS = {"cut_rows": 3, "cut_tokens": 16, "tokens": 160, "longest": LENGTH + 9}
CUT_CHATS = CHAT(card=TURNS_CARD | MESSAGES_CARD | {"totals": CUT_TOTALS})
WEIGHTED = PublishedStream(
    "chat",
    CHAT.columns | {"loss_weights": "ndarray:float32"},
    CHAT.row | {"loss_weights": np.ones(4, np.float32)},
    {"card": TURNS_CARD},
)
MPT = model_keys("mpt_causal_lm")
MASKED = {"attn_config": {"attn_uses_sequence_id": True}, "max_seq_len": LENGTH}
OTHER_COLUMNS = {"column_encodings": ["ndarray:int32"], "column_sizes": [None]}
LONGER_CHATS = with_totals(CHAT, longest=LENGTH + 1)
FULL_CHATS = with_totals(CHAT, longest=LENGTH)
SIDE_FILE = {
    "name": f"{'0' * 32}.ids.side",
    "bytes": 3,
    "hash": "0" * 32,
    "kind": "ids",
    "shard": "",
}
WITHOUT_SIDE_FILE = replace(
    WEB,
    change=lambda folder: edit(folder / MANIFEST, lambda tree: tree | {"side_files": [SIDE_FILE]}),
)
BY_REPEAT = WEB | {"repeat": 1}
BY_PROPORTION = WEB | {"proportion": 1}
INT32_PAIR = dict.fromkeys(("input_ids", "labels"), "ndarray:int32")
FAR_OFFSET = with_shard_bytes(WEB_BARE, lambda data: data[:4] + b"\xff\xff\xff\x7f" + data[8:])
SHARD_GONE = replace(TWO_SHARDS, change=lambda folder: (folder / "shard.00001.mds").unlink())
ON_ORACLE = WEB | {"remote": "oci://bucket/mix"}
LONGER_SHARD = text_loader(with_shard_bytes(WEB, lambda data: data + b"x"))
MASKED_LABELS = PublishedStream(
    "hf", INT32_PAIR, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, NO_MANIFEST
)
UNMASKED_LABELS = replace(MASKED_LABELS, row={"input_ids": [5, 6, 7], "labels": [5, 6, 8]})
BATCH_OF_8: dict[str, Any] = {"top": {"global_train_batch_size": 8}}
MANY_SHARDS = CACHED(n=40, shards=40)
"40 shards of 218 bytes, and an index of 13,666 bytes."
ALL_OF_MANY_BYTES = 13_666 + 40 * 218
BYTES_OF_26 = 13_666 + 26 * 218
TWO_OF_2 = {"global_train_batch_size": 4, "device_train_batch_size": 2}
CASES: dict[str, tuple[BuildMix, BuildMix]] = {
    # Id of a check -> a mix that it reports, and one that it does not.
    "columns-loader": (finetuning_loader(WEB, CHAT), finetuning_loader(CHUNKS, CHAT)),
    "columns-text-and-tokens": (text_loader(WEB, TEXT(card={})), text_loader(WEB, WEB("raw"))),
    "columns-unlike": (preference_streams(True, False), preference_streams(True, True)),
    "columns-exact": (finetuning_loader(RAW_WITH_ID), finetuning_loader(RAW)),
    "columns-encoding": (
        text_loader(PublishedStream("raw", {"text": "bytes"}, {"text": b"a"}, NO_MANIFEST)),
        text_loader(TEXT),
    ),
    "columns-shards": (
        changed_index(lambda shards: shards[1].update(OTHER_COLUMNS)),
        text_loader(TWO_SHARDS),
    ),
    "columns-unsafe": (text_loader(PICKLES), text_loader(PICKLES, allow_unsafe_types=True)),
    "columns-raw-and-tokenized": (finetuning_loader(RAW, CHAT), finetuning_loader(RAW)),
    "images-loader": (finetuning_loader(IMAGE_TURNS), mdsmix_loader(IMAGE_TURNS)),
    "images-processor": (mdsmix_loader(IMAGE_TURNS), mdsmix_loader(IMAGE_TURNS, **PROCESSOR)),
    "images-unplanned": (mdsmix_loader(IMAGE_TURNS, **PROCESSOR), mdsmix_loader(WEB, **PROCESSOR)),
    "weights-loader": (finetuning_loader(WEIGHTED), mdsmix_loader(WEIGHTED)),
    "weights-unused": (mdsmix_loader(WEIGHTED, **MPT), mdsmix_loader(CHAT, **MPT)),
    "tokens-dtype": (text_loader(INT32), text_loader(INT32, token_encoding_type="int32")),
    "labels-repeated": (finetuning_loader(MASKED_LABELS), finetuning_loader(UNMASKED_LABELS)),
    "id-vocabulary": (
        text_loader(with_totals(WEB, largest_id=512)),
        text_loader(with_totals(WEB, largest_id=511)),
    ),
    "labels-alike": (
        labelled_streams({"true": 3, "false": 0}, {"true": 1, "false": 0}),
        labelled_streams({"true": 3, "false": 0}, {"true": 0, "false": 2}),
    ),
    "max-gen-len-differs": (
        prompt_streams(top={"callbacks": {"on_policy_rl": {}}}),
        prompt_streams(top={"variables": {"max_gen_len": LENGTH - 5}}),
    ),
    "prompt-cut": (prompt_streams(tokens=6), prompt_streams(tokens=5)),
    "rows-too-long": (text_loader(max_seq_len=LENGTH - 1), text_loader()),
    "rows-cut": (finetuning_loader(LONGER_CHATS), finetuning_loader(FULL_CHATS)),
    "sides-unseen": (encoder_decoder(2 * LENGTH, LENGTH + 1), encoder_decoder(2 * LENGTH, LENGTH)),
    "rows-uncut": (
        foundry_turns((LENGTH, LENGTH), decoder_only_format=False, pad_to_longest=True),
        foundry_turns((LENGTH, LENGTH), decoder_only_format=False, allow_pad_trimming=True),
    ),
    "rows-short": (text_loader(max_seq_len=2 * LENGTH), text_loader()),
    "rows-uneven": (text_loader(UNEVEN), text_loader(DOCS)),
    "pad-missing": (
        with_tokenizer_card(text_loader(UNEVEN), pad_id=None),
        with_tokenizer_card(text_loader(), pad_id=None),
    ),
    "separator-absent": (
        text_loader(WITHOUT_EOS, eos_token_id=0),
        text_loader(WEB_BARE, eos_token_id=0),
    ),
    "sample-unusable": (foundry_turns((2, 2), (2, 0)), foundry_turns((2, 2), (2, 1))),
    "tokenizer-differs": (
        text_loader(WEB(card={"tokenizer": replace(CARD, hash="b" * 32)})),
        text_loader(),
    ),
    "template-differs": (
        finetuning_loader(CHAT(card=OTHER_TEMPLATE)),
        finetuning_loader(CHAT(card=MESSAGES_CARD)),
    ),
    "tokenizer-unknown": (text_loader(WEB_BARE), text_loader()),
    "tokenizer-unseen": (with_fields(text_loader(), tokenizer_problem="not here"), text_loader()),
    "tokenizer-lone-file": (
        text_loader(**tokenizer_keys("none/tokenizer.json")),
        text_loader(**tokenizer_keys("")),
    ),
    "tokenizer-class": (
        with_tokenizer_notes(class_changes="its class gives other ids"),
        with_tokenizer_notes(),
    ),
    "tokenizer-read": (
        with_tokenizer_notes(read_as="saved by transformers 5"),
        with_tokenizer_notes(),
    ),
    "tokenizer-bos": (with_tokenizer_notes(is_bos_ignored=True), with_tokenizer_notes()),
    "tokenizer-unpublished": (
        tokenizer_for_nodes(".tokenizer.old"),
        tokenizer_for_nodes(".tokenizer"),
    ),
    "answer-end-untrained": (
        chats_ended_by(TOKENIZER),
        chats_ended_by(TOKENIZER, target_responses="last"),
    ),
    "answer-end-unknown": (chats_ended_by(CHATML), chats_ended_by(replace(CHATML, stop_ids=[9]))),
    "mask-missing": (with_mask_token(None), with_mask_token("<mask>")),
    "eos-missing": (with_tokenizer_card(text_loader(), eos_id=None), text_loader()),
    "pad-eos-text": (with_tokenizer_card(text_loader(), pad_id=0), text_loader()),
    "pad-eos-finetuning": (
        with_tokenizer_card(finetuning_loader(CHUNKS), pad_id=0),
        finetuning_loader(CHUNKS),
    ),
    "pad-eos-preference": (
        with_tokenizer_card(preference_streams(True), pad_id=None),
        preference_streams(True),
    ),
    "pad-eos-prompt": (with_tokenizer_card(prompt_streams(), pad_id=None), prompt_streams()),
    "padding-right": (prompt_streams(padding_side="right"), prompt_streams()),
    "separator-differs": (text_loader(eos_token_id=5), text_loader(eos_token_id=0)),
    "format-differs": (
        finetuning_loader(CHAT(card={"decoder_only_format": False})),
        finetuning_loader(),
    ),
    "format-pretraining": (
        finetuning_loader(CHUNKS, decoder_only_format=False),
        finetuning_loader(CHUNKS),
    ),
    "targets-narrower": (
        finetuning_loader(LENGTH_4),
        finetuning_loader(LENGTH_4, target_prompts="length>=4"),
    ),
    "targets-wider": (finetuning_loader(target_responses="all"), finetuning_loader()),
    "targets-packed": (mdsmix_loader(PACKS, target_responses="all"), mdsmix_loader(PACKS)),
    "targets-parts": (
        finetuning_loader(NO_REASONING, target_prompts="length>=99"),
        finetuning_loader(NO_REASONING),
    ),
    "parts-differ": (
        finetuning_loader(CHAT(card=MESSAGES_CARD), NO_REASONING("other")),
        finetuning_loader(NO_REASONING, NO_REASONING("other")),
    ),
    "targets-compact": (
        finetuning_loader(COMPACT, target_prompts="all"),
        finetuning_loader(COMPACT),
    ),
    "recipe-changed": (recipe_mix(add_eos=False), recipe_mix()),
    "sources-changed": (recipe_mix(b"{}"), recipe_mix()),
    "recipe-unseen": (recipe_mix(None), recipe_mix()),
    "rows-outdated": (text_loader(WEB(card={"rules": {"kind.pretraining": 99}})), text_loader()),
    "documents-unseparated": (
        finetuning_loader(CHUNKS),
        finetuning_loader(FAQ(card={"layout": "document"})),
    ),
    "documents-unmarked": (mdsmix_loader(WEB, CHAT), mdsmix_loader(WEB, CHAT, eos_token_id=0)),
    "documents-unmasked": (
        mdsmix_loader(PACKS, **MPT),
        mdsmix_loader(PACKS, **model_keys("mpt_causal_lm", **MASKED)),
    ),
    "documents-packed": (
        mdsmix_loader(PACKS),
        mdsmix_loader(PACKS, **model_keys("mpt_causal_lm", **MASKED)),
    ),
    "weights-zero": (
        text_loader(WEB | {"repeat": 0.02}, DOCS),
        text_loader(WEB | {"repeat": 0.03}, DOCS),
    ),
    "weights-off": (text_loader(WEB | {"choose": 0}, DOCS), text_loader(WEB | {"choose": 1}, DOCS)),
    "shares-limited": (mix_by_shares(max_repeat=1), mix_by_shares(max_repeat=2)),
    "weights-repeated": (text_loader(WEB | {"repeat": 4.1}), text_loader(WEB | {"repeat": 4})),
    "weights-tokens": (text_loader(WEB, SHORT_ROWS), text_loader(WEB, HALF_ROWS)),
    "shuffle-off": (text_loader(WEB, DOCS, shuffle=False), text_loader(shuffle=False)),
    "epoch-too-small": (batching_mix("random", 41, 40), batching_mix("random", 40, 40)),
    "canonical-nodes": (
        finetuning_loader(num_canonical_nodes=41),
        finetuning_loader(num_canonical_nodes=40),
    ),
    "batching-infeasible": (
        batching_mix("per_stream", 8, 40, 7),
        batching_mix("per_stream", 8, 40, 8),
    ),
    "shuffle-blocks": (
        text_loader(shuffle_algo="py1br", shuffle_block_size=1),
        text_loader(shuffle_algo="py1br", shuffle_block_size=2),
    ),
    "batching-drops": (batching_mix("per_stream", 8, 41), batching_mix("per_stream", 8, 40)),
    "batching-unknown": (batching_mix("stratified", 0, 30, 10), batching_mix("random", 0, 30, 10)),
    "batching-uneven": (
        batching_mix("device_per_stream", 8, 40),
        batching_mix("per_stream", 8, 40),
    ),
    "remote-cut": (text_loader(WEB | {"remote": "oci://bucket/c#/mix"}), text_loader()),
    "remote-unseen": (text_loader(ON_ORACLE, DOCS), text_loader(WEB, DOCS)),
    "shard-damaged": (text_loader(FAR_OFFSET), text_loader(WEB_BARE)),
    "validate-hash": (text_loader(validate_hash="sha1"), text_loader(validate_hash="xxh128")),
    "index-stale": (cached_index(b'{"version": 2, "shards": []}'), cached_index(None)),
    "cache-limit-small": (text_loader(cache_limit=4 * 998 - 1), text_loader(cache_limit=4 * 998)),
    "cache-limit-tight": (
        text_loader(MANY_SHARDS, cache_limit=ALL_OF_MANY_BYTES - 1, predownload=1, **BATCH_OF_8),
        text_loader(MANY_SHARDS, cache_limit=ALL_OF_MANY_BYTES, predownload=1, **BATCH_OF_8),
    ),
    "shard-missing": (text_loader(SHARD_GONE), text_loader(TWO_SHARDS)),
    "shard-size": (LONGER_SHARD, text_loader()),
    "shard-contents": (damaged_shard(b"!"), damaged_shard(b"")),
    "shard-basenames": (
        changed_index(lambda shards: shards[1].update(raw_data=shards[0]["raw_data"])),
        text_loader(TWO_SHARDS),
    ),
    "publication-interrupted": (text_loader(INTERRUPTED), text_loader()),
    "manifest-contradicts": (text_loader(with_totals(WEB, samples=41)), text_loader()),
    "side-files": (text_loader(WITHOUT_SIDE_FILE), text_loader()),
    "quarantine": (deep_checked(records_mix(2)), deep_checked(records_mix(0))),
    "damage-in-transit": (
        deep_checked(text_loader(WEB_BARE), FAULT_IN_TRANSIT),
        deep_checked(text_loader(WEB_BARE)),
    ),
    "records-bad": (records_mix(2), records_mix(1)),
    "records-duplicate": (records_mix(0, duplicates=2), records_mix(0, duplicates=1)),
    "index-empty": (text_loader(WEB(n=0), DOCS), text_loader(WEB(n=1), DOCS)),
    "shard-format": (
        changed_index(lambda shards: shards[1].update(format="jsonl")),
        text_loader(TWO_SHARDS),
    ),
    "length-model": (
        text_loader(**model_keys(max_seq_len=LENGTH - 1)),
        text_loader(**model_keys(max_seq_len=LENGTH)),
    ),
    "length-differs": (
        text_loader(**model_keys(max_seq_len=LENGTH + 1)),
        text_loader(**model_keys(max_seq_len=LENGTH)),
    ),
    "model-encoder": (text_loader(**model_keys("hf_t5")), text_loader(**MPT)),
    "model-tokenizer": (
        pretrained_model({"a": 0, "b": 1}, {"b": 0, "a": 1}),
        pretrained_model({"a": 0, "<r>": 101}, {"a": 0, "c": 1, "<|im_start|>": 101}),
    ),
    "model-tokenizer-unseen": (
        pretrained_model(ONE_TOKEN, {"b": 0}, can_open=False),
        pretrained_model(ONE_TOKEN, ONE_TOKEN),
    ),
    "evaluation-varies": (evaluation_drawing(repeat=0.5), evaluation_drawing(repeat=2)),
    "evaluation-repeats": (evaluation_drawing(repeat=2), evaluation_drawing(repeat=1)),
    "evaluation-trained": (evaluation_of(WEB), evaluation_of(DOCS)),
    "samples-shared": (text_loader(WEB, WEB("again")), text_loader(WEB, DOCS)),
    "eval-label": (evaluations("held", ""), evaluations("held", "other")),
    "loader-unknown": (text_loader(loader={"name": "denoising"}), text_loader()),
    "key-dropped": (text_loader(packing_ratio=2), text_loader(predownload=2)),
    "key-rejected": (finetuning_loader(eos_token_id=0), finetuning_loader(pad_to_longest=True)),
    "key-missing": (
        text_loader(loader={"drop_last": ...}),
        finetuning_loader(loader={"drop_last": ...}),
    ),
    "streams-and-remote": (text_loader(remote="s3://bucket/web"), text_loader()),
    "remote-alone": (finetuning_loader(CHUNKS, streams=...), text_loader(streams=...)),
    "streams-none": (text_loader(streams={}), text_loader(streams=...)),
    "split-inherited": (text_loader(WITHOUT_SPLIT, split="train"), text_loader(split="train")),
    "local-duplicate": (text_loader(WEB, SAME_FOLDER), text_loader(WEB, WEB("again"))),
    "remote-file": (text_loader(FILE_URL), text_loader(CACHED)),
    "remote-hub-bucket": (
        with_remote("hf://buckets/org/name/web"),
        with_remote("hf://datasets/org/name/web"),
    ),
    "local-unset": (text_loader(UNCACHED), text_loader()),
    "cache-limit-local": (text_loader(cache_limit="1gb"), text_loader(CACHED, cache_limit="1gb")),
    "length-invalid": (text_loader(max_seq_len=...), text_loader()),
    "length-odd": (preference_streams(True, max_seq_len=LENGTH - 1), preference_streams(True)),
    "setting-null": (text_loader(shuffle_seed=None), mdsmix_loader(WEB, shuffle_seed=None)),
    "split-nested": (lone_local_stream("web/train"), lone_local_stream("train")),
    "weights-none": (
        text_loader(WEB | {"repeat": 0}, DOCS | {"choose": 0}),
        text_loader(WEB | {"repeat": 0}, DOCS),
    ),
    "setting-value": (text_loader(shuffle_algo="py3"), text_loader(shuffle_algo="py1s")),
    "workers": (text_loader(loader={"num_workers": 0}), text_loader(loader=NO_WORKERS)),
    "targets-invalid": (
        finetuning_loader(target_prompts="some"),
        finetuning_loader(target_prompts="all"),
    ),
    "packing-invalid": (
        finetuning_loader(max_leftover_bins_to_keep=2),
        finetuning_loader(packing_ratio="auto"),
    ),
    "resume-devices": (
        text_loader(WEB, DOCS, batching_method="per_stream", **BATCH_OF_8),
        mdsmix_loader(WEB, DOCS, batching_method="per_stream", **BATCH_OF_8),
    ),
    "packing-high": (finetuning_loader(packing_ratio=5), finetuning_loader(packing_ratio=2)),
    "unsafe-types": (
        mdsmix_loader(WEB, allow_unsafe_types=True),
        text_loader(allow_unsafe_types=True),
    ),
    "callback-without-streams": (
        text_loader(**STREAMS_CALLBACK),
        mdsmix_loader(WEB, **STREAMS_CALLBACK),
    ),
    "top-level-key": (
        text_loader(top={"model": {}, "data_local": "x"}),
        text_loader(top={"model": {}, "variables": {"data_local": "x"}}),
    ),
    "changed-accepted": (mdsmix_loader(WEB, loader={"accept_changed": True}), mdsmix_loader(WEB)),
    "separators-both": (text_loader(eos_token_id=0, bos_token_id=0), text_loader(bos_token_id=0)),
    "weights-scheme": (
        text_loader(WEB | {"proportion": 0.5}, DOCS),
        text_loader(WEB | {"repeat": 0.5}, DOCS),
    ),
    "weights-number": (text_loader(WEB | {"repeat": "0.5"}), text_loader(WEB | {"repeat": 0.5})),
    "weights-epoch-size": (
        text_loader(BY_REPEAT, epoch_size=10),
        text_loader(BY_PROPORTION, epoch_size="1k"),
    ),
}
LOADER_FIX = (
    "set train_loader.name: {}, which reads all of these streams, or convert the stream again for "
    "this loader with --reencode"
)
READ_AS_INT16 = "the bytes of old are uint16, and train_loader reads all bytes columns as int16."
EOS_SET: dict[str, Any] = {"eos_token_id": 0}
PADDED_WITH_EOS = with_tokenizer_card(mdsmix_loader(WEB, CHUNKS("split"), **EOS_SET), pad_id=0)
ENCODER_DECODER = {"decoder_only_format": False}
WHOLE_FINDINGS: list[tuple[BuildMix, str, str]] = [
    # One sample ahead, the one before and the one that is read, and 5 batches of 1 on either side:
    # 13 for each of 2 workers.
    (
        text_loader(MANY_SHARDS, cache_limit=BYTES_OF_26 - 1, predownload=1),
        "cache-limit-small",
        f"need at least {BYTES_OF_26:,} bytes: 26 samples in up to 26 shards",
    ),
    (text_loader(MANY_SHARDS, cache_limit=BYTES_OF_26, predownload=1), "", ""),
    # 23 samples for each worker of two devices with batches of 2.
    (
        text_loader(MANY_SHARDS, cache_limit=ALL_OF_MANY_BYTES - 1, predownload=1, top=TWO_OF_2),
        "cache-limit-small",
        f"on a node of 2 devices: cache_limit is {ALL_OF_MANY_BYTES - 1} "
        f"({ALL_OF_MANY_BYTES - 1:,} bytes), and the shards that the workers of a node read and "
        f"prepare ahead need {ALL_OF_MANY_BYTES:,} bytes: 92 samples in up to 40",
    ),
    (text_loader(MANY_SHARDS, cache_limit=ALL_OF_MANY_BYTES, predownload=1, top=TWO_OF_2), "", ""),
    (text_loader(CHUNKS("split")), "columns-loader", LOADER_FIX.format("finetuning")),
    (finetuning_loader(WEB), "columns-loader", LOADER_FIX.format("text")),
    (
        mdsmix_loader(WEB, RAW),
        "columns-loader documents-unmarked",
        "for this stream in a run of its own",
    ),
    (text_loader(PACKS), "columns-loader", LOADER_FIX.format("mdsmix")),
    (records_mix(6), "records-bad", "6 of 100 records of web (6.0%) were bad"),
    (
        text_loader(UINT16, token_encoding_type="int16"),
        "tokenizer-unknown tokens-dtype",
        READ_AS_INT16,
    ),
    (text_loader(shuffle_seed=1.0), "setting-value", "shuffle_seed is 1.0. "),
    (text_loader(shuffle_block_size=1e5, **NULL_SETTINGS), "", ""),
    (finetuning_loader(hf_kwargs=None, **NULL_SETTINGS), "", ""),
    (text_loader(loader=NO_WORKERS | {"timeout": 5}), "workers", "is 0, but timeout is 5."),
    (
        text_loader(loader={"num_canonical_nodes": 8}),
        "key-rejected",
        "move num_canonical_nodes to dataset",
    ),
    (
        lone_evaluation(label="x"),
        "key-rejected",
        "or write eval_loader as a list of one evaluation.",
    ),
    (text_loader(num_canonical_nodes=41), "canonical-nodes", "num_canonical_nodes: 41"),
    (text_loader(num_canonical_nodes=41, shuffle_algo="py1s"), "", ""),
    (
        text_loader(WEB | {"choose": 9}, num_canonical_nodes=10),
        "canonical-nodes",
        "has 9 samples an epoch and num_canonical_nodes: 10",
    ),
    (text_loader(WEB | {"repeat": 2}, num_canonical_nodes=41), "", ""),
    (
        finetuning_loader(packing_ratio=2.0, top={"global_train_batch_size": 21}),
        "documents-packed epoch-too-small",
        "is 21 and packing_ratio 2.0 with drop_last: true",
    ),
    (evaluation_drawing(repeat=0.5, sampling_method="fixed"), "", ""),
    (finetuning_loader(packing_ratio=0.5), "setting-value", "train_loader: packing_ratio is 0.5. "),
    (finetuning_loader(packing_ratio="many"), "setting-value", "packing_ratio is 'many'. "),
    (text_loader(cache_limit="much"), "cache-limit-local setting-value", "cache_limit is 'much'. "),
    (text_loader(shuffle_seed=-1), "setting-value", "shuffle_seed is -1. "),
    (
        batching_mix("stratified", 10, 100, 9),
        "batching-drops resume-devices",
        "90 of the epoch's 109 samples in batches of 10",
    ),
    (
        text_loader(ON_ORACLE, DOCS, num_canonical_nodes=99),
        "remote-unseen",
        "oci://bucket/mix, which",
    ),
    (text_loader(ON_ORACLE), "remote-unseen", "oci://bucket/mix, which"),
    # Streaming draws nothing from a stream of weight 0, and then fails under these methods.
    (
        text_loader(WEB | {"repeat": 0}, DOCS, batching_method="per_stream", **BATCH_OF_8),
        "batching-infeasible resume-devices weights-off",
        "draws too few samples of web to fill the share",
    ),
    (
        text_loader(WEB | {"repeat": 0}, DOCS | {"choose": 0}),
        "weights-none weights-off",
        "no sample",
    ),
    (
        evaluations("held", "held"),
        "eval-label",
        "entry 1 of eval_loader (counted from 0) has the label held, like an earlier entry.",
    ),
    (LONGER_SHARD, "shard-size", "shard.00000.mds of web: expected 998 bytes, found 999."),
    (
        text_loader(UNCACHED, replace(UNCACHED("b"), row=EIGHTS), NINES),
        "local-unset",
        "[web, b]: no local folder is set for",
    ),
    (text_loader(WEB, HALF_ROWS), "rows-short rows-uneven", "[web, short]"),
    (
        finetuning_loader(CUT_CHATS),
        "rows-cut",
        "3 of 40 samples of chat are cut, by 16 of 160 tokens (10.0%",
    ),
    (
        finetuning_loader(CUT_CHATS, max_seq_len=LENGTH + 1),
        "length-differs rows-cut",
        "sample of chat has 17",
    ),
    # Packed and unpacked streams in one mix.
    (
        mdsmix_loader(WEB, CHUNKS("split"), CHAT, **EOS_SET, packing_ratio=2),
        "documents-packed documents-unseparated packing-high",
        "",
    ),
    (
        mdsmix_loader(PACKS, **model_keys("hf_causal_lm", pretrained=False)),
        "documents-unmasked",
        "",
    ),
    # Rows that the loader packs, with models that keep their documents apart, and that do not.
    (
        finetuning_loader(packing_ratio=2.0, **MPT),
        "documents-unmasked",
        "packed into rows by packing_ratio: 2.0, and the model is mpt_causal_lm",
    ),
    (finetuning_loader(packing_ratio=1.0, **MPT), "", ""),
    (finetuning_loader(packing_ratio=2.0, **model_keys("mpt_causal_lm", **MASKED)), "", ""),
    (finetuning_loader(packing_ratio="auto"), "documents-packed", "packing_ratio: auto"),
    (
        mdsmix_loader(PACKS, WEB, FAQ),
        "documents-packed documents-unmarked documents-unseparated",
        "",
    ),
    (
        mdsmix_loader(PACKS, max_seq_len=2 * LENGTH),
        "documents-packed length-differs rows-short",
        f"chat are packed for {LENGTH} tokens",
    ),
    # A copy in another folder is the same samples, and a stream of weight 0 is not trained on.
    (evaluation_of(replace(WEB, name="copy")), "evaluation-trained", "evaluates on copy"),
    (evaluation_of(WEB, weight=0), "weights-off weights-none", ""),
    (
        finetuning_loader(CHAT(card=ENCODER_DECODER), **ENCODER_DECODER, **model_keys("hf_t5")),
        "",
        "",
    ),
    (mdsmix_loader(WEB, CHAT, mlm_probability=0.1, **EOS_SET), "key-rejected", ""),
    (text_loader(loader={"accept_changed": True}), "key-rejected", ""),
    (text_loader(loader=NO_WORKERS | {"prefetch_factor": 0}), "workers", ""),
    (text_loader(loader=NO_WORKERS | {"persistent_workers": True}), "workers", ""),
    (mdsmix_loader(WEB, CHAT, loader={"accept_changed": "yes"}, **EOS_SET), "setting-value", ""),
    (mdsmix_loader(WEB, CHAT, eos_token_id=5), "separator-differs", ""),
    (mdsmix_loader(WEB, CHAT, **EOS_SET, loader={"num_workers": 0}), "", ""),
    (text_loader(with_totals(INTERRUPTED, largest_id=9999)), "publication-interrupted", ""),
    # Long turns are refused only if no target remains. A context and a target have a row each, so
    # no sum of them is too long.
    (foundry_turns((2, LENGTH)), "rows-cut tokenizer-unknown", ""),
    (foundry_turns((LENGTH, LENGTH)), "rows-cut sample-unusable tokenizer-unknown", ""),
    (foundry_turns((LENGTH, LENGTH), **ENCODER_DECODER), "sides-unseen tokenizer-unknown", ""),
    (
        foundry_turns((LENGTH, LENGTH), **ENCODER_DECODER, pad_to_longest=True),
        "rows-uncut tokenizer-unknown",
        f"has {2 * LENGTH} tokens, context and target together; max_seq_len is {LENGTH}",
    ),
    (encoder_decoder(2 * LENGTH, 2 * LENGTH - 1), "sides-unseen", ""),
    (encoder_decoder(LENGTH, 2 * LENGTH - 1, cut_rows=1), "rows-cut", ""),
    (encoder_decoder(LENGTH - 1, 2 * LENGTH - 1), "", ""),
    (encoder_decoder(LENGTH - 1, 2 * LENGTH - 1, cut_rows=1), "sides-unseen", ""),
    # A padding token that is EOS matters only in plain rows, and weights that are not loaded fit
    # any tokenizer.
    (
        PADDED_WITH_EOS,
        "documents-unseparated pad-eos-finetuning pad-eos-text",
        "pad-eos-text [web]",
    ),
    (
        PADDED_WITH_EOS,
        "documents-unseparated pad-eos-finetuning pad-eos-text",
        "pad-eos-finetuning [split]",
    ),
    (pretrained_model(ONE_TOKEN, {"b": 0}, pretrained=False), "", ""),
    (pretrained_model(ONE_TOKEN, {"b": 0}, name="mpt_causal_lm"), "", ""),
    (with_tokenizer_card(preference_streams(True), vocab_size=5), "id-vocabulary", ""),
    (
        finetuning_loader(MASKED_LABELS),
        "id-vocabulary labels-repeated tokenizer-unknown",
        "id -100, and",
    ),
    (with_tokenizer_card(preference_streams(True), vocab_size=6), "", ""),
]
"A mix, the ids of all its findings, and words of one of them."


def list_ids(findings: list[Finding], severity: str = "") -> set[str]:
    """Return the ids of the findings, all or those of one severity."""
    return {finding.id for finding in findings if finding.severity.startswith(severity)}


def find(build: BuildMix, home: Path, id: str) -> list[Finding]:
    """Return the findings of one check on a mix that is published in the folder."""
    return run_one_check(build(home), id)


@pytest.fixture(autouse=True)
def _no_tokenizer_or_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make opening a tokenizer or a processor fail at once, without starting a process."""
    for module, function in ((card, "open_tokenizer"), (conversion, "open_processor")):
        monkeypatch.setattr(module, function, Mock(side_effect=RecipeError("not here")))


def test_each_check_reports_its_fault_and_not_the_same_mix_without_it(tmp_path: Path) -> None:
    assert CASES.keys() == {check.id for check in list_checks()}, "every check has a case"
    for id, (wrong, right) in CASES.items():
        findings = find(wrong, tmp_path / id / "wrong", id)
        assert findings, f"{id} found nothing"
        for finding in findings:
            for sentence in (finding.message, finding.why, finding.fix):
                assert re.fullmatch(r".+[^.,;:]\.", sentence), id
                assert not re.search(r"[.,;:][.,;]|  |\{(loader|streams)\}", sentence), id
        assert not find(right, tmp_path / id / "right", id), id


def test_a_tokenizer_unlike_its_sentencepiece_model_is_reported(tmp_path: Path) -> None:
    build = with_tokenizer_notes(model_changes="'x  y' has other tokens")
    [finding] = find(build, tmp_path, "tokenizer-class")
    assert "'x  y' has other tokens." in finding.message
    assert "open the folder with transformers 4" in finding.fix


@pytest.mark.parametrize(
    "keys",
    [{"target_responses": "some"}, {"decoder_only_format": False, "target_prompts": "all"}],
)
def test_each_wrong_target_has_a_problem_and_a_fix(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Both are parts of one sentence, which the recipe's checks show as a whole."""
    [finding] = find(finetuning_loader(**keys), tmp_path, "targets-invalid")
    for sentence in (finding.message, finding.fix):
        assert re.fullmatch(r".+[^.,;:]\.", sentence)


def test_a_fresh_process_knows_all_checks() -> None:
    """Checks are registered when their package is imported, which other tests do."""
    program = "from mdsmix.mix.check import list_checks; print(len(list_checks()))"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(process.stdout) == len(CASES)


def test_all_checks_together_report_these_faults_with_their_numbers(tmp_path: Path) -> None:
    for number, (build, expected, words) in enumerate(WHOLE_FINDINGS):
        findings = run_checks(build(tmp_path / str(number)))
        assert list_ids(findings) == set(expected.split()), number
        assert words in "\n".join(map(str, findings)), number


PROCESSORS = (
    # Hash of the loader's processor (None: not found), length of the conversion in rows of the
    # loader -> the check that fails.
    ("b" * 32, 1, {"images-processor"}),
    ("a" * 32, 2, {"images-processor"}),
    ("a" * 32, 1, set[str]()),
    (None, 1, {"images-unplanned"}),
)


def test_images_must_fit_the_processor_and_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = {"token": "<i>", "id": 5, "processor": "a" * 32}
    for number, (hash, rows, expected) in enumerate(PROCESSORS):
        processor = SimpleNamespace(hash=hash, folder=None) if hash else None
        monkeypatch.setattr(conversion, "find_processor", Mock(return_value=processor))
        fields = {"images": images, "max_seq_len": rows * LENGTH}
        stream = IMAGE_TURNS(card=TURNS_CARD | MESSAGES_CARD | fields)
        findings = run_checks(mdsmix_loader(stream, processor="p")(tmp_path / str(number)))
        image_ids = {id for id in list_ids(findings) if id.startswith("images-")}
        assert image_ids == expected, number


def test_packed_streams_without_a_yaml_are_checked_for_the_mdsmix_loader(tmp_path: Path) -> None:
    folders = [stream.publish(tmp_path)["local"] for stream in (PACKS, WEB)]
    assert not list_ids(run_checks(make_stream_mix(folders)), "error")
    other_targets = PACKS("other", card=PACKED_CARD | {"target_responses": "all"})
    folders.append(other_targets.publish(tmp_path)["local"])
    assert list_ids(run_checks(make_stream_mix(folders)), "error") == {"targets-packed"}


def test_streams_without_a_yaml_are_checked_for_the_targets_that_they_were_made_for(
    tmp_path: Path,
) -> None:
    """Of streams that were made for several targets, the first decides; the others have a line."""
    all_answers = CHAT(card=TURNS_CARD | MESSAGES_CARD | {"target_responses": "all"})
    both_sides = CHAT("t5", card=TURNS_CARD | {"decoder_only_format": False})
    for stream in (all_answers, both_sides, CHAT):
        folder = stream.publish(tmp_path / stream.name)["local"]
        assert not list_ids(run_checks(make_stream_mix([folder])), "error"), stream.name
    streams = (all_answers("all"), CHAT("last", card=TURNS_CARD | MESSAGES_CARD))
    folders = [stream.publish(tmp_path / "two")["local"] for stream in streams]
    assert "targets-wider" in list_ids(run_checks(make_stream_mix(folders)))
    assert "targets-narrower" in list_ids(run_checks(make_stream_mix(folders[::-1])))


def test_streams_of_other_tools_are_checked_by_index_and_first_samples(tmp_path: Path) -> None:
    in_bytes = replace(INT32, name="b", row={"tokens": (9).to_bytes(8, "little") * LENGTH})
    for stream in (DOCS("a", card=None), in_bytes, TEXT):
        assert not is_refused(run_checks(text_loader(stream)(tmp_path)))
    beyond = replace(in_bytes, row={"tokens": CARD.vocab_size.to_bytes(8, "little") * LENGTH})
    assert find(text_loader(beyond), tmp_path, "tokens-dtype")
    ids = list(range(5, 5 + LENGTH + 1))
    long = replace(DOCS, row={"tokens": ids}, options=NO_MANIFEST)
    assert find(text_loader(long(compression="zstd:3")), tmp_path, "rows-too-long")


def test_only_samples_that_an_evaluation_draws_are_compared_with_trained_ones(
    tmp_path: Path,
) -> None:
    """Rows of one length give different streams equal indexes if the indexes have no hashes."""
    id = "evaluation-trained"
    one = without_hashes(WEB("one"))
    two = replace(one, name="two", row={"tokens": [9] * LENGTH})
    assert not find(evaluation_of(two, trained=one), tmp_path / "other", id)
    indexes = [path.read_bytes() for path in (tmp_path / "other").glob("[ot]*/train/index.json")]
    assert len(indexes) == 2
    assert indexes[0] == indexes[1]
    assert find(evaluation_of(one, trained=one), tmp_path / "same", id)
    assert len(find(evaluation_of(WEB("copy")), tmp_path / "copy", id)) == 1
    # Of a part, such as the files of an evaluation in a folder that is trained on.
    rows = [*[NINES.row] * 20, *[EIGHTS] * 10]
    part = PublishedStream("part", CONCAT, WEB.row, {"rows": rows, "shards": 3})
    whole = PublishedStream("all", CONCAT, WEB.row, {"rows": rows[10:], "shards": 2})
    (finding,) = find(evaluation_of(part, trained=NINES(n=10)), tmp_path / "part", id)
    assert "evaluates on part, and 20 of its 30 samples are trained on." in finding.message
    (finding,) = find(evaluation_of(whole, trained=part), tmp_path / "whole", id)
    assert "evaluates on all, and 20 of its 20 samples are trained on." in finding.message
    other = without_hashes(part("other"))
    assert not find(evaluation_of(other, trained=part), tmp_path / "unhashed", id)
    assert not find(evaluation_of(WEB | {"repeat": 0}), tmp_path / "off", id)


def test_samples_that_two_streams_share_are_counted_by_their_shards(tmp_path: Path) -> None:
    """A shard is the samples of one stream only if its bytes are known by a hash. Equal shards of
    one stream are its own duplicates.
    """
    id = "samples-shared"
    rows = [NINES.row] * 20
    one = PublishedStream("one", CONCAT, WEB.row, {"rows": [*rows, *[WEB.row] * 10], "shards": 3})
    two = PublishedStream("two", CONCAT, WEB.row, {"rows": [*rows, *[EIGHTS] * 10], "shards": 3})
    (finding,) = find(text_loader(one, two), tmp_path / "both", id)
    assert finding.message.startswith("20 of 30 samples of two are in one too")
    assert list(finding.streams) == ["one", "two"]
    assert not find(text_loader(one), tmp_path / "alone", id)
    assert not find(text_loader(one, two | {"repeat": 0}), tmp_path / "off", id)
    unhashed = text_loader(without_hashes(one), without_hashes(one("copy")))
    assert not find(unhashed, tmp_path / "unhashed", id)


def test_tokens_that_the_loader_cuts_off_do_not_count_in_an_epoch(tmp_path: Path) -> None:
    assert measure_epoch(finetuning_loader(CUT_CHATS)(tmp_path).train)[0].tokens == 144
    assert not find(text_loader(CUT_CHATS), tmp_path, "rows-cut"), "this loader reads none of them"


def test_a_function_of_several_checks_looks_once_at_each_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that looks at every source file must not do so for each of its ids."""
    calls = Counter[tuple[Any, ...]]()
    subjects = list[tuple[Any, ...]]()  # kept, so that no two have the same id

    def count_calls(find: Finder) -> Finder:
        def counting(*arguments: Any) -> Findings:
            subjects.append(arguments)
            calls[(find, *map(id, arguments))] += 1
            return find(*arguments)

        return counting

    checks = list_checks()
    counting = {find: count_calls(find) for find in {check.find for check in checks}}
    monkeypatch.setattr(
        check_module,
        "list_checks",
        lambda: [replace(check, find=counting[check.find]) for check in checks],
    )
    mix = text_loader(WEB, WEB("other"))(tmp_path)
    run_checks(mix)
    assert len(counting) < len(checks), "some functions serve several checks"
    assert {*calls.values()} == {1}
    assert len(calls) > len(counting)


def test_answers_that_records_split_need_the_targets_of_the_conversion(tmp_path: Path) -> None:
    """As those that train_parts splits: a policy that trains prompts, or fewer responses, would
    train other pieces.
    """
    for spans, of_stream, of_run, expected in (
        (3, ("none", "last"), ("all", "last"), {"targets-parts"}),
        (3, ("none", "all"), ("none", "last"), {"targets-parts"}),
        (0, ("none", "all"), ("none", "last"), {"targets-narrower"}),
        (3, ("none", "last"), ("none", "all"), {"targets-wider"}),
        (3, ("none", "all"), ("none", "all"), set[str]()),
    ):
        keys = ("target_prompts", "target_responses")
        card = {"totals": {"span_records": spans}, **dict(zip(keys, of_stream, strict=True))}
        build = finetuning_loader(CHAT(card=card), **dict(zip(keys, of_run, strict=True)))
        folder = tmp_path / "-".join((str(spans), *of_stream, *of_run))
        ids = list_ids(run_checks(build(folder)))
        assert {id for id in ids if id.startswith("targets-")} == expected
