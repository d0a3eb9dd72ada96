"""Converts the sources of streams, one work unit (a part of a source) after the other, and
publishes the streams.
"""
