"""Estimates of a source that is not converted: how many tokens it has, which share of it a budget
needs, and the stream that a conversion would publish.
"""
