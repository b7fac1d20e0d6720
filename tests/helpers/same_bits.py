"""Requests whose answers must have the same bits in any company."""

from collections.abc import Iterable
from typing import Any

from checkpoints import generate, random_prompt

from nanovllm import SamplingParams

Asked = tuple[list[int], SamplingParams]  # a prompt and its parameters


def make_requests(number: int, lengths: tuple[int, ...], head: int, max_tokens: int) -> list[Asked]:
    """Random prompts of these lengths in turn. Some begin alike, with `head` tokens, some repeat themselves, and half
    are greedy."""
    return [_request(i, lengths[i % len(lengths)], head, max_tokens) for i in range(number)]


def _request(number: int, length: int, head: int, max_tokens: int) -> Asked:
    prompt = random_prompt(length, number)
    if number % 3 == 1:
        prompt = random_prompt(head, 99) + prompt[:60]
    if number % 4 == 2:
        prompt = (prompt[:7] * length)[:length]
    temperature = 0 if number % 2 else 1.0
    more: dict[str, Any] = {"top_p": 0.9, "repetition_penalty": 1.1} if number % 5 == 4 else {}
    return prompt, SamplingParams(temperature, max_tokens, ignore_eos=True, seed=number, logprobs=0, **more)


def bits(outputs: Iterable[Any]) -> list[tuple]:
    """Tokens and log-probabilities of each."""
    return [(output["token_ids"], output["logprobs"]) for output in outputs]


def answers(llm, requests: list[Asked]) -> list[tuple]:
    """The bits of the requests, all at once."""
    return bits(generate(llm, [prompt for prompt, _ in requests], [params for _, params in requests]))


def answers_alone(llm, requests: list[Asked]) -> list[tuple]:
    """The bits of each request, one after the other."""
    return [answers(llm, [each])[0] for each in requests]
