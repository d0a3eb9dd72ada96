"""What can go wrong, as kinds with one exit code each.

A message is one sentence that says what is wrong, where, why it matters and what to do. It is printed as it stands,
so it must never hold a credential. Anything else that escapes is a defect of mdsmix and exits with 1.
"""

from __future__ import annotations


class MdsmixError(Exception):
    """The tool itself failed."""

    exit_code = 1


class RecipeError(MdsmixError):
    """The recipe or the command line is wrong."""

    exit_code = 2


class MixRefused(MdsmixError):
    """The streams may not be mixed."""

    exit_code = 3


class Damaged(MdsmixError):
    """What is published is not what its manifest says."""

    exit_code = 3


class Unreachable(MdsmixError):
    """Something could not be looked at: a missing stream or file, a store, a right."""

    exit_code = 4


class Earlier(Unreachable):
    """It is of a format that an earlier commit of mdsmix wrote, and that is not read any more."""


class NotPublished(Unreachable):
    """No stream is published yet at this place."""


class Denied(Unreachable):
    """A right is missing for this file or bucket. Other files may be readable."""


class NoSuchPlace(Unreachable):
    """A store says that what is named does not exist or may not be called so; others of its names may."""


class SeveralFailed(MdsmixError):
    """More than one stream of a run failed; the exit code is that of the gravest error."""

    def __init__(self, errors: list[MdsmixError]) -> None:
        super().__init__(" ".join(map(str, errors)))
        self.errors = errors
        self.exit_code = min((error.exit_code for error in errors), key=GRAVEST.index)


GRAVEST = (1, 2, 4, 5, 3)
"Exit codes, the gravest first."


def all_of(errors: list[MdsmixError]) -> MdsmixError:
    """The one error of several streams, or all of them as one SeveralFailed."""
    return errors[0] if len(errors) == 1 else SeveralFailed(errors)


class TooManyBadRecords(MdsmixError):
    """More records were bad than the recipe allows; nothing was published."""

    exit_code = 5
