"""What two streams share, by runs of token ids: see the README beside this file."""
