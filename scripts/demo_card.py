"""The demo model's card: greedy samples, the agreement of two devices, and the figures of the run."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

AGREEMENT_TOKENS = 32
SAMPLE_TOKENS = 120

CODE_PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "def is_prime(n):\n",
    'if __name__ == "__main__":\n',
    "from collections import ",
    "def read_config(path):\n    with open(path) as f:\n",
    "class Node:\n    def __init__(self, value, next=None):\n",
    "try:\n    import threading\nexcept ImportError:\n",
    "for key, value in self.items():\n",
    "def __repr__(self):\n    return ",
    "def __len__(self):\n    return ",
    "import logging\n\nlogger = logging.getLogger(",
    "class MyError(Exception):\n",
    "def main():\n    parser = argparse.ArgumentParser(",
    "async def fetch(url):\n",
    "@property\ndef name(self):\n",
    "def __eq__(self, other):\n    if not isinstance(other, ",
    "while True:\n    line = self.readline()\n",
    "def binary_search(items, value):\n",
)
CHAT_PROMPTS = ("introduce yourself", "list all prime numbers within 100")


@dataclass(frozen=True)
class Run:
    """The figures of one training run. Losses are in nats per token."""

    command: str
    machine: str
    num_parameters: int
    vocab_size: int
    num_files: int
    corpus_bytes: int
    num_dialogues: int
    corpus_tokens: int
    context: int
    long_context: int
    steps: int
    tokens_seen: int
    seconds: float
    running_loss: float
    train_losses: dict[str, float]
    held_out_loss: float


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The saved model, as any user of transformers gets it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


@torch.inference_mode()
def greedy(model: PreTrainedModel, token_ids: list[int], max_tokens: int) -> list[int]:
    """The most probable continuation of `token_ids`, up to and including the first end-of-sequence token."""
    prompt = torch.tensor([token_ids], device=model.device)
    eos, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    settings = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos, pad_token_id=pad)
    model.generation_config = settings
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return output[0, len(token_ids) :].tolist()


def samples(folder: Path, model: torch.nn.Module) -> list[tuple[str, str]]:
    """Two code prompts and two questions, each with its greedy continuation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [(prompt, prompt) for prompt in CODE_PROMPTS[:2]]
    for question in CHAT_PROMPTS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pairs.append((question, text))
    encoded = [(shown, tokenizer.encode(text, add_special_tokens=False)) for shown, text in pairs]
    continued = [(shown, greedy(model, token_ids, SAMPLE_TOKENS)) for shown, token_ids in encoded]
    return [(shown, tokenizer.decode(ids, skip_special_tokens=True)) for shown, ids in continued]


def agreeing_tokens(folder: Path, first: torch.nn.Module, second: torch.nn.Module) -> list[int]:
    """For each code prompt, how many leading tokens two models share; AGREEMENT_TOKENS if all are equal."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    counts = []
    for prompt in CODE_PROMPTS:
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        ours, theirs = (greedy(model, token_ids, AGREEMENT_TOKENS) for model in (first, second))
        differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        counts.append(next(differing, AGREEMENT_TOKENS))
    return counts


def card(run: Run, shown: list[tuple[str, str]], agreement: list[int], file_sizes: dict[str, int]) -> str:
    """The text of the model's README.md."""
    losses = "\n".join(f"| {name}, weights in bfloat16 | {loss:.3f} |" for name, loss in run.train_losses.items())
    files = "\n".join(f"| `{name}` | {size:,} |" for name, size in file_sizes.items())
    examples = "\n\n".join(_example(prompt, text) for prompt, text in shown)
    licence = "`LICENSE-PSF.txt`" if "LICENSE-PSF.txt" in file_sizes else "<https://docs.python.org/3/license.html>"
    passes = run.tokens_seen / run.corpus_tokens
    python = sys.version.split()[0]
    whole = sum(count == AGREEMENT_TOKENS for count in agreement)
    return f"""# nanovllm-demo

A Qwen3 checkpoint small enough to live in a repository. It is here so that `example.py` shows sensible text
on a fresh machine without a download, and so that tests have a model whose logits are not noise. It knows a
little about Python and nothing else.

| | |
| --- | --- |
| parameters | {run.num_parameters:,} (tied embeddings), stored in bfloat16 |
| vocabulary | {run.vocab_size:,} byte-level BPE tokens, learned from the same text |
| longest sequence | 4,096 tokens; it was trained on sequences of {run.context:,} and {run.long_context:,} |
| chat format | ChatML, as in Qwen3; `enable_thinking=False` is understood, thoughts are never written |

## Training

    {run.command}

- Machine: {run.machine}, PyTorch {torch.__version__}, Python {python}.
- Run: {run.steps:,} steps, {run.tokens_seen:,} tokens, {run.seconds:.0f} seconds.
- Data: {run.num_files:,} files ({run.corpus_bytes:,} bytes) of CPython's standard library (`--stdlib`),
  {run.num_dialogues:,} dialogues made from their docstrings and functions, and a few written by hand
  (`scripts/demo_chats.py`); {run.corpus_tokens:,} tokens in all.

On average each token was seen {passes:.0f} times. Much of the text is known by heart, and that is what was
wanted: a confident model, whose greedy output hardly depends on rounding.

| loss | nats per token |
| --- | --- |
| mean of the last steps of training | {run.running_loss:.3f} |
{losses}
| files that were held out, weights in bfloat16 | {run.held_out_loss:.3f} |

Greedy output in bfloat16 on the machine above and in float32 on its CPU was the same for {AGREEMENT_TOKENS}
tokens (or until the text ended) on {whole} of {len(agreement)} code prompts. Leading tokens shared, prompt by
prompt: {", ".join(map(str, agreement))}.

## Samples

{examples}

## Files

| file | bytes |
| --- | --- |
{files}

## Limits

It makes things up, repeats itself, reads English alone, and remembers its sums instead of computing them.
Judge an engine's speed and correctness with it, never its answers.

## Licence of the data

The text that it learned from is CPython's, distributed under the PSF License Version 2 ({licence});
single files carry notices of their own.

{_quoted(sys.copyright)}
"""


def _example(prompt: str, text: str) -> str:
    return f"Prompt:\n\n{_quoted(prompt)}\n\nGreedy continuation:\n\n{_quoted(text)}"


def _quoted(text: str) -> str:
    return "\n".join(("    " + line).rstrip() for line in text.rstrip("\n").split("\n"))
