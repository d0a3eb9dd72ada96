"""Published streams -> one published stream, drawn by weight and shuffled as a whole. README.md in
this folder has the method.
"""
