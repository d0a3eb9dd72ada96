"""The last token that is trained of an answer stops the model, or the user is told. Under a
template without an end of turn the next role's token is what stops it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.encode.labels import Turns, move_stop_tokens
from mdsmix.encode.template_rules import TEMPLATE_RULES
from mdsmix.ragged import Ragged
from mdsmix.recipe import TokenizerSpec
from mdsmix.record import Conversation
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import locate
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from mdsmix.tokenizer.decoder import open_decoder
from mdsmix.tokenizer.published import fetch_folder
from mdsmix.tokenizer.transformers_five import GENERATION_CONFIG
from tests.converting import (
    Web,
    chats,
    done,
    files,
    manifest_of,
    mdsmix,
    pairs,
    refused,
    samples,
    tokens,
)
from tests.styles import chats as encoder_of
from tests.styles import in_turn, lists, with_tokens
from tests.tool_styles import decode_arguments, draw_conversations

ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
STOPS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
# As GLM-4.5's: a call and an answer end where the next role begins.
GLM = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Apriel's: the end of a turn is printed once another message follows, behind a newline.
LATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' and not loop.last %}{{ '\n<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = "{% for m in messages %}{{ '\n' + m.role }}: {{ m.content }}{% endfor %}{{ '\nassistant: ' if add_generation_prompt }}"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
TALKS = [
    in_turn("Why?", "So."),
    in_turn("Why?", "So.", "And?", "Now."),
    in_turn("One?", "First.", "Two?", "Second one.", "Three?", "Third."),
]
ALL = {"target_responses": "all"}


def glm(plain: Path, folder: Path, stops: Any = None, template: str = GLM) -> Path:
    """A tokenizer whose EOS is `<|endoftext|>`."""
    special = [*ROLES, "<|end|>", "<|endoftext|>"]
    return with_tokens(plain, folder, template, special, stops=stops, eos_token="<|endoftext|>")


def name_stops(web: Web, stops: list[str]) -> None:
    """Write `tokenizer.stop_tokens` into the recipe."""
    recipe = json.loads(web.recipe.read_text())
    recipe["tokenizer"]["stop_tokens"] = stops
    web.recipe.write_text(json.dumps(recipe))


def trained(sample: Any) -> list[tuple[int, bool]]:
    """Each token of a row with whether `target_responses: all` trains it."""
    if "loss_mask" in sample:
        return [*zip(sample["input_ids"].tolist(), map(bool, sample["loss_mask"]), strict=True)]
    sides = [
        (turn[key], key == "labels") for turn in sample["turns"] for key in ("input_ids", "labels")
    ]
    return [(token, is_trained) for ids, is_trained in sides for token in ids]


def wanted(known: Any, messages: list[Any], tools: Any = None) -> list[tuple[int, bool]]:
    """The tokens of transformers: trained behind `<|assistant|>`, up to and with the token of the
    next role.
    """
    text = known.apply_chat_template(messages, tools=tools, tokenize=False)
    begins, found, is_trained = (
        {*known.convert_tokens_to_ids(ROLES)},
        list[tuple[int, bool]](),
        False,
    )
    assistant = known.convert_tokens_to_ids("<|assistant|>")
    for token in known(text, add_special_tokens=False).input_ids:
        found.append((token, is_trained))
        is_trained = token == assistant if token in begins else is_trained
    return found


@pytest.mark.parametrize("stops", [STOPS, "tokenizer.stop_tokens"])
def test_the_token_of_the_next_role_is_trained_where_it_stops(
    stops: Any, web: Web, tokenizer_folder: Path
) -> None:
    """Known from generation_config.json, or from the recipe: of questions and results of tools, in
    turns and in packed rows.
    """
    from transformers import AutoTokenizer

    named = stops if isinstance(stops, list) else None
    web.tokenizer = glm(tokenizer_folder, web.folder / "t", named)
    known = AutoTokenizer.from_pretrained(web.tokenizer)

    def convert(stream: dict[str, Any]) -> None:
        web.says(stream, max_seq_len=4096, special_tokens_in_text="allow", **ALL)
        if not named:
            name_stops(web, STOPS)
        web.runs(reencode=True)

    tooled = [(messages, tools) for messages, tools in draw_conversations(60) if tools]
    web.holds([{"messages": each} for each in TALKS], "a.jsonl")
    web.holds([{"messages": m, "tools": json.dumps(t)} for m, t in tooled], "b.jsonl")
    eos, user = known.convert_tokens_to_ids(["<|endoftext|>", "<|user|>"])
    convert(chats("a.jsonl"))
    rows = [trained(sample) for sample in samples(web.train)]
    assert rows == [wanted(known, each) for each in TALKS]
    assert sum(pair == (user, True) for row in rows for pair in row) == 3
    encoding = web.manifest.encoding
    assert encoding.stop_ids == known.convert_tokens_to_ids(STOPS)

    source = {"path": "b.jsonl", "messages": "messages", "tools": "tools"}
    convert({"kind": "finetuning", "source": source})
    rows = [trained(sample) for sample in samples(web.train)]
    assert rows == [wanted(known, decode_arguments(m), t) for m, t in tooled]
    results = known.convert_tokens_to_ids("<|observation|>")
    assert (results, True) in {pair for row in rows for pair in row}

    convert(chats("a.jsonl", pack=True))
    [packed] = samples(web.train)
    ended = [pair for each in TALKS for pair in [*wanted(known, each), (eos, True)]]
    assert trained(packed) == ended


def test_a_conversation_that_is_cut_ends_as_a_final_answer(
    web: Web, tokenizer_folder: Path
) -> None:
    """Under too_long: first_turns there is no next turn, and so is it in a row of an answer's own:
    EOS stops it.
    """
    web.tokenizer = glm(tokenizer_folder, web.folder / "t", STOPS)
    talk = in_turn("One?", "First.", "Two?", "Second one.", "Three?", "word " * 60)
    web.holds([{"messages": talk}])
    web.says(chats("a.jsonl", too_long="first_turns"), max_seq_len=40, **ALL).run()
    [sample] = samples(web.train)
    user = json.loads((web.tokenizer / GENERATION_CONFIG).read_text())["eos_token_id"][1]
    first, second = sample["turns"]
    assert (first["labels"][-1], second["input_ids"][0] == user) == (user, False)
    assert second["labels"][-1] != user


def test_only_streams_that_it_shapes_get_another_key(web: Web, tokenizer_folder: Path) -> None:
    """The rows under other policies and templates stay, and their manifests, whether or not the
    stop tokens are known.
    """
    web.holds([{"messages": each} for each in TALKS])
    for template, settings, is_shaped in (
        (GLM, {}, False),
        (GLM, ALL | {"target_prompts": "all"}, False),
        (CHATML, ALL, False),
        (GLM, ALL, True),
        (GLM, ALL | {"target_prompts": "length>=3"}, True),
    ):
        published = []
        for stops in (None, STOPS):
            web.tokenizer = web.folder / f"t{len(files(web.folder))}"
            glm(tokenizer_folder, web.tokenizer, stops, template)
            web.says(chats("a.jsonl"), max_seq_len=256, **settings).runs(reencode=True)
            manifest = web.manifest
            card = replace(manifest.tokenizer, name="")
            published.append((replace(manifest, tokenizer=card), samples(web.train)))
        (before, rows), (after, others) = published
        assert (before != after) == (rows != others) == is_shaped, (template, settings)
        assert [*map(tokens, rows)] == [*map(tokens, others)]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=2, max_size=6), max_size=4),
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from([[], [[4]], [[4, 4], [4]]]),
)
def test_a_stop_token_moves_to_the_end_before(
    drawn: list[list[list[int]]], stops: set[int], leads: list[list[int]]
) -> None:
    """As it is said for one turn after the other; the tokens of a sample stay in their order."""
    rows = [row[: len(row) // 2 * 2] for row in drawn]
    sides = [side for row in rows for side in row]
    turns = Turns(
        Ragged.from_rows(sides, np.int64), np.array([len(row) // 2 for row in rows], np.int64)
    )
    found = lists(move_stop_tokens(turns, [*stops], leads).ids)
    expected = list[list[int]]()
    for row in rows:
        made = [[*side] for side in row]
        for at in range(2, len(row), 2):
            response, prompt = made[at - 1], made[at]
            for lead in ([], *leads):
                end = len(lead)
                if (
                    row[at - 1]
                    and len(prompt) > end + 1
                    and row[at - 1][-1] not in stops
                    and prompt[:end] == lead
                    and prompt[end] in stops
                ):
                    made[at - 1], made[at] = response + prompt[: end + 1], prompt[end + 1 :]
                    break
        expected += made
    assert found == expected


def test_a_newline_before_the_stop_is_trained_too(web: Web, tokenizer_folder: Path) -> None:
    """The template prints the end of a turn once another message follows, so it is in the next
    prompt.
    """
    web.tokenizer = glm(tokenizer_folder, web.folder / "t", ["<|end|>"], LATE)
    web.holds([{"messages": TALKS[1]}])
    web.says(chats("a.jsonl"), max_seq_len=256, **ALL).run()
    [sample] = samples(web.train)
    decoded = open_tokenizer(TokenizerSpec(name=str(web.tokenizer)))
    text = open_decoder(decoded).text
    said = [[text(turn[key]) for key in ("input_ids", "labels")] for turn in sample["turns"]]
    assert said == [
        ["<|user|>Why?<|assistant|>", "So.\n<|end|>"],
        ["<|user|>And?<|assistant|>", "Now."],
    ]


HEALTHY = [
    # template, EOS, tokens of generation_config.json
    (CHATML, "<|im_end|>", None),
    (CHATML, "<|im_end|>", ["<|im_end|>"]),
    (CHATML, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
    (
        CHATML.replace("<|im_end|>\n", "<|im_end|>"),
        "<|endoftext|>",
        ["<|im_end|>", "<|endoftext|>"],
    ),
    (CHATML.replace("<|im_end|>\n", "<|endoftext|>"), "<|endoftext|>", None),
    (CHATML.replace("<|im_end|>\n", "<|endoftext|>"), "<|endoftext|>", "<|endoftext|>"),
    (GLM, "<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
]
UNSTOPPED = [
    # template, EOS, tokens of generation_config.json, policies, what is said, in `check` as
    (
        CHATML,
        "<|endoftext|>",
        None,
        ALL,
        "it is not known whether a model stops there",
        "answer-end-unknown",
    ),
    (
        CHATML,
        "<|endoftext|>",
        ["<|endoftext|>"],
        ALL,
        "ends in <|im_end|>, which is not among the tokens",
        "answer-end-untrained",
    ),
    (
        GLM,
        "<|endoftext|>",
        None,
        ALL,
        "prints <|user|> of that message after it, which is not known to stop",
        "answer-end-untrained",
    ),
    (
        GLM,
        "<|endoftext|>",
        ["<|endoftext|>", "<|end|>"],
        ALL,
        "prints <|user|> of that message after it, which is not among those",
        "answer-end-untrained",
    ),
    (
        PLAIN,
        "<|endoftext|>",
        ["<|endoftext|>"],
        ALL,
        "the text goes on with '\\nuser: '",
        "answer-end-untrained",
    ),
    (
        GLM,
        "<|endoftext|>",
        ["<|user|>"],
        {},
        "ends in <|endoftext|>, the EOS that the loader appends, which is not among",
        "answer-end-untrained",
    ),
]


def test_of_an_answer_that_nothing_stops_it_is_told(web: Web, tokenizer_folder: Path) -> None:
    """In init, convert and check, with the reason and the fix; of healthy templates nothing is. The
    fix works.
    """
    web.holds([{"messages": each} for each in TALKS])
    cases: list[Any] = [(*each, ALL, "", "") for each in HEALTHY]
    cases += [(*each, {}, "", "") for each in HEALTHY] + UNSTOPPED
    for number, (template, eos, stops, policies, said, rule) in enumerate(cases):
        special = [*ROLES, "<|end|>"]
        web.tokenizer = web.folder / f"t{number}"
        with_tokens(tokenizer_folder, web.tokenizer, template, special, stops=stops, eos_token=eos)
        web.says(chats("a.jsonl"), max_seq_len=256, **policies)
        converted = done("convert", web.recipe, "--reencode").out
        found = json.loads(mdsmix("check", web.recipe, "--json").out)["findings"]
        ends = {f["id"]: f["message"] for f in found if f["id"].startswith("answer-end")}
        assert [*ends] == ([rule] if rule else []), (number, ends)
        told = "stop_tokens" in converted or "ends an answer" in converted
        assert told == bool(rule), converted
        if rule:
            assert said in ends[rule]
            assert said in converted
            assert ("WARNING" in converted) == (rule == "answer-end-untrained")
        if said and "goes on" not in said:
            fix = converted.partition("tokenizer.stop_tokens: ")[2].partition("]")[0] + "]"
            name_stops(web, json.loads(fix))
            assert "stop_tokens" not in done("convert", web.recipe).out
            assert "answer-end" not in mdsmix("check", web.recipe).out


def test_answers_and_calls_are_told_once_with_all_tokens_to_name(lettered: Tokenizer) -> None:
    calls = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ tools | tojson if tools }}",
    )
    for template, stops, level in (
        (GLM, ["<|user|>", "<|observation|>"], "warning"),
        (calls, ["<|im_end|>"], "note"),
    ):
        added = {"</s>": 1} | {token: 2 + place for place, token in enumerate(stops)}
        special = {"special_tokens": [*added], "special_ids": [*added.values()]}
        known = replace(lettered, added_tokens=added, chat_template=template, **special)
        encoder = encoder_of(known, template, VARIABLES, target_responses="all")
        encoder.encoding = replace(encoder.encoding, fields={"messages": "m", "tools": "t"})
        notes = encoder.end_notes(replace(known, template_variables=VARIABLES))
        assert [note.level for note in notes] == [level] * len(stops)
        for note, token in zip(notes, stops, strict=True):
            assert token in note.sentence
            assert f"stop_tokens: {json.dumps(['</s>', *stops])}" in note.fix


def test_init_says_how_answers_end(web: Web, tokenizer_folder: Path) -> None:
    """That EOS is trained twice too, and it shows the EOS that the loader appends."""
    web.holds([{"messages": TALKS[0]}])
    ends = {}
    for name, template, stops in (("twice", CHATML, None), ("next", GLM, ["<|user|>"])):
        folder = web.folder / name
        eos = "<|im_end|>" if name == "twice" else "<|endoftext|>"
        with_tokens(tokenizer_folder, folder, template, ROLES, stops=stops, eos_token=eos)
        told = done("init", web.folder / "a.jsonl", "--tokenizer", folder)
        ends[name] = told.out + told.err
    assert "⟦So.⟨<|im_end|>⟩\n⟧⟦⟨<|im_end|>⟩⟧" in ends["twice"]
    assert "<|im_end|> to the last one of a row: it is trained twice there" in ends["twice"]
    assert "WARNING: a: the last answer of a row ends in <|endoftext|>" in ends["next"]
    assert "⟦So.⟧⟦⟨<|endoftext|>⟩⟧" in ends["next"]


def test_inspect_shows_the_eos_that_a_loader_appends(web: Web, tokenizer_folder: Path) -> None:
    """To a row that has room and does not end in it, of chats and of pairs; never to a
    packed row.
    """
    web.tokenizer = with_tokens(tokenizer_folder, web.folder / "t", CHATML, eos_token="<|im_end|>")
    eos = open_tokenizer(TokenizerSpec(name=str(web.tokenizer))).eos_id
    web.holds([{"messages": TALKS[0]}])
    web.holds([{"prompt": "Why?", "response": "So."}], "b.jsonl")
    length = len(tokens_of(web, chats("a.jsonl")))
    for stream, longest, appended in (
        (chats("a.jsonl"), length, 0),
        (chats("a.jsonl"), length + 1, 1),
        (chats("a.jsonl", columns="compact"), length + 1, 1),
        (pairs("b.jsonl"), 64, 1),
        (pairs("b.jsonl", pack=True), 64, 0),
    ):
        web.says(stream, max_seq_len=longest).runs(reencode=True)
        [shown] = json.loads(done("inspect", web.train, "--json").out)["shown"]
        segments = shown["sample"]
        assert [part["ids"] for part in segments if part["appended"]] == [[eos]] * appended
        assert sum(part["trained"] for part in segments if part["appended"]) == appended
        told = done("inspect", web.train).out
        assert ("the EOS that the loader appends" in told) == bool(appended)
        is_chat = "messages" in stream["source"]
        assert ("EOS is trained twice" in told) == bool(is_chat and appended)


def tokens_of(web: Web, stream: dict[str, Any]) -> list[int]:
    """The tokens of the one row of a stream."""
    web.says(stream, max_seq_len=256).run()
    [row] = samples(web.train)
    return tokens(row)


def test_stop_tokens_of_a_recipe_are_tokens_of_the_tokenizer(
    web: Web, tokenizer_folder: Path
) -> None:
    web.tokenizer = glm(tokenizer_folder, web.folder / "t", STOPS)
    web.holds([{"messages": TALKS[0]}])
    web.says(chats("a.jsonl"))
    name_stops(web, ["<|usr|>"])
    refused(mdsmix("convert", web.recipe), 2, "'<|usr|>'", "<|user|>")
    web.says({"kind": "pretraining", "source": {"path": "a.jsonl", "text": "x"}})
    name_stops(web, ["<|user|>"])
    refused(mdsmix("convert", web.recipe), 2, "tokenizer.stop_tokens", "no stream has messages")


def test_stop_ids_are_those_of_generation_config(tmp_path: Path, tokenizer_folder: Path) -> None:
    """As transformers' GenerationConfig reads them; a file without them names none."""
    from transformers import GenerationConfig

    for number, stops in enumerate((STOPS, "<|user|>", None, [])):
        folder = glm(tokenizer_folder, tmp_path / str(number), stops)
        theirs: Any = []
        if stops is not None:
            theirs = GenerationConfig.from_pretrained(folder).eos_token_id or []
        found = open_tokenizer(TokenizerSpec(name=str(folder))).stop_ids
        assert found == (theirs if isinstance(theirs, list) else [theirs])
    for content in ("[]", "{", '{"eos_token_id": "<|endoftext|>"}', '{"eos_token_id": true}'):
        (folder / GENERATION_CONFIG).write_text(content)
        assert open_tokenizer(TokenizerSpec(name=str(folder))).stop_ids == []


