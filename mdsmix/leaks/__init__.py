"""Which samples of an evaluation stand in the training streams, exactly: see the README beside this
file.
"""
