"""How fast are texts embedded, beside the floor of a prefill, transformers and sentence-transformers?

    python benchmarks/embedding.py --model Qwen3-0.6B --load-format dummy      # random weights of a published shape
    python benchmarks/embedding.py --model PATH --texts 200 --device cpu --compare transformers sentence-transformers

The texts are random tokens of 20 to 512 (`--shortest`, `--longest`), in random order. The engine computes them one
after the other, without padding. The others get them as sentence-transformers gives them: the longest first, in batches
of `--batch-size` that are padded to their longest text.

The floor is the time of the model's products, in layers and attention, at the rate of a large product that is measured
on this machine. `share_of_floor` is the floor over the engine's time: 1 is the floor itself. Each figure is of the best
of `--passes`; one more warms up. All run in one process, one after the other.

sentence-transformers loads a checkpoint with a tokenizer, so it needs a folder as the model, and gets texts: the
decoded tokens. Its time has the tokenizer's in it, and so has then the engine's.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.bench.floor import ModelSize, floor_seconds, measure_ceilings

OTHERS = "transformers", "sentence-transformers"


def make_texts(num: int, shortest: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(vocab_size), k=rng.randint(shortest, longest)) for _ in range(num)]


def best_seconds(embed: Callable[[Any], object], passes: list[Any], device: str) -> float:
    """passes: the texts of each; other ones each time, because the engine would find them in its cache. The first warms
    up."""
    found = []
    for texts in passes:
        start = time.perf_counter()
        embed(texts)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:] or found)


@torch.inference_mode()
def embed_padded(model: Any, texts: list[list[int]], batch_size: int) -> list[torch.Tensor]:
    """The last tokens' hidden states of a model of transformers, in padded batches, the longest first."""
    order, found = sorted(texts, key=len, reverse=True), []
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        width = len(batch[0])
        input_ids = torch.tensor([text + [0] * (width - len(text)) for text in batch], device=model.device)
        lengths = torch.tensor([len(text) for text in batch], device=model.device)
        mask = torch.arange(width, device=model.device) < lengths[:, None]
        hidden = model(input_ids, attention_mask=mask.long()).last_hidden_state
        last = hidden[torch.arange(len(batch), device=model.device), lengths - 1].float()
        found.append(torch.nn.functional.normalize(last).cpu())
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    has_texts = "sentence-transformers" in options.compare
    # Decoded random tokens are more tokens when they are encoded again.
    sizes = {"max_num_batched_tokens": options.max_num_batched_tokens}
    sizes["max_model_len"] = (8 if has_texts else 1) * options.longest + 1
    if has_texts and not Path(options.model).is_dir():
        raise SystemExit("--compare sentence-transformers: --model must be a folder with a tokenizer")
    common = {"load_format": options.load_format, "device": options.device, "dtype": options.dtype, "task": "embed"}
    with LLM(options.model, skip_tokenizer_init=not has_texts, use_tqdm=False, **common, **sizes) as llm:
        config = llm.config
        device, tokenizer = config.device, llm.tokenizer
        numbers = options.texts, options.shortest, options.longest, config.hf_config.vocab_size
        of_tokens = [make_texts(*numbers, seed) for seed in range(options.passes + 1)]
        texts: list[Any] = of_tokens
        if tokenizer is not None:
            texts = [tokenizer.batch_decode(each, skip_special_tokens=True) for each in of_tokens]
            of_tokens = [tokenizer(each)["input_ids"] for each in texts]
        seconds = {
            "nanovllm": best_seconds(
                lambda some: llm.embed(some, options.pooling, use_tqdm=False),
                texts if tokenizer is None else of_tokens,
                device,
            )
        }
        if tokenizer is not None:
            llm.reset_prefix_cache()
            seconds["nanovllm, from texts"] = best_seconds(
                lambda some: llm.embed(some, options.pooling, use_tqdm=False), texts, device
            )
        size = replace(ModelSize.of(config.hf_config, config.dtype), head_params=0)
        hf_config, dtype = config.hf_config, config.dtype
        name = llm.model_runner.device_name
    lengths = [len(text) for text in of_tokens[-1]]
    ceilings = measure_ceilings(torch.device(device), dtype)
    floor = floor_seconds(size, ceilings, lengths, [1] * len(lengths), 0, 1)
    gc.collect()
    if "transformers" in options.compare:
        from transformers import AutoModel

        model = AutoModel.from_config(hf_config, dtype=dtype).to(device).eval()
        run = lambda some: embed_padded(model, some, options.batch_size)  # noqa: E731
        seconds["transformers"] = best_seconds(run, of_tokens, device)
        del model, run
        gc.collect()
    if has_texts:
        if find_spec("sentence_transformers") is None:
            raise SystemExit("--compare sentence-transformers: pip install sentence-transformers")
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

        other = SentenceTransformer(options.model, device=device, model_kwargs={"torch_dtype": dtype})
        seconds["sentence-transformers"] = best_seconds(
            lambda some: other.encode(some, batch_size=options.batch_size), texts, device
        )
    return {
        "model": options.model,
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "pooling": options.pooling,
        "texts": len(lengths),
        "tokens": sum(lengths),
        "seconds": seconds,
        "tokens_per_second": {name: sum(lengths) / each for name, each in seconds.items()},
        "floor_seconds": floor,
        "share_of_floor": floor / seconds["nanovllm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Qwen3-0.6B", help="a folder, or with --load-format dummy a published shape")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--texts", type=int, default=10_000, help="number of texts")
    parser.add_argument("--shortest", type=int, default=20, help="tokens of the shortest text")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest text")
    parser.add_argument("--pooling", default="last", choices=("last", "mean", "cls"))
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=32, help="texts of a batch of the others")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--compare", nargs="*", default=[], choices=OTHERS)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    report = measure(options)
    print(f"{report['model']}, {report['device']}, {report['texts']} texts of {report['tokens']} tokens")
    for name, each in report["seconds"].items():
        print(f"{name:24} {each:9.3f} s {report['tokens_per_second'][name]:12.0f} tokens/s")
    print(f"floor {report['floor_seconds']:.3f} s; share of the floor: {report['share_of_floor']:.3f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
