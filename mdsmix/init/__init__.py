"""A first recipe: recognises the format and shape of files, and writes a recipe that converts as it
is.
"""
