"""Small parts that many sentences and rules stand on."""

from mdsmix.storage.s3_client import own_stamp
from mdsmix.training.loader_keys import whole
from mdsmix.words import listed


def test_names_beyond_the_most_are_counted() -> None:
    for names, said in (([], ""), (["a"], "a"), ([*"ab"], "a, b"), ([*"abc"], "a, b and 1 more")):
        assert listed(names, 2) == said


def test_only_a_whole_number_is_one() -> None:
    for value in (0, 7, -1):
        assert whole(value) == value
    for value in (True, 1.5, "7", None):
        assert whole(value) is None


def test_a_stamp_is_the_etag_without_its_marks() -> None:
    for said in ('"0f3a"', 'W/"0f3a"', "0f3a"):
        assert own_stamp({"ETag": said}) == "0f3a"
