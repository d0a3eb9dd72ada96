"""The published stream: samples <-> MDS bytes, index.json, and the manifest, which describes how the
stream was made.
"""
