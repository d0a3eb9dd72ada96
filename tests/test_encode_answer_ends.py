"""The last trained token of an answer stops the model, or the user gets a note. With a template
without an end of turn, the next role's token stops it.
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
    Project,
    assert_refused,
    chats,
    manifest_of,
    mdsmix,
    pairs,
    read_files,
    read_samples,
    run_ok,
    tokens,
)
from tests.styles import add_tokens, make_dialogue, to_lists
from tests.styles import open_chats as encoder_of
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
    make_dialogue("Why?", "So."),
    make_dialogue("Why?", "So.", "And?", "Now."),
    make_dialogue("One?", "First.", "Two?", "Second one.", "Three?", "Third."),
]
ALL = {"target_responses": "all"}


def write_glm(plain: Path, folder: Path, stops: Any = None, template: str = GLM) -> Path:
    """Write a tokenizer with GLM's template, whose EOS is `<|endoftext|>`."""
    special = [*ROLES, "<|end|>", "<|endoftext|>"]
    return add_tokens(plain, folder, template, special, stops=stops, eos_token="<|endoftext|>")


def name_stops(project: Project, stops: list[str]) -> None:
    """Write `tokenizer.stop_tokens` into the recipe."""
    recipe = json.loads(project.recipe.read_text())
    recipe["tokenizer"]["stop_tokens"] = stops
    project.recipe.write_text(json.dumps(recipe))


def list_trained(sample: Any) -> list[tuple[int, bool]]:
    """Return each token of a row, with whether `target_responses: all` trains it."""
    if "loss_mask" in sample:
        return [*zip(sample["input_ids"].tolist(), map(bool, sample["loss_mask"]), strict=True)]
    sides = [
        (turn[key], key == "labels") for turn in sample["turns"] for key in ("input_ids", "labels")
    ]
    return [(token, is_trained) for ids, is_trained in sides for token in ids]


def expect_trained(
    tokenizer: Any, messages: list[Any], tools: Any = None
) -> list[tuple[int, bool]]:
    """Return the tokens of transformers. They are trained after `<|assistant|>`, up to and
    including the token of the next role.
    """
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    begins, trained, is_trained = (
        {*tokenizer.convert_tokens_to_ids(ROLES)},
        list[tuple[int, bool]](),
        False,
    )
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        trained.append((token, is_trained))
        is_trained = token == assistant if token in begins else is_trained
    return trained


@pytest.mark.parametrize("stops", [STOPS, "tokenizer.stop_tokens"])
def test_the_token_of_the_next_role_is_trained_if_it_stops_the_model(
    stops: Any, project: Project, tokenizer_folder: Path
) -> None:
    """The stop tokens come from generation_config.json or from the recipe; the next message is a
    question or a tool's result; rows are turns or packed.
    """
    from transformers import AutoTokenizer

    named = stops if isinstance(stops, list) else None
    project.tokenizer = write_glm(tokenizer_folder, project.folder / "t", named)
    tokenizer = AutoTokenizer.from_pretrained(project.tokenizer)

    def convert(stream: dict[str, Any]) -> None:
        project.configure(stream, max_seq_len=4096, special_tokens_in_text="allow", **ALL)
        if not named:
            name_stops(project, STOPS)
        project.run_all(reencode=True)

    tooled = [(messages, tools) for messages, tools in draw_conversations(60) if tools]
    project.write_source([{"messages": talk} for talk in TALKS], "a.jsonl")
    project.write_source([{"messages": m, "tools": json.dumps(t)} for m, t in tooled], "b.jsonl")
    eos, user = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>"])
    convert(chats("a.jsonl"))
    rows = [list_trained(sample) for sample in read_samples(project.train)]
    assert rows == [expect_trained(tokenizer, talk) for talk in TALKS]
    assert sum(pair == (user, True) for row in rows for pair in row) == 3
    encoding = project.manifest.encoding
    assert encoding.stop_ids == tokenizer.convert_tokens_to_ids(STOPS)

    source = {"path": "b.jsonl", "messages": "messages", "tools": "tools"}
    convert({"kind": "finetuning", "source": source})
    rows = [list_trained(sample) for sample in read_samples(project.train)]
    assert rows == [expect_trained(tokenizer, decode_arguments(m), t) for m, t in tooled]
    results = tokenizer.convert_tokens_to_ids("<|observation|>")
    assert (results, True) in {pair for row in rows for pair in row}

    convert(chats("a.jsonl", pack=True))
    [packed] = read_samples(project.train)
    ended = [pair for talk in TALKS for pair in [*expect_trained(tokenizer, talk), (eos, True)]]
    assert list_trained(packed) == ended


