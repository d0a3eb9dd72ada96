"""Samples <-> MDS bytes: whole shards from arrays, index.json, and the manifest that says what a
stream is.
"""
