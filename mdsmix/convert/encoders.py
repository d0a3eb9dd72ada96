"""The encoder of a job, opened once per process: tokenizers and templates are too dear to open for every unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mdsmix.convert.job import Job
from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoder

if TYPE_CHECKING:
    from mdsmix.encode.targets import Targets


def open_encoder(job: Job, backend: Backend) -> Encoder:
    """What turns this job's records into samples."""
    if job.encoding.kind == "pretraining":
        return _documents(job, backend)
    return _chat(job, backend) if "messages" in job.encoding.fields else _pairs(job, backend)


def _documents(job: Job, backend: Backend) -> Encoder:
    from mdsmix.encode.pretraining import Documents

    encoding = job.encoding
    return Documents(
        tokenizer=job.tokenizer,
        backend=backend,
        field=encoding.fields["text"],
        max_seq_len=encoding.max_seq_len,
        is_concat=job.is_concat,
        has_targets=encoding.loader == "finetuning",
        add_bos=bool(encoding.add_bos),
        add_eos=bool(encoding.add_eos),
        min_tokens=encoding.min_tokens or 0,
        max_tokens=encoding.max_tokens,
        special_tokens_in_text=encoding.special_tokens_in_text,
    )


def _pairs(job: Job, backend: Backend) -> Encoder:
    from mdsmix.encode.finetuning import PromptResponse

    return PromptResponse(
        tokenizer=job.tokenizer,
        backend=backend,
        prompt=job.encoding.fields["prompt"],
        response=job.encoding.fields["response"],
        targets=_targets(job),
        special_tokens_in_text=job.encoding.special_tokens_in_text,
    )


def _chat(job: Job, backend: Backend) -> Encoder:
    from mdsmix.encode.chat import open_template
    from mdsmix.encode.finetuning import Chat
    from mdsmix.encode.special import SpecialStrings

    tokenizer, encoding = job.tokenizer, job.encoding
    return Chat(
        tokenizer=tokenizer,
        backend=backend,
        messages=encoding.fields["messages"],
        template=open_template(
            tokenizer.chat_template, tokenizer.template_variables, encoding.date_string
        ),
        targets=_targets(job),
        is_compact=encoding.compact,
        special_tokens_in_text=encoding.special_tokens_in_text,
        specials=SpecialStrings.of(tokenizer.special_tokens),
    )


def _targets(job: Job) -> Targets:
    from mdsmix.encode.targets import Targets

    encoding = job.encoding
    return Targets(
        target_prompts=encoding.target_prompts,
        target_responses=encoding.target_responses,
        decoder_only_format=encoding.decoder_only_format,
        max_seq_len=encoding.max_seq_len,
    )
