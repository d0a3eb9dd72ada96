"""Parts of sentences say how many there are."""

from mdsmix.words import listed


def test_names_beyond_the_most_are_counted() -> None:
    for names, said in (([], ""), (["a"], "a"), ([*"ab"], "a, b"), ([*"abc"], "a, b and 1 more")):
        assert listed(names, 2) == said
