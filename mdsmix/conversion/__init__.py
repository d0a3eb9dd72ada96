"""Work units -> published streams: what is to be done, who does it, and how it is made public."""