def test_a_cut_conversation_ends_like_a_final_answer(
    project: Project, tokenizer_folder: Path
) -> None:
    """Under too_long: first_turns, and in a separate row for an answer, there is no next turn: EOS
    stops it.
    """
    project.tokenizer = write_glm(tokenizer_folder, project.folder / "t", STOPS)
    talk = make_dialogue("One?", "First.", "Two?", "Second one.", "Three?", "word " * 60)
    project.write_source([{"messages": talk}])
    project.configure(chats("a.jsonl", too_long="first_turns"), max_seq_len=40, **ALL).run()
    [sample] = read_samples(project.train)
    user = json.loads((project.tokenizer / GENERATION_CONFIG).read_text())["eos_token_id"][1]
    first, second = sample["turns"]
    assert (first["labels"][-1], second["input_ids"][0] == user) == (user, False)
    assert second["labels"][-1] != user


def test_only_streams_that_the_rule_changes_get_another_key(
    project: Project, tokenizer_folder: Path
) -> None:
    """Rows and manifests under other policies and templates are the same, whether or not the stop
    tokens are known.
    """
    project.write_source([{"messages": talk} for talk in TALKS])
    for template, settings, is_shaped in (
        (GLM, {}, False),
        (GLM, ALL | {"target_prompts": "all"}, False),
        (CHATML, ALL, False),
        (GLM, ALL, True),
        (GLM, ALL | {"target_prompts": "length>=3"}, True),
    ):
        published = []
        for stops in (None, STOPS):
            project.tokenizer = project.folder / f"t{len(read_files(project.folder))}"
            write_glm(tokenizer_folder, project.tokenizer, stops, template)
            project.configure(chats("a.jsonl"), max_seq_len=256, **settings).run_all(reencode=True)
            manifest = project.manifest
            card = replace(manifest.tokenizer, name="")
            published.append((replace(manifest, tokenizer=card), read_samples(project.train)))
        (manifest_before, rows), (manifest_with_stops, rows_with_stops) = published
        assert (manifest_before != manifest_with_stops) == (rows != rows_with_stops) == is_shaped, (
            template,
            settings,
        )
        assert [*map(tokens, rows)] == [*map(tokens, rows_with_stops)]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=2, max_size=6), max_size=4),
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from([[], [[4]], [[4, 4], [4]]]),
)
def test_a_stop_token_moves_to_the_end_of_the_answer_before(
    drawn: list[list[list[int]]], stops: set[int], leads: list[list[int]]
) -> None:
    """Compared with moving it turn by turn; the tokens of a sample keep their order."""
    rows = [row[: len(row) // 2 * 2] for row in drawn]
    sides = [side for row in rows for side in row]
    turns = Turns(
        Ragged.from_rows(sides, np.int64), np.array([len(row) // 2 for row in rows], np.int64)
    )
    moved = to_lists(move_stop_tokens(turns, [*stops], leads).ids)
    expected = list[list[int]]()
    for row in rows:
        sides_of_row = [[*side] for side in row]
        for number in range(2, len(row), 2):
            response, prompt = sides_of_row[number - 1], sides_of_row[number]
            for lead in ([], *leads):
                end = len(lead)
                if (
                    row[number - 1]
                    and len(prompt) > end + 1
                    and row[number - 1][-1] not in stops
                    and prompt[:end] == lead
                    and prompt[end] in stops
                ):
                    sides_of_row[number - 1], sides_of_row[number] = (
                        response + prompt[: end + 1],
                        prompt[end + 1 :],
                    )
                    break
        expected += sides_of_row
    assert moved == expected


def test_a_newline_before_the_stop_is_trained_too(project: Project, tokenizer_folder: Path) -> None:
    """This template prints the end of a turn only when another message follows, so it is in the
    next prompt.
    """
    project.tokenizer = write_glm(tokenizer_folder, project.folder / "t", ["<|end|>"], LATE)
    project.write_source([{"messages": TALKS[1]}])
    project.configure(chats("a.jsonl"), max_seq_len=256, **ALL).run()
    [sample] = read_samples(project.train)
    decoded = open_tokenizer(TokenizerSpec(name=str(project.tokenizer)))
    text = open_decoder(decoded).text
    texts = [[text(turn[key]) for key in ("input_ids", "labels")] for turn in sample["turns"]]
    assert texts == [
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
        "that message begins with <|user|>, but this token is not known to stop",
        "answer-end-untrained",
    ),
    (
        GLM,
        "<|endoftext|>",
        ["<|endoftext|>", "<|end|>"],
        ALL,
        "that message begins with <|user|>, but this token is not among",
        "answer-end-untrained",
    ),
    (
        PLAIN,
        "<|endoftext|>",
        ["<|endoftext|>"],
        ALL,
        "the text continues with '\\nuser: '",
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


def test_an_answer_without_a_stop_is_reported(project: Project, tokenizer_folder: Path) -> None:
    """By init, convert and check, with the reason and a fix that works. Healthy templates are not
    reported.
    """
    project.write_source([{"messages": case} for case in TALKS])
    cases: list[Any] = [(*case, ALL, "", "") for case in HEALTHY]
    cases += [(*case, {}, "", "") for case in HEALTHY] + UNSTOPPED
    for number, (template, eos, stops, policies, expected, rule) in enumerate(cases):
        special = [*ROLES, "<|end|>"]
        project.tokenizer = project.folder / f"t{number}"
        add_tokens(
            tokenizer_folder, project.tokenizer, template, special, stops=stops, eos_token=eos
        )
        project.configure(chats("a.jsonl"), max_seq_len=256, **policies)
        converted = run_ok("convert", project.recipe, "--reencode").out
        findings = json.loads(mdsmix("check", project.recipe, "--json").out)["findings"]
        ends = {f["id"]: f["message"] for f in findings if f["id"].startswith("answer-end")}
        assert [*ends] == ([rule] if rule else []), (number, ends)
        is_reported = "stop_tokens" in converted or "ends an answer" in converted
        assert is_reported == bool(rule), converted
        if rule:
            assert expected in ends[rule]
            assert expected in converted
            assert ("WARNING" in converted) == (rule == "answer-end-untrained")
        if expected and "continues with" not in expected:
            fix = converted.partition("tokenizer.stop_tokens: ")[2].partition("]")[0] + "]"
            name_stops(project, json.loads(fix))
            assert "stop_tokens" not in run_ok("convert", project.recipe).out
            assert "answer-end" not in mdsmix("check", project.recipe).out


def test_answers_and_calls_have_one_note_each_that_names_all_tokens(lettered: Tokenizer) -> None:
    calls = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ tools | tojson if tools }}",
    )
    for template, stops, level in (
        (GLM, ["<|user|>", "<|observation|>"], "warning"),
        (calls, ["<|im_end|>"], "note"),
    ):
        added = {"</s>": 1} | {token: 2 + number for number, token in enumerate(stops)}
        special = {"special_tokens": [*added], "special_ids": [*added.values()]}
        tokenizer = replace(lettered, added_tokens=added, chat_template=template, **special)
        encoder = encoder_of(tokenizer, template, VARIABLES, target_responses="all")
        encoder.encoding = replace(encoder.encoding, fields={"messages": "m", "tools": "t"})
        notes = encoder.end_notes(replace(tokenizer, template_variables=VARIABLES))
        assert [note.level for note in notes] == [level] * len(stops)
        for note, token in zip(notes, stops, strict=True):
            assert token in note.sentence
            assert f"stop_tokens: {json.dumps(['</s>', *stops])}" in note.fix


def test_init_shows_how_answers_end(project: Project, tokenizer_folder: Path) -> None:
    """It reports an EOS that is trained twice, and shows the EOS that the loader appends."""
    project.write_source([{"messages": TALKS[0]}])
    ends = {}
    for name, template, stops in (("twice", CHATML, None), ("next", GLM, ["<|user|>"])):
        folder = project.folder / name
        eos = "<|im_end|>" if name == "twice" else "<|endoftext|>"
        add_tokens(tokenizer_folder, folder, template, ROLES, stops=stops, eos_token=eos)
        output = run_ok("init", project.folder / "a.jsonl", "--tokenizer", folder)
        ends[name] = output.out + output.err
    assert "⟦So.⟨<|im_end|>⟩\n⟧⟦⟨<|im_end|>⟩⟧" in ends["twice"]
    assert (
        "a second <|im_end|> at the end of a row: there <|im_end|> is trained twice"
        in ends["twice"]
    )
    assert "WARNING: a: the last answer of a row ends in <|endoftext|>" in ends["next"]
    assert "⟦So.⟧⟦⟨<|endoftext|>⟩⟧" in ends["next"]
    # The conversion appends EOS to the answers of preferences, not the loader.
    answers = {"completion": TALKS[0][-1:], "label": True}
    liked = project.write_source([{"prompt": TALKS[0][:-1], **answers}], "liked.jsonl")
    recipe = project.folder / "liked.yaml"
    output = run_ok("init", liked, "--tokenizer", project.folder / "twice", "-o", recipe)
    assert "convert appends a second <|im_end|> to each answer" in output.out + output.err
    assert "the loader appends" not in output.out + output.err


def test_inspect_shows_the_eos_that_a_loader_appends(
    project: Project, tokenizer_folder: Path
) -> None:
    """It shows one after a row of chats or pairs that has room and does not end in EOS, and never
    after a packed row.
    """
    project.tokenizer = add_tokens(
        tokenizer_folder, project.folder / "t", CHATML, eos_token="<|im_end|>"
    )
    eos = open_tokenizer(TokenizerSpec(name=str(project.tokenizer))).eos_id
    project.write_source([{"messages": TALKS[0]}])
    project.write_source([{"prompt": "Why?", "response": "So."}], "b.jsonl")
    length = len(only_row(project, chats("a.jsonl")))
    for stream, longest, appended in (
        (chats("a.jsonl"), length, 0),
        (chats("a.jsonl"), length + 1, 1),
        (chats("a.jsonl", columns="compact"), length + 1, 1),
        (pairs("b.jsonl"), 64, 1),
        (pairs("b.jsonl", pack=True), 64, 0),
    ):
        project.configure(stream, max_seq_len=longest).run_all(reencode=True)
        [shown] = json.loads(run_ok("inspect", project.train, "--json").out)["shown"]
        segments = shown["sample"]
        assert [part["ids"] for part in segments if part["appended"]] == [[eos]] * appended
        assert sum(part["trained"] for part in segments if part["appended"]) == appended
        output = run_ok("inspect", project.train).out
        assert ("the EOS that the loader appends" in output) == bool(appended)
        is_chat = "messages" in stream["source"]
        assert ("EOS is trained twice" in output) == bool(is_chat and appended)


def only_row(project: Project, stream: dict[str, Any]) -> list[int]:
    """Return the tokens of the only row of a stream."""
    project.configure(stream, max_seq_len=256).run()
    [row] = read_samples(project.train)
    return tokens(row)


def test_stop_tokens_of_a_recipe_are_tokens_of_the_tokenizer(
    project: Project, tokenizer_folder: Path
) -> None:
    project.tokenizer = write_glm(tokenizer_folder, project.folder / "t", STOPS)
    project.write_source([{"messages": TALKS[0]}])
    project.configure(chats("a.jsonl"))
    name_stops(project, ["<|usr|>"])
    assert_refused(mdsmix("convert", project.recipe), 2, "'<|usr|>'", "<|user|>")
    project.configure({"kind": "pretraining", "source": {"path": "a.jsonl", "text": "x"}})
    name_stops(project, ["<|user|>"])
    assert_refused(
        mdsmix("convert", project.recipe), 2, "tokenizer.stop_tokens", "no stream has messages"
    )


def test_stop_ids_are_those_of_generation_config(tmp_path: Path, tokenizer_folder: Path) -> None:
    """They are read as by transformers' GenerationConfig. A file without them names none."""
    from transformers import GenerationConfig

    for number, stops in enumerate((STOPS, "<|user|>", None, [])):
        folder = write_glm(tokenizer_folder, tmp_path / str(number), stops)
        theirs: Any = []
        if stops is not None:
            theirs = GenerationConfig.from_pretrained(folder).eos_token_id or []
        ids = open_tokenizer(TokenizerSpec(name=str(folder))).stop_ids
        assert ids == (theirs if isinstance(theirs, list) else [theirs])
    for content in ("[]", "{", '{"eos_token_id": "<|endoftext|>"}', '{"eos_token_id": true}'):
        (folder / GENERATION_CONFIG).write_text(content)
        assert open_tokenizer(TokenizerSpec(name=str(folder))).stop_ids == []


def test_the_published_tokenizer_has_the_stop_ids(project: Project, tokenizer_folder: Path) -> None:
    project.tokenizer = write_glm(tokenizer_folder, project.folder / "t", STOPS)
    project.write_source([{"messages": each} for each in TALKS])
    project.configure(chats("a.jsonl"), max_seq_len=256, **ALL).run()
    rows = read_samples(project.train)
    own = open_tokenizer(TokenizerSpec(name=str(project.tokenizer)))
    folder = fetch_folder(locate(str(project.out / TokenizerCard.from_tokenizer(own).folder_name)))
    assert folder is not None
    project.tokenizer = folder
    project.configure(chats("a.jsonl"), max_seq_len=256, **ALL).run_all(reencode=True)
    assert read_samples(project.train) == rows


def test_streams_from_before_the_rule_are_outdated(
    project: Project, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the template ends answers by the next role, and the rule was not there when they were
    made.
    """
    project.tokenizer = write_glm(tokenizer_folder, project.folder / "t", STOPS)
    project.write_source([{"messages": each} for each in TALKS])
    project.configure(chats("a.jsonl"), max_seq_len=256, **ALL)
    with monkeypatch.context() as patch:
        patch.delitem(TEMPLATE_RULES, "template.stop_tokens")
        project.run()
        assert project.manifest.encoding.rules == {}
    checked = mdsmix("check", project.recipe).out
    assert "rows-outdated" in checked
    assert "template.stop_tokens was version 1" in checked
    project.run()
    assert manifest_of(project.train).encoding.rules == {"template.stop_tokens": 2}
    assert "rows-outdated" not in mdsmix("check", project.recipe).out
    # A training YAML names no stop tokens; the manifest has them.
    assert "answer-end" not in mdsmix("check", project.train).out


def test_length_policies_count_a_prompt_without_the_moved_token(lettered: Tokenizer) -> None:
    """`length>=N` measures the stored prompt, as the collator does."""
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
        outcome = encoder.encode([Conversation(make_dialogue("a", "bcd", "ef", "gh"))])
        # bcd with <|im_start|>, gh, and EOS; of two letters or more ef, and a behind <|im_start|>
        # too.
        assert outcome.totals.loss_tokens == losses
