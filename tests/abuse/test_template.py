"""A chat template from anyone reaches nothing outside the conversation, and one that cannot be read is a sentence."""

import json
import shutil

import pytest

from mdsmix.encode.chat import open_template
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, RecordRefused
from tests.abuse.conftest import Arena
from tests.converting import chats, manifest_of, quarantined, write_jsonl

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
REACHING = {
    "the classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the globals": "{{ cycler.__init__.__globals__.os.system('touch ../sprung') }}",
    "the frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "a format": "{{ '{0.__class__.__init__.__globals__}'.format(range) }}",
    "a file": "{% include '../precious.jsonl' %}",
    "another template": "{% import '../precious.jsonl' as p %}{% extends 'a' %}",
    "the environment": "{{ self.environment.loader }}{{ self._TemplateReference__context.environment.x.y }}",
    "what was said": "{% set _ = messages.append(1) %}",
}
UNREADABLE = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "loops": "{% for a in messages %}" * 500 + "{% endfor %}" * 500,
    "digits": "{{ " + "9" * 100_000 + " }}",
    "no template": "{% for",
    "no such filter": "{{ 1 | system('id') }}",
}


def test_what_reaches_out_fails_on_each_conversation_and_what_cannot_be_read_is_a_sentence() -> (
    None
):
    for name, source in REACHING.items():
        template = open_template(source, {"bos_token": "<s>"}, "2026-01-01")
        with pytest.raises(RecordRefused, match="template_error"):
            pytest.fail(f"{name}: {template.turns(Conversation(MESSAGES))}")
    for source in UNREADABLE.values():
        with pytest.raises(RecipeError, match="correct its chat_template") as refusal:
            open_template(source, {}, "2026-01-01")
        assert len(str(refusal.value)) < 400


def test_the_command_sets_aside_what_a_template_fails_on(arena: Arena) -> None:
    folder = arena.home / "tokenizer"
    shutil.copytree(arena.tokenizer, folder)
    source = (
        f"{{% if messages[0].content == '7' %}}{REACHING['the globals']}{{% endif %}}"
        "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": source}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    said = [[{"role": "user", "content": str(n)}, *MESSAGES[1:]] for n in range(10)]
    write_jsonl(arena.home / "a.jsonl", [{"messages": messages} for messages in said])
    recipe = arena.recipe(tokenizer=folder, streams={"chat": chats("a.jsonl")})
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    stream = arena.out / "chat" / "train"
    records = manifest_of(stream).records
    assert (records.written, records.quarantined) == (9, {"template_error": 1})
    assert [bad["line"] for bad in quarantined(stream)] == [8]
