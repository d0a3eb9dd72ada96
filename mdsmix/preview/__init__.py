"""Show the first steps of a training run before the run: which samples each device draws, and the
rows that the loader makes of them.
"""
