"""A mix as one HTML page: what there is to know of it, gathered, drawn and written. README.md
beside this file says how.
"""
