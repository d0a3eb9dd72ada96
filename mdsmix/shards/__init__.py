"""The published stream: samples <-> MDS bytes, index.json, and the manifest with the stream's
origin.
"""
