"""Images of records: found, read several at a time, judged before a model is trained on them, and
changed only if a recipe asks for it.
"""
