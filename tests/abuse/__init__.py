"""Input that means harm, or comes of bad luck: each ends in one sentence or in a counted outcome,
and nothing else happens.
"""
