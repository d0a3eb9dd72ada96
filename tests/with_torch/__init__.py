"""Tests that import torch, Streaming or transformers.

`make test` gives them a process of their own: beside torch and Streaming it holds 740 MB, and every conversion of a test
forks workers from it, three times as slowly as from a small one.
"""
