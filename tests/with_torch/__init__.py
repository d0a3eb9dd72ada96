"""Tests that import torch, Streaming or transformers. `make test` gives them a process of their
own: it holds 740 MB beside these libraries, and forks the workers of a conversion three times as
slowly as a small one.
"""
