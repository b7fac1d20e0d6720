"""Embeddings of a model with real weights point where those of transformers do."""

import numpy as np
import pytest
from real_model import default_folder
from vector_checkpoints import VectorReference

from nanovllm import LLM

TEXTS = [
    "The capital of France is Paris.",
    "Once upon a time, in a village by the sea, there lived a carpenter who had never seen a tree.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "人工智能是",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
]


@pytest.mark.real
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_transformers(pooling):
    path = default_folder()
    reference = VectorReference(path)
    options = {"num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_num_batched_tokens": 16, "use_tqdm": False}
    with LLM(str(path), device="cpu", dtype="float32", task="embed", **options) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS, pooling=pooling, use_tqdm=False), strict=True):
            expected = reference.pooled(llm.tokenizer(text)["input_ids"], pooling).numpy()
            cosine = output["embedding"] @ expected / np.linalg.norm(expected)
            assert cosine > 0.99999
