"""Calls that mypy reads and nobody runs: a wrong option of LLM is an error before the script starts, and results need
no assert.

Each `type: ignore` is needed: mypy complains of one that ignores nothing (warn_unused_ignores in pyproject.toml).
"""

from pathlib import Path

import torch
from typing_extensions import assert_type

from nanovllm import LLM, Config, ErrorOutput, RequestOutput, SampleOutput, SamplingParams


def right() -> None:
    LLM("model", max_num_seqs=8, dtype="float32", eos=[1, 2])
    with LLM(Path("model"), max_model_len=None, tokenizer=Path("tokenizer")) as llm:
        llm.generate("a")
    LLM("model", dtype=torch.float16, device=torch.device("cpu"), kv_cache_dtype="fp8", quantization="int4")
    Config("model", dtype="auto", quantization=None, state_dtype="bfloat16", chat_format="hermes")


def results(llm: LLM, params: SamplingParams) -> list[str]:
    outputs = llm.generate(["a", "b"], params)
    assert_type(outputs, list[RequestOutput])
    texts = [output["text"].strip() for output in outputs]
    texts += [sample["text"].strip() for output in outputs for sample in output.get("samples", [])]
    texts += [output["text"] + output["content"] for output in llm.chat([], split_reasoning=True)]
    for index, output in llm.generate_iter(["a"], ordered=True):
        texts[index] += output["text"]
    for delta in llm.stream("a"):
        texts[delta["index"]] += delta["text"]
    for part in llm.stream_chat([{"role": "user", "content": "a"}], split_tool_calls=True):
        texts[part["index"]] += part["reasoning"] + part["content"] + str(part["tool_calls"][0]["function"])
    return texts


def results_with_errors(llm: LLM) -> list[str]:
    texts = []
    for output in llm.generate(["a"], on_error="return"):
        if "error" in output:
            texts.append(output["error"].strip())
        else:
            assert_type(output, RequestOutput)
            texts.append(output["text"].strip())
    for _, each in llm.generate_iter(["a"], None, on_error="return"):
        assert_type(each, RequestOutput | ErrorOutput)
        each["text"].strip()  # type: ignore[union-attr]
    return texts


def best(samples: list[SampleOutput]) -> SampleOutput:
    return max(samples, key=lambda sample: len(sample["text"]))


def wrong() -> None:
    LLM("model", max_num_sqs=8)  # type: ignore[call-arg]
    LLM("model", max_num_seqs="8")  # type: ignore[arg-type]
    LLM("model", dtype="bf16")  # type: ignore[arg-type]
    LLM("model", kv_cache_dtype="int8")  # type: ignore[arg-type]
    LLM("model", quantization="fp4")  # type: ignore[arg-type]
    Config("model", attention_backend="flash")  # type: ignore[arg-type]
    LLM("model").generate("a", on_error="ignore")  # type: ignore[call-overload]
