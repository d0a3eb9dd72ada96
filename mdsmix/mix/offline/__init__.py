"""Published streams -> one published stream, drawn by weight and shuffled as a whole: see the README beside this file."""
