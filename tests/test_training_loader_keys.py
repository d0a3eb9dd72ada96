"""Values of a loader's keys, as YAML gives them."""

from mdsmix.training.loader_keys import whole


def test_only_a_whole_number_is_one() -> None:
    for value in (0, 7, -1):
        assert whole(value) == value
    for value in (True, 1.5, "7", None):
        assert whole(value) is None
