"""Reads the images that records name, several at a time, and judges whether a model can be trained
on them. Images are changed only if a recipe asks for it.
"""
