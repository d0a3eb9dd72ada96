"""YAML -> batches: a thin wrapper of StreamingDataset for training loops of one's own.

It reads the YAML that mdsmix renders, or a whole LLM-Foundry config, and gives the batches that
LLM-Foundry's loaders give, for both kinds of stream in one loader. Importing it imports torch and
streaming, which takes 4-15 s; no other room of mdsmix does.
"""

from __future__ import annotations

from mdsmix.load.loader import MixLoader, build_loader
from mdsmix.load.training_rows import TokenIds, document_mask

__all__ = ["MixLoader", "TokenIds", "build_loader", "document_mask"]
