"""What to write instead of an option that does not exist: the nearest known name, or a hint for users of vLLM."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable)

ENGINE_HINTS = {
    "async_scheduling": "use overlap_steps",
    "block_size": "use kvcache_block_size",
    "compilation_config": "CUDA graphs are captured by default; enforce_eager=True goes without them",
    "cpu_offload_gb": "weights stay on the GPU; tensor_parallel_size splits them over several",
    "data_parallel_size": "start one LLM on each GPU, in a process of its own",
    "disable_log_stats": "nothing is logged while the engine works; stats() says what it has done",
    "distributed_executor_backend": "tensor_parallel_size starts its own processes",
    "download_dir": "set the environment variable HF_HOME, or pass a local directory as model",
    "enable_chunked_prefill": "prompts longer than max_num_batched_tokens are always computed in chunks",
    "enable_lora": "LoRA is not supported: merge the adapter into the weights",
    "guided_decoding_backend": "llguidance is the only one; see SamplingParams(structured_outputs=...)",
    "hf_overrides": "pass a changed transformers configuration as hf_config",
    "kv_cache_dtype": "the KV cache has the model's dtype",
    "kv_cache_memory_bytes": "use kvcache_gib",
    "limit_mm_per_prompt": "prompts are text alone",
    "max_context_len": "use max_model_len",
    "max_context_len_to_capture": "CUDA graphs are captured for all lengths",
    "max_logprobs": "requests may ask for 20 at most",
    "max_seq_len_to_capture": "CUDA graphs are captured for all lengths",
    "num_gpu_blocks_override": "use num_kvcache_blocks",
    "pipeline_parallel_size": "pipeline parallelism is not supported; use tensor_parallel_size",
    "quantization": "quantised weights are not supported",
    "speculative_config": "speculative decoding is not supported",
    "structured_outputs_config": "llguidance is the only backend; see SamplingParams(structured_outputs=...)",
    "swap_space": "there is no swapping: a preempted request is computed again",
    "tokenizer_mode": "the tokenizer is the model directory's, in its fast form",
    "trust_remote_code": "no code of a model's repository is run",
}

SAMPLING_HINTS = {
    "best_of": "use n, and choose among the samples",
    "detokenize": "LLM(skip_tokenizer_init=True) gives token ids without text",
    "do_sample": "temperature=0 is greedy, anything above draws",
    "early_stopping": "beam search is not supported",
    "extra_args": "there are no plug-ins to pass them to",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "length_penalty": "beam search is not supported",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "max_length": "use max_tokens, which does not count the prompt",
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "num_beams": "beam search is not supported; n draws several samples",
    "num_return_sequences": "use n",
    "output_kind": "generate() gives whole results, stream() what each step adds",
    "response_format": "use structured_outputs=StructuredOutputsParams(json=...)",
    "spaces_between_special_tokens": "special tokens are joined without spaces",
    "stop_strings": "use stop",
    "suppress_tokens": "use logit_bias, allowed_token_ids or bad_words",
    "thinking_token_budget": 'max_tokens bounds the whole; chat_template_kwargs={"enable_thinking": False} avoids it',
    "truncate_prompt_tokens": "shorten the prompt yourself: prompts may be lists of token ids",
    "use_beam_search": "beam search is not supported; n draws several samples",
}

FORM_HINTS = {
    "disable_additional_properties": 'put "additionalProperties": false into the schema',
    "disable_any_whitespace": "that is the default; whitespace_pattern allows some",
    "disable_fallback": "there is one backend, and nothing falls back",
    "grammar": "use regex or json; grammars are not supported",
    "json_object": 'use json={"type": "object"}',
    "json_schema": "use json",
    "structural_tag": "use regex or json; tags are not supported",
}

CHAT_HINTS = {
    "chat_template_content_format": "content may be a text or a list of text parts in any case",
    "documents": 'pass chat_template_kwargs={"documents": [...]}',
    "lora_request": "LoRA is not supported: merge the adapter into the weights",
    "mm_processor_kwargs": "messages are text alone",
    "on_step": "render the conversations with llm.tokenizer and use generate()",
    "on_error": "render the conversations with llm.tokenizer and use generate()",
}


def unknown_option(name: str, known: Iterable[str], hints: Mapping[str, str], otherwise: str = "") -> TypeError:
    """The error for an unknown option. It says what to use instead: the hint, the nearest known name, or `otherwise`
    (by default the known names)."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    nearest = f"did you mean {near[0]!r}?" if near else otherwise or f"known: {', '.join(known)}"
    return TypeError(f"unknown option {name!r}: {hints.get(name, nearest)}")


def explains_unknown_options(
    hints: Mapping[str, str], otherwise: Callable[[str, object], str] = lambda name, value: ""
) -> Callable[[Function], Function]:
    """A decorator: an unknown keyword of the function or class raises `unknown_option`'s TypeError. `otherwise` makes
    that function's argument from the keyword and its value."""

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        known = {name: None for name, p in signature(function).parameters.items() if p.kind in kinds and name != "self"}

        @wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for name, value in options.items():
                if name not in known:
                    raise unknown_option(name, known, hints, otherwise(name, value))
            return function(*args, **options)

        return checked

    return decorate
