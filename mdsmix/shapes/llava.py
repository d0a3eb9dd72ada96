"""`{"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "..."}]}`, as
LLaVA and the finetuning scripts of Qwen2.5-VL and Qwen3-VL write it: ShareGPT's messages, with images.

`image` is a path or a list of them; a record without is one of text.
"""

from __future__ import annotations

from mdsmix.record import Conversation
from mdsmix.shapes import sharegpt
from mdsmix.shapes.base import Shape

SHAPE = Shape(
    name="llava",
    gives=Conversation,
    fields=("conversations",),
    optional=("system",),
    structured=("conversations",),
    options=("tags", "consecutive_roles", "nulls"),
    has_images="beside",
    read=sharegpt.read,
)
