"""Writes published streams in the formats of other trainers, without tokenizing again."""
