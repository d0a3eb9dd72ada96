"""The entries of docs/troubles.md: what a user saw -> its cause -> the fix.

Messages come from the code: each entry has the sentence as the code writes it, with `…` where it
has a name or a number. An entry whose sentence is not in the code any more is a LookupError.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mdsmix.errors import EXIT_CODES
from mdsmix.foundry_yaml.findings import Check
from mdsmix.kinds.reasons import list_bad_reasons
from mdsmix.mix.check import list_checks
from mdsmix.mix.checks.publication import FAULT_CHECKS
from mdsmix.record import FILTERED
from mdsmix.storage import azure_errors, gcs_errors, hub_errors, local, s3_errors

ROOT = Path(__file__).parents[2]
GAP = "…"
"What stands for a name or a number in a sentence."
WORDS = {
    "{streams}": "STREAM",
    "{loader}": "LOADER",
    "{again}": "convert again",
    "{folder}": "STREAM",
    "{recipe}": "RECIPE",
}
"Placeholders of findings -> what an entry shows."


class Refusal(NamedTuple):
    """A sentence that users meet often."""

    words: str
    "A part of the sentence that no other sentence of the code has."
    code: int
    cause: str
    fix: str


REFUSALS = (
    Refusal(
        "… is not a known key; …",
        2,
        "The key is misspelled, belongs to another section, or is of another tool.",
        "The sentence names the nearest key. All keys: [the keys of a recipe](recipe.md); an "
        "[editor](recipe.md#in-an-editor) marks them.",
    ),
    Refusal(
        "…; it must be ….",
        2,
        "A value has another type than the key.",
        "Write a value of the type that the sentence names. In quotes YAML reads a number as a "
        "text.",
    ),
    Refusal(
        "a number alone could be a repeat or a share",
        2,
        "`mix: {web: 0.3}` says neither.",
        "`mix: {web: 30%}` or `{web: {share: 0.3}}` for a part of the tokens, `{web: {repeat: "
        "2}}` for passes ([mixing](mixing.md)).",
    ),
    Refusal(
        "neither remote nor local is set",
        2,
        "The recipe converts data and names no place for them.",
        "Set `local: ./mix`, or `remote: s3://bucket/mix` in the recipe or on the command line.",
    ),
    Refusal(
        " matches no file; ",
        2,
        "A path or pattern under `source.path` is wrong, or begins at another folder.",
        "Paths begin at the folder of the recipe. `mdsmix doctor RECIPE` tries every source.",
    ),
    Refusal(
        "source names the fields ",
        2,
        "The keys of `source` fit no shape of this kind.",
        "Name the fields of one shape, or set `shape` ([data](data.md)). `mdsmix init FILE` "
        "recognises them.",
    ),
    Refusal(
        "is a data file, not a recipe",
        2,
        "A command that takes a recipe got the data.",
        "Let `mdsmix init` write a recipe for the file.",
    ),
    Refusal(
        "is a training YAML, which loads streams",
        2,
        "A command that converts got LLM-Foundry's YAML.",
        "Name the recipe. `check`, `plan`, `preview` and `bench` take both.",
    ),
    Refusal(
        "no data that can be converted was found",
        2,
        "`init` recognised no file. It says of each why.",
        "Name the files themselves, or write the recipe by hand ([data](data.md)).",
    ),
    Refusal(
        "exists already: pass --replace",
        2,
        "`init` never overwrites a recipe.",
        "Pass `--replace`, or name another file.",
    ),
    Refusal(
        "a credential, which everyone could then",
        2,
        "A recipe is copied into manifests and training YAMLs.",
        "Remove it. The clients of S3 and Hugging Face read their variables themselves.",
    ),
    Refusal(
        "shares in percent must sum to 100%",
        2,
        "Shares with `%` are parts of a whole.",
        "Correct them, leave one out (it gets the rest), or write ratios without `%` "
        "([mixing](mixing.md)).",
    ),
    Refusal(
        "the streams are too small for a budget of ",
        3,
        "All streams together are too small for the budget, however its shares are divided.",
        "The sentence has the largest budget that fits. Or raise `max_repeat` "
        "([mixing](mixing.md)).",
    ),
    Refusal(
        "and max_repeat allows ",
        3,
        "Under `absolute: true`, or if the budget counts its passes, a stream is too small for its "
        "share of the budget.",
        "The sentence has the largest budget that fits. Or lower the share, or raise `max_repeat`.",
    ),
    Refusal(
        ", and this needs the mix of one of them: name it as an override",
        2,
        "The recipe has phases, and this command is about one mix.",
        "Add `phase=NAME` to the command ([phases](mixing.md#phases)). `plan`, `check` and "
        "`render-yaml` take all phases at once.",
    ),
    Refusal(
        "is published for the",
        2,
        "Another `train_loader.name` or `pack` needs other columns.",
        "Go back to the loader of the streams, or pass `--reencode` ([loading](loading.md)).",
    ),
    Refusal(
        "has a stream without an mdsmix manifest",
        2,
        "Somebody else's stream is at the place of this one.",
        "Publish elsewhere, or pass `--reencode` to replace it.",
    ),
    Refusal(
        "has no suffix that mdsmix reads",
        2,
        "The name of a file does not tell its format.",
        "Set `source.format` ([data](data.md)).",
    ),
    Refusal(
        "which does not show where a document ends",
        2,
        "Plain text has no records.",
        "Set `source.split_by: file`, `line` or `paragraph`.",
    ),
    Refusal(
        "is less than one worker process needs",
        2,
        "`--memory` is too small.",
        "Pass at least the number in the sentence ([memory](many-machines.md)).",
    ),
    Refusal(
        "cannot be compiled",
        2,
        "The chat template of the tokenizer has a fault.",
        "Correct the template in the tokenizer's files.",
    ),
    Refusal(
        "llmfoundry is not installed in the environment",
        2,
        "`--validate` builds the real loader.",
        "Install mdsmix into LLM-Foundry's environment, and run that `mdsmix`.",
    ),
    Refusal(
        "recipe-changed: ",
        3,
        "The streams were made by another recipe than this one.",
        "`mdsmix convert` makes again what the change concerns; or undo the change.",
    ),
    Refusal(
        "these streams are not published",
        4,
        "`check`, `plan` and others read what `convert` published.",
        "Run `mdsmix convert` first; check that `remote` and `local` are those of that run.",
    ),
    Refusal(
        "and two runs at once would overwrite",
        4,
        "Two runs at once would overwrite each other's publication.",
        "Wait, or end the other run. A run that was killed is taken over after 20 s ([many "
        "machines](many-machines.md)).",
    ),
    Refusal(
        "was changed while it was being read",
        4,
        "A source changed during the conversion.",
        "Run the same command again once the file is complete.",
    ),
    Refusal(
        " of 0 bytes (",
        4,
        "A file of this format has bytes even without records, so a copy or a download of it was "
        "interrupted.",
        "Copy the file again, or delete it if you do not need its records.",
    ),
    Refusal(
        "the disk is full",
        4,
        "The target, the cache, the temporary folder or the disk of stdout has no space.",
        "Free space and run the same command again; finished units are kept.",
    ),
    Refusal(
        "cannot be read from the hub",
        4,
        "The hub does not answer or refuses.",
        "Check the name, `HF_TOKEN` and `HF_HUB_OFFLINE`; or copy the files.",
    ),
    Refusal(
        "was written by an earlier commit of mdsmix (format",
        4,
        "The manifest has an older format.",
        "Convert, or mix, again.",
    ),
    Refusal(
        " records are bad (",
        5,
        "More records are bad than `max_bad` allows. Finished units are kept.",
        "`mdsmix quarantine STREAM` shows them with their "
        "[reasons](#reason-codes-of-bad-records): fix the source, or raise `max_bad`.",
    ),
    Refusal(
        "its source gives no sample",
        5,
        "All records were filtered or bad; the sentence has the counts. Or the files have no "
        "record, such as files of 0 bytes.",
        "`mdsmix quarantine STREAM` shows the bad ones; filters are keys of the "
        "[recipe](recipe.md). Copy or export empty files again.",
    ),
)


FIXES = {
    "not_json": "Repair the line; `source.format` if the file has another format.",
    "json_array": "Name the file `.json`, or set `source.format: json`.",
    "invalid_utf8": "Convert the file to UTF-8.",
    "crashed_worker": "Look at the record; more memory for each worker (`--memory`, `--workers`) "
    "may help.",
    "missing_field": "Name the field that records have under `source`; leave other records out "
    "by `where: exists(FIELD)`.",
    "field_not_text": "Name a field with text, or a path into it, such as `meta.body`.",
    "special_token_in_text": "`special_tokens_in_text: escape` reads it as text.",
    "too_few_fields": "Quote cells with separators or line breaks; `source.format: tsv` for tabs.",
    "cell_not_json": "Write such data to JSON Lines or parquet.",
    "too_many_fields": "Quote cells with separators or line breaks; `source.format: tsv` for tabs.",
    "function_refused": "Change the record, or the function.",
    "function_failed": "Change the function; the detail has the exception.",
    "function_gave_other": "Return what `source.gives` names.",
    "unknown_role": "Name the roles by `source.tags`, or set another `shape`.",
    "bad_message_keys": "Set another `shape`; `source.nulls: drop` removes nulls that Arrow added.",
    "content_not_text": "Set another `shape`, such as `openai` for lists of parts.",
    "repeated_role": "`consecutive_roles: merge` joins them, if both are trained or neither is.",
    "template_error": "The detail has the template's sentence; change the record, the template "
    "or `tokenizer.template`.",
    "not_prefix_stable": "`rewritten_history: last` keeps a row of such a conversation, or `each` "
    "(with `target_responses: all`) a row of each answer.",
    "untrained_in_prompt": "`target_prompts: none`.",
    "parts_not_found": "Change the record or the template; without `train_parts` the record can be "
    "trained whole.",
    "ends_untrained": "`pack: true`, or train the last part of answers too.",
    "split_answer": "`target_responses: all`, or `pack: true`.",
    "tools_not_printed": "Use a tokenizer whose template prints tools, or leave `source.tools` "
    "out.",
    "image_not_found": "Set `images.root` to the folder that the paths begin at.",
    "image_unreadable": "Give this user or these credentials the permission to read it.",
    "image_too_large": "Raise `images.max_pixels`.",
    "remote_image": "`images: {http: fetch}`.",
    "bad_image_path": "Correct `images.root`, or set `images.outside: allow` for files that you "
    "trust.",
    "too_many_images": "Raise `images.max_images`.",
    "image_refused": "`images: {resize: {longest: N}}`, or another processor.",
    "image_count": "Correct the placeholders; `images.token` if they are written in another way; "
    "`images: {unplaced: first}` if the texts have none.",
    "image_not_printed": "Use a tokenizer whose template prints images, or set `images.token`.",
    "no_prompt": "Name the field by `source.prompt`.",
    "last_not_user": "Remove the answer from the prompt, and name its own field by "
    "`source.verified_answer`.",
    "bad_answer": "Correct the answer, or leave `verified_answer` out.",
    "tools_of_text": "Write the prompt as messages, or leave `source.tools` out.",
    "bad_label": "Correct the label, or leave the record out by `where`.",
    "several_completions": "Move all but the last message to `prompt`.",
    "bad_reward": "Correct the reward, or leave `chosen_reward` and `rejected_reward` out.",
}
"Reason code -> the fix, if it is not to correct the record or to leave it out."


STORE_ERRORS = {
    "s3": s3_errors._SENTENCES,
    "gcs": gcs_errors._SENTENCES,
    "azure": azure_errors._SENTENCES,
    "hub": hub_errors._SENTENCES,
    "local": local._REASONS,
}
"Store, as troubles.md names it -> the code of an error -> what a sentence on it ends with."


def describe_exit_codes() -> Iterator[str]:
    """Yield the table of exit codes."""
    yield "| code | cause | fix |"
    yield "|---|---|---|"
    for number, code in EXIT_CODES.items():
        yield f"| {number} | {code.cause} | {code.fix} |"


def describe_refusals(code: str) -> Iterator[str]:
    """Yield the refusals with an exit code."""
    for refusal in REFUSALS:
        sentence = tidy(re.sub(r"\{\w+\}", GAP, find_sentence(refusal.words)))
        if refusal.code == int(code):
            yield f"- {quote(shorten(sentence))}: {refusal.cause} **Fix:** {refusal.fix}"


def describe_reasons_with_fixes(fate: str) -> Iterator[str]:
    """Yield the reason codes of bad records (`bad`) or of filtered ones, with their fixes.

    Raises LookupError if there is a fix for a code that does not exist.
    """
    reasons = list_bad_reasons()
    unknown = FIXES.keys() - reasons.keys()
    if unknown:
        raise LookupError(f"FIXES has reason codes that no record has: {sorted(unknown)}")
    for code, cause in (reasons if fate == "bad" else FILTERED).items():
        fix = f" **Fix:** {FIXES[code]}" if code in FIXES else ""
        yield f"- `{code}`: {escape(cause)}{fix}"


def describe_store_errors(store: str) -> Iterator[str]:
    """Yield what the sentences on a store or a disk end with.

    Args:
        store: a key of STORE_ERRORS.
    """
    for sentence in dict.fromkeys(STORE_ERRORS[store].values()):
        cause, _, fix = sentence.partition("; ")
        yield f"- `{cause}`. **Fix:** {fix}."


def describe_findings(module: str) -> Iterator[str]:
    """Yield the checks of a file: the line that a user saw, the consequence, and the fix."""
    for check in list_checks():
        if get_module(check) != module:
            continue
        lines = list_lines(check)
        # A message that is put together elsewhere has only gaps.
        messages = [m for m in (tidy(line.message) for line in lines) if re.search(r"[a-z]{3}", m)]
        shown = f" {quote(messages[0])}" if messages else ""
        fixes = " Or: ".join(dict.fromkeys(escape(tidy(line.fix)) for line in lines))
        yield f"- `{check.severity} {check.id}`:{shown} {escape(check.why)} **Fix:** {fixes}"


def get_module(check: Check) -> str:
    """Return the name of the file that a check is in, such as `columns`."""
    return check.find.__module__.rpartition(".")[2]


class Line(NamedTuple):
    """A message and a fix of a finding, with gaps for names and numbers."""

    message: str
    fix: str


_NAME_TOKENS = "if the model stops at …, name it in the recipe: tokenizer.stop_tokens: […]"
_FILES_CHANGED = "{streams}: the source files have changed since the conversion: "
ELSEWHERE = {
    "answer-end-untrained": [
        Line(
            " ends in …, which is not among the tokens that stop a generation (",
            _NAME_TOKENS,
        )
    ],
    "answer-end-unknown": [
        Line(
            " ends in …, and it is not known whether a model stops there, since ",
            _NAME_TOKENS,
        )
    ],
    "sources-changed": [
        Line(_FILES_CHANGED, "correct `path`, or bring the files back"),
        Line(_FILES_CHANGED, "convert again: the conversion reads only new and edited files"),
    ],
}
"Checks whose messages and fixes are put together in other functions -> parts of these."


def list_lines(check: Check) -> Sequence[Line]:
    """Return the messages and fixes that a check may give. Raises LookupError if there are none."""
    if check.id in ELSEWHERE:
        return [
            Line(fill(find_sentence(message)), f"{find_sentence(fix)}.")
            for message, fix in ELSEWHERE[check.id]
        ]
    lines = list[Line]()
    unnamed_lines = list[Line]()  # of findings whose id is only known at run time
    function = FunctionText(check.find)
    for call in function.list_calls("Finding"):
        identity = call.get("id")
        ids = function.list_texts(identity) if identity is not None else [check.id]
        if ids and check.id not in ids and GAP not in "".join(ids):
            continue
        for message in function.list_texts(call["message"]):
            fixes = function.list_texts(call["fix"])
            if check.id in FAULT_CHECKS:
                fixes = [FAULT_CHECKS[check.id].fix]
            found = [Line(fill(message), fill(fix)) for fix in fixes if fix.strip(GAP + ". ")]
            if check.id in ids:
                lines += found
            else:
                unnamed_lines += found
    lines = lines or unnamed_lines
    if not lines:
        raise LookupError(f"no message and fix of the check {check.id} were found in its code")
    return lines


class FunctionText:
    """The texts that a function of the code uses, from its source."""

    def __init__(self, function: object) -> None:
        self._module = inspect.getmodule(function)
        self._tree = ast.parse(textwrap.dedent(inspect.getsource(function)))

    def list_calls(self, name: str) -> Iterator[dict[str, ast.expr]]:
        """Yield the arguments of each call of a NamedTuple or dataclass `Finding`, by name. Calls
        in functions of the same file that this function calls come after its own.
        """
        yield from self._own_calls(name)
        for helper in self._helpers():
            yield from FunctionText(helper)._own_calls(name)

    def _own_calls(self, name: str) -> Iterator[dict[str, ast.expr]]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                names = ("message", "fix", "streams", "id")
                arguments = dict(zip(names, node.args, strict=False))
                yield arguments | {k.arg: k.value for k in node.keywords if k.arg}

    def _helpers(self) -> Iterator[object]:
        """Yield the functions of the same file that are called."""
        for node in ast.walk(self._tree):
            helper = self._find_helper(node) if isinstance(node, ast.Call) else None
            if helper:
                yield helper

    def _find_helper(self, call: ast.Call) -> object | None:
        name = getattr(call.func, "id", "")
        helper = getattr(self._module, name, None) if name.startswith("_") else None
        return helper if inspect.isfunction(helper) else None

    def list_texts(self, node: ast.expr) -> list[str]:
        """Return the texts that an expression may have; a name, and a call of a function of the
        same file, are followed.
        """
        if isinstance(node, ast.Name):
            values = [
                statement.value
                for statement in ast.walk(self._tree)
                if isinstance(statement, ast.Assign)
                and any(getattr(target, "id", "") == node.id for target in statement.targets)
            ]
            return [text for value in values for text in self.list_texts(value)]
        if isinstance(node, ast.IfExp):
            return [*self.list_texts(node.body), *self.list_texts(node.orelse)]
        if isinstance(node, ast.Call):
            helper = self._find_helper(node)
            return FunctionText(helper)._returned_texts() if helper else [GAP]
        text = read_text(node)
        return [GAP] if text is None else [text]

    def _returned_texts(self) -> list[str]:
        texts = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Return) and node.value is not None:
                texts += [text for text in self.list_texts(node.value) if text.strip(GAP)]
        return texts


def read_text(node: ast.AST) -> str | None:
    """Return the text of a string or an f-string, with gaps for its values; None for another
    expression.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            is_text = isinstance(value, ast.Constant)
            command = isinstance(value, ast.FormattedValue) and "republish_fix" in ast.unparse(
                value
            )
            parts.append(str(value.value) if is_text else "convert again" if command else GAP)
        return "".join(parts)
    return None


