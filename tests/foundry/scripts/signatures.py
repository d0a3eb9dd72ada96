"""Which keys LLM-Foundry's loaders read, from its own signatures and source."""

from __future__ import annotations

import inspect
import re
from typing import Any

import llmfoundry.data.utils
from llmfoundry.data.finetuning import dataloader as finetuning
from llmfoundry.data.finetuning.tasks import StreamingFinetuningDataset
from llmfoundry.data.text_data import StreamingTextDataset, build_text_dataloader
from streaming import Stream, StreamingDataset
from streaming.base import partition, shuffle


def keys(*readers: object) -> list[str]:
    return sorted({name for reader in readers for name in inspect.signature(reader).parameters})


READ_BESIDES = re.findall(
    r"dataset_cfg\.(?:get|pop)\(\s*'(\w+)'", inspect.getsource(llmfoundry.data.utils)
)


def read() -> dict[str, Any]:
    return {
        "loader": {
            "text": keys(build_text_dataloader),
            "finetuning": keys(finetuning.build_finetuning_dataloader),
        },
        "dataset": {
            "text": keys(StreamingTextDataset, StreamingDataset) + READ_BESIDES,
            "finetuning": keys(StreamingFinetuningDataset, finetuning._validate_config)
            + sorted(finetuning._ALLOWED_DATASET_KEYS),
        },
        "stream": keys(Stream),
        "shuffle_algo": sorted(shuffle.algos),
        "partition_algo": sorted(partition.algos),
        "needs": {
            name: [
                key
                for key, parameter in inspect.signature(build).parameters.items()
                if parameter.default is inspect.Parameter.empty
            ]
            for name, build in (
                ("text", build_text_dataloader),
                ("finetuning", finetuning.build_finetuning_dataloader),
            )
        },
    }