def test_the_published_tokenizer_knows_them(web: Web, tokenizer_folder: Path) -> None:
    web.tokenizer = glm(tokenizer_folder, web.folder / "t", STOPS)
    web.holds([{"messages": each} for each in TALKS])
    web.says(chats("a.jsonl"), max_seq_len=256, **ALL).run()
    rows = samples(web.train)
    own = open_tokenizer(TokenizerSpec(name=str(web.tokenizer)))
    folder = fetch_folder(locate(str(web.out / TokenizerCard.from_tokenizer(own).folder_name)))
    assert folder is not None
    web.tokenizer = folder
    web.says(chats("a.jsonl"), max_seq_len=256, **ALL).runs(reencode=True)
    assert samples(web.train) == rows


def test_streams_from_before_are_outdated(
    web: Web, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the template ends answers so, and the rule was not there when they were made."""
    web.tokenizer = glm(tokenizer_folder, web.folder / "t", STOPS)
    web.holds([{"messages": each} for each in TALKS])
    web.says(chats("a.jsonl"), max_seq_len=256, **ALL)
    with monkeypatch.context() as patch:
        patch.delitem(TEMPLATE_RULES, "template.stop_tokens")
        web.run()
        assert web.manifest.encoding.rules == {}
    checked = mdsmix("check", web.recipe).out
    assert "rows-outdated" in checked
    assert "template.stop_tokens was version 1" in checked
    web.run()
    assert manifest_of(web.train).encoding.rules == {"template.stop_tokens": 2}
    assert "rows-outdated" not in mdsmix("check", web.recipe).out
    # A training YAML names no stop tokens; the manifest has them.
    assert "answer-end" not in mdsmix("check", web.train).out


def test_a_length_counts_a_prompt_without_the_token(lettered: Tokenizer) -> None:
    """`length>=N` measures what is stored as a prompt, as the collator does."""
    stops = replace(lettered, added_tokens={"<s>": 0, "</s>": 1, "<|im_start|>": 2}, stop_ids=[2])
    source = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' }}{{ m.content }}{% endfor %}"
    )
    for length, losses in ((3, 7), (2, 10)):
        encoder = encoder_of(
            stops, source, target_responses="all", target_prompts=f"length>={length}"
        )
        encoder.encoding = replace(
            encoder.encoding, rules={"template.stop_tokens": 2}, stop_ids=[2]
        )
        made = encoder.encode([Conversation(in_turn("a", "bcd", "ef", "gh"))])
        # bcd with <|im_start|>, gh, and EOS; of two letters or more ef, and a behind <|im_start|>
        # too.
        assert made.totals.loss_tokens == losses
