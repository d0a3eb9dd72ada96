"""Sources and tokenizers that a seed makes, by nothing that a release of Python or of a library may
make otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.corpus import write_config

Record = dict[str, Any]
SPECIALS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|image|>")
TEMPLATE = (
    "{% if style is defined and style == 'dated' %}{{ date_string }}\n{% endif %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
    "{% if style is defined and style == 'forgets' and m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{% elif m.content is not none %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if style is defined and style == 'opens' %}<think>\n{% endif %}{% endif %}"
)
"""ChatML with tools and images; `style` makes it print the day, forget the reasoning of earlier
answers, or begin an answer by it.
"""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
ROLE_ENDED = (
    "<s>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n{% else %}<|{{ m.role }}|>\n{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% elif m.content is not none %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"As GLM-4.5's: no token ends a turn, and the next role's token is what stops generation."
TOOL_USE = TEMPLATE.replace("<|im_start|>tools\n", "<|im_start|>tools\nYou may use these:\n")
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_USE}]
"Templates by name: transformers takes `tool_use` for a conversation with tools."


class Draws:
    """Numbers that follow from a name."""

    def __init__(self, seed: str) -> None:
        self._seed, self._count = seed, 0

    def below(self, end: int) -> int:
        self._count += 1
        digest = blake2b(f"{self._seed} {self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % end

    def one(self, among: Sequence[Any]) -> Any:
        return among[self.below(len(among))]

    def is_one_in(self, count: int) -> bool:
        return not self.below(count)


def _words() -> list[str]:
    draws = Draws("words")
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er")]
    made = ["".join(draws.one(syllables) for _ in range(1 + draws.below(3))) for _ in range(240)]
    others = ("naïve", "Ærø", "日本", "🙂", "don't", "3.14", "2,048", "x==1", '"quoted"', "a\tb")
    return [*made, *others]


WORDS = _words()


def text(draws: Draws, least: int, most: int) -> str:
    """Sentences of so many words in all, some of them over several lines."""
    words = [draws.one(WORDS) for _ in range(least + draws.below(most - least + 1))]
    ends = [draws.one((" ", " ", " ", " ", ". ", ", ", "\n", "\n\n")) for _ in words]
    return "".join(w + e for w, e in zip(words, ends, strict=True)).strip()


def documents(seed: str, count: int) -> Iterator[Record]:
    """Documents with fields beside the text; one in nine says what an earlier one says, some are
    empty or hold special tokens.
    """
    draws, said = Draws(seed), list[str]()
    for number in range(count):
        words = text(draws, 1, 60) if draws.is_one_in(5) else text(draws, 10, 30)
        if number % 11 == 4:
            words += draws.one((" </s> ", " <|im_end|>", "<s>")) + draws.one(WORDS)
        said.append(draws.one(said) if number % 9 == 8 else words)
        if number % 23 == 22:
            said[-1] = ""
        beside = {"lang": draws.one(("en", "de")), "score": draws.below(100) / 100}
        yield {"text": said[-1], "id": f"d{number}", "meta": {"title": draws.one(WORDS)}, **beside}


def talks(seed: str, count: int) -> Iterator[list[tuple[str, str]]]:
    """Conversations as (role, text): some with a system message, reasoning or special tokens, too
    long, or out of order.
    """
    draws, kept = Draws(seed), list[list[tuple[str, str]]]()
    for number in range(count):
        talk = [("system", text(draws, 2, 6))] if draws.is_one_in(3) else []
        for _ in range(1 + draws.below(3)):
            thought = f"<think>{text(draws, 1, 4)}</think>" if draws.is_one_in(4) else ""
            long = 40 if draws.is_one_in(12) else 9
            talk += [("user", text(draws, 2, long)), ("assistant", thought + text(draws, 1, long))]
        if number % 13 == 5:
            talk.insert(-1, ("user", text(draws, 2, 5)))
        if number % 17 == 9:
            talk[-2] = ("user", f"{talk[-2][1]}<|im_end|>")
        if number % 19 == 3:
            talk[-1] = ("assistant", "")
        if number % 29 == 7:
            talk = talk[:-1]
        kept.append(draws.one(kept) if number % 9 == 8 else talk)
        yield kept[-1]


def pairs(seed: str, count: int) -> Iterator[Record]:
    """The last question and answer of talks."""
    for number, talk in enumerate(talks(seed, count)):
        (_, prompt), (_, response) = talk[-2:] if len(talk) > 1 else (("", ""), talk[-1])
        yield {"prompt": prompt, "response": response, "id": number}


def messages(seed: str, count: int) -> Iterator[Record]:
    for talk in talks(seed, count):
        yield {"messages": [{"role": role, "content": said} for role, said in talk]}


def judged(seed: str, count: int) -> Iterator[Record]:
    """Talks whose last message is an answer that was judged, with another answer to the same prompt
    and the last question and answer as texts. Some labels are no labels.
    """
    draws = Draws(f"{seed} other")
    for number, record in enumerate(messages(seed, count)):
        *prompt, answer = record["messages"]
        other = {"role": "assistant", "content": text(draws, 1, 12)}
        yield {
            "prompt": prompt,
            "completion": [answer],
            "other": [other],
            "label": "good" if number % 20 == 19 else number % 3 > 0,
            "question": prompt[-1]["content"] if prompt else "",
            "said": answer["content"],
        }


def openai(seed: str, count: int) -> Iterator[Record]:
    """Calls of tools and their results, weights, null entries, parts, and a call that nothing
    describes.
    """
    draws = Draws(f"{seed} tools")
    at = {"type": "object", "properties": {"at": {"type": "string"}}}
    tool = {"name": "look", "description": "looks", "parameters": at}
    for number, record in enumerate(messages(seed, count)):
        said: list[Record] = record["messages"]
        if number % 3 == 1:
            function = {"name": "look", "arguments": json.dumps({"at": draws.one(WORDS)})}
            call = {"id": f"c{number}", "type": "function", "function": function}
            asked = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": f"c{number}", "content": text(draws, 1, 4)}
            said[-1:-1] = [asked, result]
            record["tools"] = [] if number % 21 == 1 else [{"type": "function", "function": tool}]
        if number % 4 == 2:
            said[-1]["weight"] = 1
            said[-1]["name"] = None
        if number % 5 == 3:
            said[0]["content"] = [{"type": "text", "text": said[0]["content"]}]
        if number % 10 == 6 and len(said) > 1:
            said[1]["weight"] = 0 if said[1]["role"] == "assistant" else 1
        yield record


def marked(seed: str, count: int, key: str, no: Any, yes: Any) -> Iterator[Record]:
    """Messages that say by a key whether they are trained: some with `yes`, some not at all."""
    draws = Draws(f"{seed} {key}")
    for record in messages(seed, count):
        for message in record["messages"]:
            if message["role"] == "assistant" and not draws.is_one_in(3):
                message[key] = draws.one((no, yes))
        yield record


def masked(seed: str, count: int) -> Iterator[Record]:
    """Messages with a list beside them that says which of them are trained; the last always is."""
    draws = Draws(f"{seed} masks")
    for record in messages(seed, count):
        is_answer = [message["role"] == "assistant" for message in record["messages"]]
        mask = [int(each and not draws.is_one_in(3)) for each in is_answer]
        mask[-1] = int(is_answer[-1])
        yield record | {"loss_mask": mask}


def sharegpt(seed: str, count: int, **tags: str) -> Iterator[Record]:
    words = {"user": "human", "assistant": "gpt", "from": "from", "value": "value"} | tags
    call = json.dumps({"name": "look", "arguments": {"at": "it"}})
    used = [{"from": "function_call", "value": call}, {"from": "observation", "value": "seen"}]
    for number, talk in enumerate(talks(seed, count)):
        system, rest = (talk[0][1], talk[1:]) if talk[0][0] == "system" else ("", talk)
        said = [{words["from"]: words[role], words["value"]: content} for role, content in rest]
        tools = ""
        if number % 7 == 2 and not tags:
            said[-1:-1] = used
            tools = json.dumps([{"name": "look", "parameters": {}}])
        yield {"conversations": said, "system": system, "tools": tools}


def alpaca(seed: str, count: int) -> Iterator[Record]:
    for number, talk in enumerate(talks(seed, count)):
        (*past, (_, asked), (_, answer)) = talk if len(talk) > 1 else (*talk, ("", ""))
        history = [s for role, s in past if role != "system"]
        exchanges = [list(pair) for pair in zip(history[::2], history[1::2], strict=False)]
        asks = {"instruction": asked, "input": "" if number % 2 else "this"}
        yield asks | {"output": answer, "history": exchanges, "system": ""}


def rounds(seed: str, count: int) -> Iterator[Record]:
    for talk in talks(seed, count):
        said = [s for role, s in talk if role != "system"]
        both = zip(said[::2], said[1::2], strict=False)
        yield {"conversation": [{"human": a, "assistant": b} for a, b in both]}


def pictured(seed: str, count: int, images: Sequence[str]) -> Iterator[tuple[Record, list[str]]]:
    """LLaVA's records, and the images of each; one in eleven lacks an image, one in seven is of
    text.
    """
    draws = Draws(f"{seed} images")
    for number, record in enumerate(sharegpt(seed, count)):
        said = [m for m in record["conversations"] if m["from"] in ("human", "gpt")]
        named = [] if number % 7 == 6 else [draws.one(images) for _ in range(1 + draws.below(2))]
        if said and named and said[0]["from"] == "human":
            said[0]["value"] = "<image>\n" * len(named) + said[0]["value"]
        yield {"conversations": said}, named[1:] if number % 11 == 5 else named


def tokenizer(
    folder: Path,
    is_wide: bool = False,
    template: str | list[dict[str, str]] = TEMPLATE,
    roles: Sequence[str] = (),
) -> Path:
    """Make a byte-level BPE whose merges spell the words from left to right.

    Args:
        is_wide: it adds BOS and EOS itself, and has ids for int32.
        template: its chat template, or several by name.
        roles: further special tokens; those of the user and of a tool's result stop a generation.
    """
    specials = [*SPECIALS, *roles]
    letters = _byte_letters()
    vocabulary = {each: number for number, each in enumerate([*specials, *letters])}
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS[:240]:
        spelled = [letters[byte] for byte in f" {word}".encode()]
        for end in range(1, len(spelled)):
            merges["".join(spelled[:end]), spelled[end]] = None
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    if is_wide:
        vocabulary["unused"] = 70_000
    model = Tokenizer(models.BPE(vocabulary, [*merges]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel(add_prefix_space=False)
    model.add_special_tokens(specials)
    if is_wide:
        ends = [(token, vocabulary[token]) for token in SPECIALS[:2]]
        pair = "<s> $A </s> $B:1"
        model.post_processor = processors.TemplateProcessing("<s> $A </s>", pair, ends)
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    seen = {"extra_special_tokens": {"image_token": "<|image|>"}}
    write_config(folder, specials, **named, **seen, chat_template=template)
    if roles:
        stops = [vocabulary[token] for token in ("</s>", "<|user|>", "<|observation|>")]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


def _byte_letters() -> list[str]:
    """The letter that GPT-2's byte-level BPE writes for each byte."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
