"""A tiny model with Harmony's special tokens, and answers in channels that it is made to give."""

from pathlib import Path

import torch
from checkpoints import make_checkpoint, make_tokenizer

from nanovllm import LLM

HARMONY = (
    *("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"),
    *("analysis", "final", "assistant"),
)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
ANSWER = f"{ANALYSIS}ab<|end|><|start|>assistant{FINAL}cd<|return|>"
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def make_channels_checkpoint(directory: str | Path) -> Path:
    path = make_checkpoint(directory)
    make_tokenizer(path, HARMONY, "<|return|>", chat_template=_TEMPLATE)
    return path


def let_it_say(llm: LLM, messages: list[dict], answer: str = ANSWER) -> None:
    """Let the model answer these messages so, whatever its logits are."""
    prompt = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    first = len(llm.tokenizer.encode(prompt, add_special_tokens=False))
    tokens = torch.tensor(llm.tokenizer.encode(answer, add_special_tokens=False))

    def sampler(logits, temperatures, seeds, positions, thresholds=None, out=None):
        found = tokens[(positions - first).clamp(0, len(tokens) - 1)]
        return found if out is None else out.copy_(found)

    llm.model_runner.sampler = sampler
