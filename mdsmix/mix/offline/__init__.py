"""Published streams -> one published stream, drawn by weight and shuffled as a whole. The README
beside this file shows how.
"""
