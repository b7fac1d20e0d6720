"""What a request has to draw, worked out one token at a time from transformers' model and its logits processors."""

import math

import torch
from checkpoints import Reference
from draws import sample_torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Sequence]:
    """Serve the prompts as generate does; their sequences."""
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for prompt, each in zip(prompts, params, strict=True):
        llm.add_request(prompt, each)
    seqs = list(llm.scheduler.waiting)
    while not llm.is_finished():
        llm.step()
    return seqs


def completions(seqs: list[Sequence]) -> list[list[int]]:
    return [seq.completion_token_ids for seq in seqs]


def edited_logits(logits, prompt: list[int], completion: list[int], params: SamplingParams, eos, bad_words=()):
    """float32 [vocab_size]: one row of logits after biases, penalties, masks, temperature and truncation. bad_words:
    the tokens of each."""
    ids = torch.tensor([prompt + completion])
    scores = logits.unsqueeze(0).clone()
    for token, bias in params.logit_bias:
        scores[0, token] += bias
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in set(completion):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * completion.count(token)
    if len(completion) < params.min_tokens:
        scores[0, [*eos, *params.stop_token_ids]] = -math.inf
    if params.allowed_token_ids is not None:
        is_forbidden = torch.ones(len(logits), dtype=torch.bool)
        is_forbidden[list(params.allowed_token_ids)] = False
        scores[0, is_forbidden] = -math.inf
    for *beginning, last in bad_words:
        if completion[len(completion) - len(beginning) :] == beginning:
            scores[0, last] = -math.inf
    if params.temperature == 0:
        return scores[0]
    chain = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    for warper in chain:
        scores = warper(ids, scores)
    return scores[0]


def draw(logits, prompt, completion, params: SamplingParams, eos, bad_words=()) -> int:
    scores = edited_logits(logits, prompt, completion, params, eos, bad_words)
    if params.temperature == 0:
        return int(scores.argmax())
    one, seed = torch.ones(1), torch.tensor([params.seed])
    # A token is drawn with the noise of the position that it follows.
    position = torch.tensor([len(prompt) + len(completion) - 1])
    return int(sample_torch(scores.unsqueeze(0), one, seed, position))


@torch.inference_mode()
def complete_alone(
    reference: Reference, prompt: list[int], params: SamplingParams, eos: tuple[int, ...] = (), bad_words=()
) -> list[int] | None:
    """The completion of a request with a seed, or None where rounding could decide a token of it."""
    generator = torch.Generator().manual_seed(0)
    completion: list[int] = []
    while len(completion) < params.max_tokens:
        logits = reference.model(torch.tensor([prompt + completion])).logits[0, -1]
        token = draw(logits, prompt, completion, params, eos, bad_words)
        for _ in range(3):
            noise = torch.randn(len(logits), generator=generator) * 3e-5
            if draw(logits + noise, prompt, completion, params, eos, bad_words) != token:
                return None
        completion.append(token)
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            break
    return completion
