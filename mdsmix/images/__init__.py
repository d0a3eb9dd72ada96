"""Images of records: found, read several at a time, judged before a model is trained on them, and
changed only where a recipe asks.
"""
