"""Limits of rendering chat templates: a template that never ends, or makes endless text, ends the run.

An alarm looks every 30 seconds whether the same messages are still being rendered, and the system refuses a batch more
memory than any conversation needs. Both depend on the machine, so neither sets a record aside: the run ends with one
sentence, and every run that ends well gives the same bytes. Code in C cannot be interrupted by an alarm; there the engine,
which watches its workers, takes the worker for hung.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.errors import RecipeError
from mdsmix.typed import brief

if TYPE_CHECKING:
    from jinja2 import Template

SECONDS = 30.0
"A rendering is ended after one to two of these; it takes some 20 us."
ROOM_BYTES = 256 << 20
"What a batch of conversations may take while it is rendered, besides BYTES_EACH for every character of it."
BYTES_EACH = 64
"A character takes up to 4 bytes, and its text is kept in about 5 copies when a conversation is cut into turns."
EXHAUSTED = (MemoryError, TimeoutError)
"What a rendering raises that is out of bounds; anything else that it raises is the conversation's fault."

Messages = Sequence[Mapping[str, Any]]


def render(
    template: Template,
    messages: Messages,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    tools: list[Any] | None = None,
) -> str:
    """The text of `messages`, with the variables that transformers passes: `Template.render` would copy the globals twice and rewrite
    tracebacks, a twentieth of a conversion of chats."""
    environment: Any = template.environment
    given = {
        **template.globals,
        **variables,
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    context = environment.context_class(environment, given, template.name, template.blocks)
    environment.rendered, environment.is_rendering = messages, True
    try:
        return environment.concat(template.root_render_func(context))  # type: ignore[no-any-return]
    finally:
        environment.is_rendering = False


@contextmanager
def bounded(sandbox: Any, characters: int) -> Iterator[None]:
    """Inside this context each rendering has limited time and all together limited memory; RecipeError where one takes more.

    Only the main thread of a process hears an alarm, and only Linux refuses memory; a worker is watched from outside too.

    Args:
        characters: of the conversations that are rendered.
    """
    room = ROOM_BYTES + BYTES_EACH * characters
    try:
        with _alarm(sandbox), _memory(room):
            yield
    except EXHAUSTED as error:
        kind = "time" if isinstance(error, TimeoutError) else "memory"
        most = f"{SECONDS:.0f} s" if kind == "time" else f"{room >> 20:,} MiB"
        first = sandbox.rendered[0].get("content") if sandbox.rendered else ""
        raise RecipeError(
            f"The chat template of the tokenizer takes more than {most} of {kind} over the conversation that begins with "
            f"{brief(str(first)[:80])}, so that the conversion would not end: correct its chat_template."
        ) from None


@contextmanager
def _alarm(sandbox: Any) -> Iterator[None]:
    """TimeoutError where the same messages are rendered at two looks, and only there: raised while an error is on its way out of
    the context, it would leave the alarm set for later code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: Messages | None = None

    def look(*_: Any) -> None:
        nonlocal seen
        if sandbox.is_rendering and sandbox.rendered is seen:
            # The rendering's frames are let go meanwhile, which takes long where they hold much: the next look is not to find it again.
            signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS, SECONDS)
            raise TimeoutError
        seen = sandbox.rendered

    handler = signal.signal(signal.SIGALRM, look)
    others = signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _memory(room: int) -> Iterator[None]:
    """MemoryError where this process takes so many bytes more than it has."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    held = int(statm.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (min([held + room, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
