"""Hostile or unlucky input: it leads to an error in one sentence or to a counted outcome, and to
nothing else.
"""
