"""The tokens of a stream that are trained and those that are not, in numbers and sentences.

They are not in inspection.py, since `convert` shows them too: the samples that inspection.py shows
take 5 ms to import.
"""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.kinds import kind_of
from mdsmix.messages import plural
from mdsmix.shards.counts import Totals
from mdsmix.shards.manifest import Encoding, Manifest
from mdsmix.table import mark_estimate

CUT_SHARE = 0.05
"A warning is given if a larger share of the tokens is cut off."


def count_trained_tokens(manifest: Manifest) -> float:
    """Return the tokens of all samples as they are trained, with the EOS that the loader appends.
    The result is an Estimate if an early version converted the stream, since that version did not
    count this EOS.
    """
    is_counted = manifest.totals.is_eos_counted or not kind_of(manifest.encoding).gets_eos
    return mark_estimate(manifest.totals.seen_tokens, is_exact=is_counted)


def list_untrained_tokens(manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each kind of tokens that are not trained: tokens that the loader cuts
    off at max_seq_len, tokens that the conversion truncated, and tokens that the conversion
    dropped.
    """
    totals = manifest.totals
    if totals.cut_rows and totals.truncated_tokens:
        yield _describe_rows_cut_twice(totals)
    else:
        if totals.cut_rows:
            yield _describe_cut_rows(totals)
        if totals.truncated_tokens:
            yield _describe_truncated_rows(totals, manifest.encoding)
    if totals.untrained_ends:
        yield (
            f"{plural(totals.untrained_ends, 'token')} after the last trained token of a row left "
            "out (train_parts): they give no loss"
        )
    if totals.untrained_calls:
        yield _describe_untrained_calls(totals, manifest.encoding)
    if totals.equal_answers:
        yield (
            f"WARNING: in {plural(totals.equal_answers, 'preference')}, both answers have the same "
            "tokens: a loss that compares answers, such as that of DPO, learns nothing from them; "
            "remove these records, or raise max_seq_len if the answers differ after it"
        )
    if totals.reversed_rewards:
        yield (
            f"WARNING: in {plural(totals.reversed_rewards, 'preference')}, the chosen answer has a "
            "lower reward than the rejected answer: look whether the two fields are exchanged"
        )
    dropped = totals.lost_tokens - totals.truncated_tokens - totals.untrained_ends
    if dropped:
        yield f"{plural(dropped, 'token')} dropped ({_explain_dropped_tokens(manifest)})"


def _describe_cut_rows(totals: Totals) -> str:
    """Return a sentence on the rows that the loader cuts off."""
    share = totals.cut_tokens / max(1, totals.tokens)
    warning = "WARNING: " if share > CUT_SHARE else ""
    return (
        f"{warning}{totals.cut_rows:,} of {plural(totals.samples, 'row')} are longer than "
        f"max_seq_len: the loader cuts off {totals.cut_tokens:,} tokens, {share:.1%} of all, "
        "which are not counted above"
    )


def _describe_rows_cut_twice(totals: Totals) -> str:
    """Return a sentence on the rows that the conversion truncated, and of which the loader cuts off
    more. These are pairs whose prompt fills the row, and preferences.
    """
    cut = totals.truncated_tokens + totals.cut_tokens
    share = cut / (totals.tokens + totals.truncated_tokens)
    warning = "WARNING: " if share > CUT_SHARE else ""
    return (
        f"{warning}{totals.truncated_rows + totals.cut_rows:,} of {plural(totals.samples, 'row')} "
        f"are longer than max_seq_len: {plural(cut, 'token')} are cut off "
        f"({totals.truncated_tokens:,} by the conversion, {totals.cut_tokens:,} by the loader), "
        f"{share:.1%} of all, which are not counted above"
    )


def _describe_truncated_rows(totals: Totals, encoding: Encoding) -> str:
    """Return a sentence on the rows that the conversion truncated. It is a warning if they are many
    and the recipe does not ask for it.
    """
    share = totals.truncated_tokens / (totals.tokens + totals.truncated_tokens)
    rows = plural(totals.documents or totals.samples, "document" if encoding.pack else "row")
    is_wanted = encoding.too_long in ("first_turns", "last_turns")
    reason = f"too_long: {encoding.too_long}" if is_wanted else "longer than max_seq_len"
    if totals.left_out_turns:
        reason += f", {plural(totals.left_out_turns, 'turn')} left out"
    warning = "WARNING: " if share > CUT_SHARE and not is_wanted else ""
    return (
        f"{warning}{plural(totals.truncated_tokens, 'token')} truncated in "
        f"{totals.truncated_rows:,} of {rows} ({reason}), {share:.1%} of all, which are not "
        "counted above"
    )


def _describe_untrained_calls(totals: Totals, encoding: Encoding) -> str:
    """Return a sentence on answers with calls of tools that are not trained."""
    setting = "rewritten_history: last"
    remedy = "rewritten_history: each"
    if encoding.target_responses == "last":
        setting = "target_responses: last"
        remedy = "target_responses: all in the recipe"
    return (
        f"WARNING: in {plural(totals.untrained_calls, 'record')}, answers with calls of tools "
        f"are not trained, since {setting} trains only the last answer: set {remedy} to train "
        "these calls too"
    )


def _explain_dropped_tokens(manifest: Manifest) -> str:
    """Return why the conversion dropped tokens, by the settings of the stream. The tokens in
    `truncated_tokens` are not meant: these are reported on their own.
    """
    encoding = manifest.encoding
    if kind_of(encoding).joins_units:  # `layout: concat`: the tokens after the last full row
        return "last partial row"
    if encoding.kind == "pretraining":  # `layout: document`: what remains of a split document
        return "last pieces of one token, which train nothing"
    if encoding.rewritten_history == "each":  # a conversation has several rows
        return "in rows that train nothing, or cut off"
    return "truncated, in rows that an earlier version did not count"
