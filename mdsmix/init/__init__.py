"""A first recipe: files are looked at, their format and shape recognised, and a recipe written that
converts as it is.
"""
