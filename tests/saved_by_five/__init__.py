"""Small tokenizers as transformers 5 saves them."""

from __future__ import annotations
