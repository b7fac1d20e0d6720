"""Checkpoints of SmolLM2-135M-Instruct in 4 bits, made by llm-compressor: what calibration saves.

    python scripts/real_model.py
    python -m venv compress && compress/bin/pip install llmcompressor
    compress/bin/python scripts/calibrated_checkpoints.py checkpoints
    python benchmarks/accuracy.py --formats unquantized --checkpoints checkpoints/*

All are in compressed-tensors' format. Groups have 64 columns, because 128 do not divide the 576 of most layers. The
calibration's texts are docstrings of Python's standard library, which `benchmarks/accuracy.py` does not measure with.
The table in docs/performance.md was made with llm-compressor 0.14.0.1 and compressed-tensors 0.19.0. On two busy CPU
cores a checkpoint takes up to ten minutes.
"""

import argparse
import ast
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from real_model import default_folder

GROUP, NUM_TEXTS, TEXT_TOKENS = 64, 32, 512
MIN_CHARS = 200


def docstrings() -> list[str]:
    """The longer ones of the standard library, in the order of its files."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                found += [text] if len(text) >= MIN_CHARS else []
    return found


def calibration(tokenizer) -> list[list[int]]:
    """Pieces of TEXT_TOKENS tokens, spread over the texts."""
    tokens = [token for text in docstrings() for token in tokenizer.encode(text + "\n\n")]
    pieces = [tokens[i : i + TEXT_TOKENS] for i in range(0, len(tokens) - TEXT_TOKENS + 1, TEXT_TOKENS)]
    return pieces[:: max(1, len(pieces) // NUM_TEXTS)][:NUM_TEXTS]


def compress(source: str, output: str, modifiers: list) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    pieces = calibration(tokenizer)
    dataset = Dataset.from_dict({"input_ids": pieces, "attention_mask": [[1] * TEXT_TOKENS for _ in pieces]})
    options = {"max_seq_length": TEXT_TOKENS, "num_calibration_samples": len(pieces)}
    oneshot(model=model, dataset=dataset, recipe=modifiers, **options)
    model.save_pretrained(output, save_compressed=True)
    tokenizer.save_pretrained(output)


def int4(symmetric: bool) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def rounded(source: str, output: str) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    compress(source, output, [QuantizationModifier(**int4(True))])


def gptq(source: str, output: str) -> None:
    from llmcompressor.modifiers.quantization import GPTQModifier

    compress(source, output, [GPTQModifier(**int4(True))])


def awq(source: str, output: str) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier

    if not torch.cuda.is_available():  # llm-compressor page-locks tensors, which a CPU alone cannot.
        torch.Tensor.pin_memory = lambda tensor, *args: tensor
    compress(source, output, [AWQModifier(), QuantizationModifier(**int4(False))])


def mxfp4(source: str, output: str) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    compress(source, output, [QuantizationModifier(targets="Linear", scheme="MXFP4A16", ignore=["lm_head"])])


METHODS: dict[str, Callable[[str, str], None]] = {"rounded": rounded, "gptq": gptq, "awq": awq, "mxfp4": mxfp4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the folder that gets a folder for each method")
    parser.add_argument("--model", default=str(default_folder()), help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    for method in args.methods:
        METHODS[method](args.model, str(args.output / method))
        print(args.output / method, file=sys.stderr)


if __name__ == "__main__":
    main()