@functools.cache
def list_sentences() -> Sequence[str]:
    """Return all texts of the code, with gaps."""
    texts = []
    for path in sorted((ROOT / "mdsmix").rglob("*.py")):
        nodes: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
        while nodes:
            node = nodes.pop()
            text = read_text(node)
            if text:
                texts.append(text)
            else:
                nodes += ast.iter_child_nodes(node)
    return texts


def find_sentence(words: str) -> str:
    """Return the only sentence of the code with these words. Raises LookupError if there is none,
    or another one.
    """
    if words in list_sentences():
        return words
    sentences = list(dict.fromkeys(text for text in list_sentences() if words in text))
    if len(sentences) != 1:
        raise LookupError(f"{len(sentences)} sentences of the code have the words {words!r}")
    return sentences[0]


def fill(text: str) -> str:
    """Return a message of a finding with words in place of its placeholders."""
    for placeholder, word in WORDS.items():
        text = text.replace(placeholder, word)
    return text


def tidy(text: str) -> str:
    """Return a text with one gap in place of several, and without a dot or comma between them."""
    return re.sub(r"…(?:[….]| …)*…", GAP, text).replace(". .", ".")


def shorten(sentence: str) -> str:
    """Return the beginning of a sentence, up to 130 characters."""
    return sentence if len(sentence) <= 130 else f"{sentence[:130].rpartition(' ')[0]} ..."


def quote(text: str) -> str:
    """Return a text as Markdown shows code, also if it contains backticks."""
    return f"``{text}``" if "`" in text else f"`{text}`"


def escape(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")
