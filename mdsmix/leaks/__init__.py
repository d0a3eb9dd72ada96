"""Find samples of evaluations in the training streams, exactly. The README in this folder has the
method.
"""
