"""First looks at tokenizers without the start of a process that imports transformers, which takes 2.5 s of processor time: each
is a fork of one that stands by."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mdsmix.encode import pretrained, transformers_process
from tests.forked import Standing

BY_IMPORT = re.compile("HF_.*|HOME|XDG_CACHE_HOME")
"The variables that are read when the libraries are imported: a look with others has a process of its own."
IMPORTS = "from transformers import AutoTokenizer, PreTrainedTokenizerFast"
LOOK = "from mdsmix.encode import transformers_process; transformers_process.main()"


class Looker:
    """`look` is as `pretrained._look`."""

    def __init__(self) -> None:
        self._by_import, self._pid = _by_import(), os.getpid()
        self.standing = Standing(
            IMPORTS, transformers_process.WITHOUT | {"TRANSFORMERS_VERBOSITY": "error"}
        )

    def look(self, asked: str) -> subprocess.CompletedProcess[str]:
        if (_by_import(), os.getpid()) != (self._by_import, self._pid):
            return _LOOK(asked)
        return self.standing.start(LOOK, given=asked).wait()


_LOOK = pretrained._look


@contextmanager
def standing_by() -> Iterator[None]:
    """First looks of this process are forks of one that is ready."""
    looker = Looker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "_look", looker.look)
        yield
    looker.standing.close()


def _by_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if BY_IMPORT.fullmatch(name)}
