"""Tiny models with Harmony's and Qwen's tokens, and answers that they are made to give."""

import json
from pathlib import Path

import torch
from checkpoints import make_checkpoint, make_tokenizer, make_usual

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


CALLS = [("add", {"a": 1}), ("look", {"city": "<tool_call>"})]
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": _PARAMETERS}} for name, _ in CALLS]
_TO_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|end|>'
_TO_LOOK = ' to=functions.look<|channel|>commentary <|constrain|>json<|message|>{"city": "<tool_call>"}<|call|>'
# Thinking, a text for the user, and CALLS.
HARMONY_CALLS = (
    f"{ANALYSIS}ab<|end|><|start|>assistant<|channel|>commentary<|message|>cd<|end|>"
    f"<|start|>assistant{_TO_ADD}<|start|>assistant{_TO_LOOK}"
)
QWEN = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}{% if tools %}<tool_call>"
    "{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
_QWEN_CALLS = [
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    for name, arguments in CALLS
]
QWEN_CALLS = "\n".join(["ab\n</think>\n\ncd", *_QWEN_CALLS]) + "<|im_end|>"


def make_qwen_checkpoint(directory: str | Path) -> Path:
    path = make_checkpoint(directory)
    make_tokenizer(path, QWEN, "<|im_end|>", chat_template=_QWEN_TEMPLATE)
    make_usual(path, QWEN[2:])
    return path


def make_channels_checkpoint(directory: str | Path) -> Path:
    path = make_checkpoint(directory)
    make_tokenizer(path, HARMONY, "<|return|>", chat_template=_TEMPLATE)
    return path


def let_it_say(llm: LLM, messages: list[dict], answer: str = ANSWER, first: int | None = None, **options) -> None:
    """Let the model answer these messages so, whatever its logits are. first: tokens of the prompt, where another
    template than the tokenizer's makes it. options: of the template."""
    if first is None:
        prompt = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        first = len(llm.tokenizer.encode(prompt, add_special_tokens=False))
    tokens = torch.tensor(llm.tokenizer.encode(answer, add_special_tokens=False))

    def sampler(logits, temperatures, seeds, positions, thresholds=None, out=None):
        found = tokens[(positions - first + 1).clamp(0, len(tokens) - 1)]
        return found if out is None else out.copy_(found)

    llm.model_runner.sampler = sampler
