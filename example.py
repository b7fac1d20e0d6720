"""Two chat completions: `python example.py [MODEL]`.

MODEL is a directory or a hub id. Without it, ~/huggingface/Qwen3-0.6B if that is there, else the small demo model
that comes with the repository.
"""

import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams

QUESTIONS = ["introduce yourself", "list all prime numbers within 100"]


def default_model() -> str:
    downloaded = Path("~/huggingface/Qwen3-0.6B").expanduser()
    demo = Path(__file__).resolve().parent / "assets" / "demo-model"
    return str(downloaded if downloaded.is_dir() else demo)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else default_model()
    with LLM(model) as llm:
        # chat() applies the model's template. The text of a template as a prompt of generate() works too, but where a
        # tokenizer adds a token at the beginning, as Llama's does, such a prompt has it twice.
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, SamplingParams(temperature=0.6, max_tokens=256))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\nPrompt: {question!r}\nCompletion: {output['text']!r}")


if __name__ == "__main__":
    main()
