"""Options that several commands have, and how their values are read."""

import argparse
import json
from typing import Any

from nanovllm.commands.verbosity import QUIET
from nanovllm.engine_options import EngineOptions
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import quoted
from nanovllm.utils.command_options import add_options

# Options of SamplingParams that a shell can give, in the order of the help; the others belong into lines.
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "min_tokens", "n", "logprobs", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty"),
)
ENGINE = (
    *("enforce_eager", "tensor_parallel_size", "data_parallel_size"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "kvcache_gib", "dtype", "quantization", "kv_cache_dtype", "kv_cache_scales"),
    *("attention_backend", "device", "load_format", "tokenizer", "revision", "state_dtype"),
    *("speculation", "max_speculative_tokens", "plain", "deterministic", "chat_format", "lora"),
)
# Of these the model's generation_config.json may have others.
_OF_MODEL = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), "the model's")
_ONE_ANSWER = ["max_tokens", "seed", *(name for name in SAMPLING if name not in ("n", "logprobs"))]


def add_one_answer(parser: argparse.ArgumentParser) -> None:
    """Options of a command that shows one answer at a time: of its conversation, of sampling and of the engine."""
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    kwargs_help = """variables of the chat template, such as '{"enable_thinking": false}'"""
    parser.add_argument("--chat-template-kwargs", type=json_object, metavar="JSON", help=kwargs_help)
    sampling = parser.add_argument_group("sampling (docs/reference.md)")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="default: no limit")
    sampling.add_argument("--seed", type=int, metavar="N", help="makes the answers reproducible")
    names = [name for name in _ONE_ANSWER if name not in ("max_tokens", "seed")]
    add_options(sampling, SamplingParams, names, other_defaults=_OF_MODEL)
    engine = parser.add_argument_group("engine (docs/reference.md)")
    add_options(engine, EngineOptions, ENGINE, other_defaults={"max_num_seqs": "1"})
    parser.set_defaults(max_num_seqs=1)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, without what the parsers set for themselves."""
    own = ("command", "run", "parser", "arguments", "verbosity", "interrupted")
    found = {name: value for name, value in vars(options).items() if value is not None and name not in own}
    return found | ({"use_tqdm": False} if options.verbosity == QUIET else {})


def given_of_one_answer(options: argparse.Namespace) -> dict[str, Any]:
    """The same for `add_one_answer`: those of sampling are the item "sampling"."""
    found = given_options(options)
    return found | {"sampling": {name: found.pop(name) for name in _ONE_ANSWER if name in found}}


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not JSON: {error}") from None


def json_object(text: str) -> dict[str, Any]:
    value = read_json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no JSON object, such as '{{\"name\": 1}}'")
    return value
