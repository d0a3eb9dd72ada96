"""The errors of mdsmix, each class with its exit code.

A message is one sentence that says what is wrong, where, why it matters and what to do. It is
printed unchanged, so it must never contain a credential. An exception of any other class is a bug
of mdsmix and exits with 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class MdsmixError(Exception):
    """The tool itself failed."""

    exit_code = 1


class RecipeError(MdsmixError):
    """The recipe or the command line is wrong."""

    exit_code = 2


class MixRefused(MdsmixError):
    """The streams may not be mixed."""

    exit_code = 3

    def __init__(self, message: str, checked: Any = None) -> None:
        """Keep the message.

        Args:
            checked: the result of all checks of the mix (a `CheckedMix`), whose findings refuse the
                mix; None if it was refused for another reason.
        """
        super().__init__(message)
        self.checked = checked


class Damaged(MdsmixError):
    """A published file is missing, or differs from the hash or size that is stored for it."""

    exit_code = 3


class Unreachable(MdsmixError):
    """A file or store could not be read or written: it is missing, does not answer, or refuses."""

    exit_code = 4


class EarlierFormat(Unreachable):
    """The manifest of a published stream (its settings and counts) has the format of an earlier
    commit of mdsmix, which is not read any more.
    """


class NotPublished(Unreachable):
    """No stream is published yet at this location."""


class Denied(Unreachable):
    """A permission is missing for one file or bucket. Other files may be readable."""


class NoSuchPlace(Unreachable):
    """A store has no file or bucket of a name, or refuses the name. Other files of the store may be
    readable.
    """


class SeveralFailed(MdsmixError):
    """More than one stream of a run failed; the exit code is that of the gravest error."""

    def __init__(self, errors: list[MdsmixError]) -> None:
        super().__init__(" ".join(map(str, errors)))
        self.errors = errors
        # GRAVEST begins with the gravest code: take the code that comes first in it.
        self.exit_code = min((error.exit_code for error in errors), key=GRAVEST.index)


class ExitCode(NamedTuple):
    """The meaning of an exit code, as docs/troubles.md shows it."""

    cause: str
    fix: str


EXIT_CODES = {
    0: ExitCode("Success, or the streams may be mixed.", "Nothing."),
    1: ExitCode(
        "mdsmix itself failed.",
        "Report it, with what the same command prints under `MDSMIX_DEBUG=1`.",
    ),
    2: ExitCode(
        "Wrong usage or recipe, or a chat template that does not compile. With `--engine ray` "
        "also: "
        "Ray is not installed, or a local path exists only on this node.",
        "Change what the sentence names. The same command fails again.",
    ),
    3: ExitCode(
        "The streams may not be mixed, or a stream is damaged.",
        "The finding has the fix. `mdsmix verify` lists damaged files, and `mdsmix repair` makes "
        "them again.",
    ),
    4: ExitCode(
        "Reading or writing failed (a missing stream, a store, permissions, a full disk), a source "
        "changed while it was read, or another run is writing the stream. With `--engine ray` "
        "also: the cluster cannot be joined, or a node has another version of mdsmix.",
        "Remove the cause and run the same command again: it continues. `mdsmix doctor RECIPE` "
        "tries all places of a run.",
    ),
    5: ExitCode(
        "Too many bad records, or no samples left.",
        "`mdsmix quarantine` shows the records: fix the source, or raise `max_bad`. The same "
        "command "
        "continues.",
    ),
    130: ExitCode("Interrupted by Ctrl-C.", "The same command continues."),
    141: ExitCode(
        "The program that read the output has exited, as `head` does after its last line.",
        "Nothing.",
    ),
    143: ExitCode("Terminated: a scheduler took the machine back.", "The same command continues."),
}
"Exit code -> its cause and its fix. All commands have the same codes."
GRAVEST = (1, 2, 4, 5, 3)
"Exit codes, the gravest first."


def join_errors(errors: list[MdsmixError]) -> MdsmixError:
    """Return one error for a list of errors: the only error, or a SeveralFailed of all."""
    return errors[0] if len(errors) == 1 else SeveralFailed(errors)


class TooManyBadRecords(MdsmixError):
    """More records were bad than the recipe allows; nothing was published."""

    exit_code = 5


class Unusable(ValueError):
    """transformers opens a tokenizer or processor, but mdsmix cannot use it. The message is the
    reason, with what to do, as the end of a sentence.

    It is raised in the process that opens them. `tokenizer.snapshot` makes an Unreachable of it.
    """


UNUSABLE = f"{Unusable.__name__}: "
"The beginning of the answer of that process if it has raised an Unusable (`try_to_answer`)."
