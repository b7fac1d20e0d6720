"""A tiny model that thinks between tags, and its requests worked out one token at a time."""

from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import EOS, Reference, edit_tensors, make_checkpoint, make_tokenizer, make_usual
from sampling_reference import draw
from transformers import AutoTokenizer

from nanovllm import SamplingParams

OPENING, CLOSING, TURN = "<think>", "</think>", "<|im_start|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}{# reasoning stands between <think> and </think> #}"
)
MESSAGES = [{"role": "user", "content": "a block of rows"}]


def make_thinking_checkpoint(directory: str | Path, with_tokens: bool = True) -> Path:
    """with_tokens: the tags are tokens of the vocabulary. The model opens and ends its thinking often enough then."""
    path = make_checkpoint(directory)
    tags = (OPENING, CLOSING) if with_tokens else ()
    make_tokenizer(path, ("<|endoftext|>", TURN, EOS, *tags), chat_template=TEMPLATE)
    if with_tokens:
        make_usual(path, tags)
        ids = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(tags)
        edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": _louder(tensors["lm_head.weight"], ids)}))
    return path


def _louder(head: torch.Tensor, rows: list[int]) -> torch.Tensor:
    head = head.clone()
    head[rows] *= 3
    return head


@torch.inference_mode()
def complete(
    reference: Reference,
    prompt: list[int],
    params: SamplingParams,
    rule: Callable[[list[int]], list[int] | None],
    eos: tuple[int, ...] = (),
) -> list[int] | None:
    """The completion of a request with a seed; None where rounding could decide a token of it. rule: the only tokens
    that may follow a completion, None for all."""
    generator = torch.Generator().manual_seed(0)
    completion: list[int] = []
    while len(completion) < params.max_tokens:
        logits = reference.model(torch.tensor([prompt + completion])).logits[0, -1]
        allowed = rule(completion)
        if allowed is not None:
            masked = torch.full_like(logits, -torch.inf)
            masked[allowed] = logits[allowed]
            logits = masked
        token = draw(logits, prompt, completion, params, eos)
        for _ in range(3):
            noise = torch.randn(len(logits), generator=generator) * 3e-5
            if draw(logits + noise, prompt, completion, params, eos) != token:
                return None
        completion.append(token)
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            break
    return completion


def forced_token(completion: list[int], is_open: bool, budget: int, ending: list[int], tags: tuple) -> int | None:
    """What a budget forces next, read from the whole completion. tags: the tokens of both tags; one each."""
    opening, closing = tags
    if not is_open:
        if completion[:1] != [opening]:
            return None
        completion = completion[1:]
    if closing in completion or len(completion) < budget:
        return None
    return ending[len(completion) - budget]
