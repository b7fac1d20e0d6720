"""Every option that a user gives: what is accepted and kept, what is refused, and what the refusal says.

SPECS has what docs/reference.md allows. The tests go through the rules that the options declare: an option without a
row fails, and so does a rule that no longer allows what its row says.
"""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from configs import dummy

from nanovllm import PoolingParams, SamplingParams, StructuredOutputsParams
from nanovllm.config import Config
from nanovllm.engine.text.formats.all_formats import FORMATS
from nanovllm.engine_options import EngineOptions
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.tasks.embed import EmbedFormat
from nanovllm.layers.formats.all_formats import QUANTIZATIONS
from nanovllm.models.presets import preset_config
from nanovllm.utils.checks import quoted
from nanovllm.utils.option_hints import HINTS
from nanovllm.utils.rules import rules_of

pytestmark = pytest.mark.usefixtures("no_network")

NAN, INF = math.nan, math.inf
TINY, LARGEST = (
    float(np.finfo(np.float32).tiny),
    float(np.finfo(np.float32).max),
)  # of the numbers that float32 can hold


class Spec(NamedTuple):
    """What one option accepts.

    Attributes:
        allowed: what a refusal says of it.
        right: values that are kept as they are.
        wrong: values that are refused. The refusal shows them.
        others: values that are refused, and shown in another form.
        kept: pairs of a value and what is kept of it.
        beside: other options that such values need.
    """

    allowed: str
    right: list[Any]
    wrong: list[Any]
    others: Sequence[Any] = ()
    kept: Sequence[tuple[Any, Any]] = ()
    beside: Mapping[str, Any] = MappingProxyType({})


def is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one is other)


def spec(allowed: str, right: list[Any], wrong: list[Any], **more: Any) -> Spec:
    return Spec(allowed, right, [value for value in wrong if not any(is_same(value, each) for each in right)], **more)


def integer(low: int, high: int, allowed: str = "", *also: Any, **more: Any) -> Spec:
    """also: what is accepted beside the integers."""
    wrong = [low - 1, high + 1, 10**30, -(10**30), float(low), low + 0.5, str(low), "", None, True, False, NAN, INF]
    kept = [(np.int64(high), high), *more.pop("kept", [])]
    wrong += [[low], {low}, b"1", np.bool_(True), np.float64(low), np.int64(high) + 0.5]
    others = [np.array([low, low + 1])]
    return spec(allowed or f"an integer in {low}..{high}", [low, high, *also], wrong, kept=kept, others=others, **more)


def number(low: float, high: float, allowed: str, *also: Any, is_open: bool = False, **more: Any) -> Spec:
    """is_open: the low end itself is refused."""
    first, below = (math.ulp(low), low) if is_open else (low, math.nextafter(low, -INF))
    wrong = [below, math.nextafter(high, INF), NAN, INF, -INF, 10**310, str(high), "", None, True, False, [high], 1j]
    wrong += [np.bool_(True), np.float64("nan")]
    kept = [(np.float64(high), float(high))]
    return spec(allowed, [first, high, *also], wrong, kept=kept, others=[np.array([high, high])], **more)


def float32(low: float, high: float, allowed: str) -> Spec:
    """Of a request. What float32 would round to zero or infinity is refused."""
    usual = number(low, high, allowed)
    kept = [*usual.kept, (np.float32(0.5), 0.5), (torch.tensor(0.5), 0.5), (Fraction(1, 2), 0.5), (np.int64(1), 1.0)]
    return usual._replace(wrong=[*usual.wrong, 1e-40, -1e-40, 1e300], kept=kept)


def flag(converts: bool = True, **more: Any) -> Spec:
    """converts: numpy's values are Python's."""
    wrong = [0, 1, None, "yes", "False", 1.0, NAN, [True], *([np.int64(1)] if converts else ())]
    return spec("True or False", [True, False], wrong, kept=[(np.bool_(True), True)] if converts else [], **more)


def choice(*names: str, **more: Any) -> Spec:
    first = names[0]
    wrong = ["", first.upper(), f"{first} ", f"{first}x", None, 1, True, NAN, [first], first.encode(), (first,)]
    return spec(more.pop("allowed", f"one of {', '.join(names)}"), list(names), wrong, **more)


def name(allowed: str, right: list[Any], **more: Any) -> Spec:
    return spec(allowed, right, [5, True, "", b"name", ["name"], NAN, None], **more)


def texts() -> Spec:
    wrong = [("",), ("a", ""), (b"a",), (5,), ("a", None), (NAN,), 5, True]
    kept = [("END", ("END",)), (["a", "b"], ("a", "b")), (None, ()), (np.array(["a"]), ("a",)), (np.str_("a"), ("a",))]
    allowed = "a text or a list of texts, none of them empty"
    return spec(allowed, [(), ("a",), ("\n\n", "漢字", " ")], wrong, others=["", b"a"], kept=kept)


def token_ids(allowed: str, *also: Any, **more: Any) -> Spec:
    wrong = [(-1,), (2**31,), (1.0,), ("1",), (True,), (None,), (3, -1), (NAN,), 5, (), True]
    kept = [([3, 4], (3, 4)), ({3}, (3,)), (np.array([3, 4]), (3, 4)), (torch.tensor([3, 4]), (3, 4))]
    return spec(allowed, [(0,), (5, 2**31 - 1), *also], wrong, others=["5", "", [[1]]], kept=kept, **more)


class Feature:
    option = "warmer"

    def edit_logits(self) -> None: ...


FEATURE = Feature()
CHAT_FORMATS = "harmony", "gemma4", "mistral", "seed_oss", "qwen_xml", "hermes", "llama3_json", "think", "plain"
MODEL_LEN = 40960  # of the published shape
OF_CONFIG = {
    "model": name("a directory or a hub id", ["Qwen3-0.6B"]),
    "max_num_batched_tokens": integer(1, 1048576),
    "max_num_seqs": integer(1, 32768),
    "max_model_len": integer(2, 16777216, "an integer in 2..16777216, or None for the model's own", None)._replace(
        right=[2, MODEL_LEN], kept=[(None, MODEL_LEN), (np.int32(100), 100), (2**24, MODEL_LEN)]
    ),
    "gpu_memory_utilization": number(0.0, 1, "a number in (0, 1]", 0.5, is_open=True),
    "tensor_parallel_size": integer(1, 8),
    "data_parallel_size": integer(1, 64),
    "watchdog_timeout": number(1, 86400, "a number in 1..86400, or None for no watchdog", None),
    "enforce_eager": flag(),
    "kvcache_block_size": spec(
        "a power of two in 16..65536",
        [16, 32, 256, 65536],
        [0, -16, 1, 8, 17, 48, 255, 2**17, 2**40, 256.0, "256", None, True, NAN, [256], np.float64(32)],
        kept=[(np.int64(32), 32)],
    ),
    "num_kvcache_blocks": integer(
        1, 2**23, "an integer in 1..8388608 (2147483648 tokens in blocks of 256), or -1 to derive it", -1
    ),
    "kvcache_gib": number(0.0, 65536, "a number in (0, 65536], or None to derive it", None, is_open=True),
    "kv_cache_dtype": choice("auto", "fp8", "fp8_e4m3")._replace(
        right=[],
        kept=[("auto", torch.float32), *((each, torch.float8_e4m3fn) for each in ("fp8", torch.float8_e4m3fn))],
    ),
    "logprobs_mode": choice("raw_logprobs", "processed_logprobs"),
    "state_dtype": choice("float32", "float16", "bfloat16")._replace(
        right=[], kept=[("float32", torch.float32), (torch.float32, torch.float32)]
    ),
    "kv_cache_scales": choice("auto", "checkpoint", "calibrated", "one", beside={"kv_cache_dtype": "fp8"}),
    "device": spec(
        "one of auto, cuda, cpu, or cuda:N for the GPU number N",
        ["cpu"],
        ["gpu", "AUTO", "auto ", "cuda:", "cuda:-1", "cuda:a", "cuda:1 ", "cuda1", "mps", "", 0, None, True, ["cpu"]],
        kept=[(torch.device("cpu"), "cpu")],
    ),
    "dtype": choice("auto", "bfloat16", "float16", "float32", "half", "float")._replace(
        right=[],
        kept=[
            *[(name, torch.float16) for name in ("half", "float16", np.str_("float16"), torch.float16)],
            *[(name, torch.float32) for name in ("float", "float32", torch.float32)],
            *[(name, torch.bfloat16) for name in ("bfloat16", torch.bfloat16)],
        ],
    ),
    "quantization": choice("fp8", "int4", "mxfp4", allowed="None or one of fp8, int4, mxfp4")._replace(
        right=[None, "fp8", "int4", "mxfp4"], wrong=["int3", "awq", "", "FP8", 8, True, ["fp8"], b"fp8"]
    ),
    "lora": name("a name, or None", [None]),
    "load_format": choice("auto", "dummy")._replace(right=["dummy"]),
    # What a checkpoint can do is its files' matter: see tests/vectors.
    "task": choice("auto", "generate", "embed", "classify", "rerank")._replace(
        right=["generate", "embed", "rerank"], kept=[("auto", "generate")]
    ),
    "text_only": flag(),
    "attention_backend": choice("auto", "flash_attn", "triton", "torch"),
    "enable_prefix_caching": flag(),
    "mixed_step_rows": integer(
        0, 1024, "None, or in 0..1024 (the smaller of 1024 and max_num_batched_tokens)", None, kept=[(None, None)]
    ),
    "deterministic": flag(),
    "overlap_steps": flag(),
    "plain": flag(),
    "speculation": spec("None or one of suffix", [None, "suffix"], ["draft", "SUFFIX", "", True, 1, ["suffix"]]),
    "max_speculative_tokens": integer(1, 15),
    "seed": integer(0, 2**63 - 1, "None or in 0..2**63 - 1", None)._replace(kept=[(np.uint64(2**63 - 1), 2**63 - 1)]),
    "skip_tokenizer_init": flag(),
    "use_tqdm": flag(),
    "tokenizer": name("a name, or None", [None]),
    "chat_format": choice(*CHAT_FORMATS, allowed=f"None or one of {', '.join(CHAT_FORMATS)}")._replace(
        right=[None, *CHAT_FORMATS], wrong=["chatml", "", "Harmony", 5, True, ["harmony"], b"harmony"]
    ),
    "revision": name("a name, or None", [None]),
    "hf_config": spec(
        "a transformers configuration, or None to read the model's",
        [preset_config("Qwen3-0.6B")],
        [{}, {"max_position_embeddings": 512}, "config.json", 5, True],
    ),
    "features": spec(
        "a list of engine.features.feature.Feature objects, each with an `option` of its own",
        [(), [FEATURE]],
        [5, "warmer", None, [5], ["warmer"], [{}], {"option": 1}, [FEATURE, FEATURE]],
    ),
    "eos": spec(
        "token ids >= 0",
        [],
        [-1, 1.0, "2", None, True, [1, -1], [1, "2"], [1.0], [True], [None], {1: 2}, NAN],
        kept=[
            ((), (151645,)),  # the model's
            *[(given, (3,)) for given in (3, [3], {3}, (3, 3), np.int64(3))],
            *[(given, (3, 7)) for given in (np.array([7, 3]), [np.int32(7), 3], (np.int64(3), np.int64(7)))],
        ],
    ),
}

FORM = StructuredOutputsParams(choice=("yes", "no"))
FINITE = "finite number in 1.2e-38..3.4e+38"
PENALTY = float32(-2.0, 2.0, "a number in -2..2 that float32 can hold")
LOGPROBS = integer(0, 20, "None or an integer in 0..20", None)
BIASES = "a dict of token ids >= 0 to numbers in -100..100"
ALL_TOKENS = "an integer in 1..2**31 - 1, or 0 or -1 for all tokens"
ONE_OR_MORE = "a list of one or more token ids >= 0, or None"
PROMPT_INDEX = "an integer in -2**31 + 1..2**31 - 1"
OF_SAMPLING_PARAMS = {
    "temperature": float32(0.0, LARGEST, f"0 (greedy), or a {FINITE}, as float32 can hold"),
    "max_tokens": integer(1, 2**31 - 1, "an integer in 1..2**31 - 1, or None", None)._replace(
        # A column of integers and gaps is one of floats.
        kept=[(np.array(5), 5), (torch.tensor(5), 5), (np.int64(5), 5)]
    ),
    "ignore_eos": flag(),
    "seed": integer(0, 2**63 - 1, "None or an integer in 0..2**63 - 1", None),
    "top_k": integer(0, 2**31 - 1, ALL_TOKENS, kept=[(-1, 0), (np.int32(-1), 0)])._replace(wrong=[-2, 2**31, 1.0, "1"]),
    "top_p": float32(TINY, 1.0, "a number in 1.2e-38..1"),
    "min_p": float32(0.0, 1.0, "a number in 0..1 that float32 can hold"),
    "min_tokens": integer(0, 2**31 - 1, "an integer in 0..2**31 - 1", beside={"max_tokens": None}),
    "stop": texts(),
    "include_stop_str_in_output": flag(),
    "stop_token_ids": token_ids("a list of token ids >= 0", ())._replace(others=["5"], kept=[(None, ())]),
    "n": integer(1, 16384),
    "logprobs": LOGPROBS,
    "logprob_token_ids": token_ids(ONE_OR_MORE, None, beside={"logprobs": 0}),
    "prompt_logprobs": LOGPROBS,
    "prompt_logprobs_start": integer(-(2**31) + 1, 2**31 - 1, PROMPT_INDEX, 1, beside={"prompt_logprobs": 0}),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": float32(TINY, LARGEST, f"a {FINITE} (1 is none)"),
    "skip_special_tokens": flag(),
    "structured_outputs": spec("StructuredOutputsParams", [None, FORM], ["json", {"json": {}}, 1, True]),
    "thinking_token_budget": integer(0, 2**31 - 1, "an integer in 0..2**31 - 1, or None", None),
    "thinking_end_text": spec("a text", ["", "So."], [5, True, None, b"a", ["a"]], beside={"thinking_token_budget": 5}),
    "logit_bias": spec(
        BIASES,
        [(), ((0, -100.0), (5, 1.5), (2**31 - 1, 100.0))],
        [((-1, 0.0),), ((5, 100.5),), ((5, NAN),), ((5, 1e-40),), (("a", 0.0),), ((True, 0.0),), ((5, "1"),), 5, [5]],
        others=["5", {5: 1, 6: 101}, {2**31: 1}, ((5, 1.0), (5, 2.0))],
        kept=[
            ({5: 1, 6: -2.5}, ((5, 1.0), (6, -2.5))),
            ({"5": 1, np.int64(6): np.float32(-2.5)}, ((5, 1.0), (6, -2.5))),
            (None, ()),
        ],
    ),
    "allowed_token_ids": token_ids(ONE_OR_MORE, None),
    "bad_words": texts(),
    "extra_args": spec(
        "a dict of names to values",
        [(), (("warmer", 2.0),), (("a", None), ("b", [1]))],
        [(5,), ("a",), ((5, 1),), (("a", 1, 2),), 5],
        others=["a", {5: 1}],
        kept=[({"a": [1]}, (("a", [1]),)), (None, ())],
    ),
}

EXPRESSION = spec("a regular expression", ["a+", "漢"], ["", 5, True, b"a", ["a"], NAN])
OF_STRUCTURED_OUTPUTS = {
    "json": spec(
        "a JSON schema, as a dict, a string or a pydantic model",
        ['{"type": "object"}'],
        [5, True, ["a"], NAN],
        kept=[({"type": "object"}, '{"type": "object"}')],
    ),
    "regex": EXPRESSION,
    "choice": spec(
        "a list of one or more texts, none of them empty",
        [("a",), ("yes", "no")],
        [(), ("a", ""), (1,), 5, "yes", ["a", None], NAN],
        others=[[], b"a"],
        kept=[(["a", "b"], ("a", "b")), (np.array(["a"]), ("a",))],
    ),
    "grammar": spec(
        "the text of a grammar, at most 1048576 characters",
        ["start: A", "a" * 2**20],
        ["", " \n", "a" * (2**20 + 1), 5, True, ["a"]],
    ),
    "whitespace_pattern": spec(
        "a regular expression, or None", ["", " ?", None], [5, True, b" ", [" "]], beside={"json": "{}"}
    ),
    "additional_properties": flag(beside={"json": "{}"}),
}
OF_LINES = {
    "id_column": name("a column's name", ["id", "key"]),
    "chat_template_kwargs": spec("a JSON object", [{}, {"a": [1]}], [None, 5, True, "{}", [1], ()]),
    "line_parameters": flag(converts=False),
    "split_reasoning": flag(converts=False),
    "split_tool_calls": flag(converts=False),
}
OF_EMBEDDING_LINES = {
    "id_column": OF_LINES["id_column"],
    "embedding_dtype": choice("float32", "float16"),
}
SPECS = {Config: OF_CONFIG, SamplingParams: OF_SAMPLING_PARAMS, LineFormat: OF_LINES, EmbedFormat: OF_EMBEDDING_LINES}
SPECS[StructuredOutputsParams] = OF_STRUCTURED_OUTPUTS
SPECS[PoolingParams] = {
    "pooling": choice("auto", "last", "mean", "cls"),
    "normalize": flag(),
    "dimensions": integer(1, 2**31 - 1, "an integer in 1..the model's hidden_size, or None", None),
    "task": choice("auto", "embed", "classify", "rerank"),
}


def make(cls: type, **options: Any) -> Any:
    if cls is Config:
        return dummy(**{"device": "cpu", "skip_tokenizer_init": "tokenizer" not in options} | options)
    return cls(**options)


def declared(cls: type) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in rules_of(cls)))


OPTIONS = [pytest.param(cls, name, id=f"{cls.__name__}-{name}") for cls in SPECS for name in declared(cls)]


def test_every_option_has_rules_and_a_row():
    for cls, specs in SPECS.items():
        assert set(declared(cls)) == set(specs)
        if cls not in (LineFormat, EmbedFormat):  # Some options of lines are checked by what reads them.
            assert set(specs) == {field.name for field in dataclasses.fields(cls)}


def names_in(kind: Any) -> list[str]:
    """All that a type's Literals have."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [name for each in get_args(kind) for name in names_in(each)]


def test_types_have_the_names_that_are_accepted():
    kinds = get_type_hints(EngineOptions, localns={"torch": torch})
    choices = {name: rule.choices for name, _, rule in rules_of(Config) if rule.choices}
    choices |= {"quantization": QUANTIZATIONS, "chat_format": FORMATS}
    assert {name: names_in(kind) for name, kind in kinds.items() if names_in(kind)} == {
        name: list(names) for name, names in choices.items()
    }


@pytest.mark.parametrize(("cls", "name"), OPTIONS)
def test_right_values_are_kept(cls, name):
    row = SPECS[cls][name]
    for given, expected in [*((value, value) for value in row.right), *row.kept]:
        kept = getattr(make(cls, **dict(row.beside) | {name: given}), name)
        assert kept == expected, given
        assert type(kept) is type(expected), given
        if isinstance(expected, tuple):
            assert [*map(type, kept)] == [*map(type, expected)], given


@pytest.mark.parametrize(("cls", "name"), OPTIONS)
def test_a_wrong_value_is_refused_with_its_option_itself_and_what_is_allowed(cls, name):
    row = SPECS[cls][name]
    assert row.wrong
    for value, is_shown in [*((each, True) for each in row.wrong), *((each, False) for each in row.others)]:
        plain = value.item() if isinstance(value, np.generic) else value
        shown = re.escape(quoted(plain)) if is_shown else ".*"
        says = rf"^{name}={shown}: must be {re.escape(row.allowed)}($|; entry \d+ is |, each token once$)"
        with pytest.raises(ValueError, match=says):
            make(cls, **dict(row.beside) | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("stop", ["x"] * 100_000 + [5], "entry 100000 is 5"),
        ("stop_token_ids", [*range(100_000), -7], "entry 100000 is -7"),
        ("logit_bias", dict.fromkeys(range(50), 1) | {50: 500}, r"entry 50 is \(50, 500\.0\)"),
        ("allowed_token_ids", [1, 2, True], "entry 2 is True"),
        ("logit_bias", ((5, 1.0), (5, 2.0)), ""),
    ],
)
def test_the_wrong_entry_of_a_collection_is_named(name, value, found):
    message = f"; {found}$" if found else ", each token once$"
    with pytest.raises(ValueError, match=f"^{name}=.*{message}"):
        SamplingParams(**{name: value})


# -- several options ---------------------------------------------------------------------------------------------------

PLAIN = {"plain": True}
TOGETHER = [
    (
        Config,
        {"num_kvcache_blocks": 2**27 + 1, "kvcache_block_size": 16},
        r"=134217729: must be an integer in 1..134217728 \(2147483648 tokens in blocks of 16\)",
    ),
    (Config, {"kv_cache_dtype": "fp8"} | PLAIN, "='fp8': must be 'auto' with plain=True"),
    (Config, {"kv_cache_scales": "one"}, "='one': must be 'auto' without kv_cache_dtype='fp8'"),
    (Config, {"quantization": "fp8"} | PLAIN, "='fp8': must be None with plain=True"),
    (Config, {"mixed_step_rows": 101, "max_num_batched_tokens": 100}, "=101: must be None, or in 0..100 "),
    (Config, {"mixed_step_rows": 8, "tensor_parallel_size": 2}, "=8: must be 0 or None with tensor_parallel_size=2"),
    (Config, {"mixed_step_rows": 8} | PLAIN, "=8: must be 0 or None with plain=True"),
    (Config, {"speculation": "suffix"} | PLAIN, "='suffix': must be None with plain=True"),
    (Config, {"task": "embed"} | PLAIN, "='embed': must be 'generate' or 'auto' with plain=True"),
    (
        Config,
        {"task": "embed", "speculation": "suffix"},
        "='embed': must be 'generate' or 'auto' with speculation='suffix'",
    ),
    (Config, {"tokenizer": "a", "skip_tokenizer_init": True}, "='a': must be None with skip_tokenizer_init=True"),
    (Config, {"lora": "a"}, "='a': must be None with load_format='dummy'"),
    (SamplingParams, {"min_tokens": 65}, "=65: must be at most max_tokens, 64"),
    (SamplingParams, {"logprob_token_ids": [5]}, r"=\(5,\): must be None where logprobs is not given"),
    (SamplingParams, {"prompt_logprobs_start": 1}, "=1: must be 0 where prompt_logprobs is not given"),
    (SamplingParams, {"thinking_end_text": "So."}, "='So.': must be '' where thinking_token_budget is not given"),
    (StructuredOutputsParams, {"whitespace_pattern": " ", "regex": "a"}, "=' ': must be None where json is not given"),
    (
        StructuredOutputsParams,
        {"additional_properties": True, "regex": "a"},
        "=True: must be False where json is not given",
    ),
]
ALLOWED_TOGETHER = [
    (Config, {"num_kvcache_blocks": 2**27, "kvcache_block_size": 16}),
    (Config, {"mixed_step_rows": 100, "max_num_batched_tokens": 100}),
    (Config, {"mixed_step_rows": 0, "tensor_parallel_size": 2}),
    (Config, {"mixed_step_rows": 0} | PLAIN),
    (SamplingParams, {"min_tokens": 64}),
    (SamplingParams, {"min_tokens": 65, "max_tokens": None}),
]


@pytest.mark.parametrize(("cls", "options", "says"), TOGETHER, ids=lambda value: str(value)[:60])
def test_options_that_do_not_go_together(cls, options, says):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}{says}"):
        make(cls, **options)


def test_every_rule_of_several_options_is_tried():
    rules = Counter((cls, name) for cls in SPECS for name, _, rule in rules_of(cls) if rule.is_of_all)
    assert rules == Counter((cls, next(iter(options))) for cls, options, _ in TOGETHER)


@pytest.mark.parametrize(("cls", "options"), ALLOWED_TOGETHER, ids=str)
def test_options_that_just_go_together(cls, options):
    assert [getattr(make(cls, **options), name) for name in options] == [*options.values()]


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"max_position_embeddings": 2**20}, {"max_num_seqs": 2048}, "max_num_seqs=2048: must be less than 2048 with "),
        ({"max_position_embeddings": 10**9}, {}, "max_model_len=None: must be given for a model of 1000000000 tokens"),
    ],
)
def test_lengths_that_are_the_models(model_dir, changes, options, says):
    directory = model_dir(**changes)
    with pytest.raises(ValueError, match=says):
        Config(directory, max_model_len=None, **options)
    assert Config(directory).max_model_len == 4096
    if options:
        assert Config(directory, max_model_len=None, max_num_seqs=2047).max_model_len == 2**20


def test_a_form_is_exactly_one_thing():
    for options in ({}, {"json": {}, "regex": "a"}, {"regex": "a", "choice": ["a"]}):
        with pytest.raises(ValueError, match="exactly one of json, regex, choice and grammar"):
            StructuredOutputsParams(**options)


# -- odd values --------------------------------------------------------------------------------------------------------


def nested(depth: int, wrap):
    value = wrap(None)
    for _ in range(depth):
        value = wrap(value)
    return value


DEEP = nested(5000, lambda inner: {"a": inner})
ODD = [
    *[10**5000, -(10**5000), [10**5000], {10**5000: 10**5000}, {"9" * 5000: 1}, range(10**5000, 10**5000 + 2)],
    *[np.array(5), np.array(None), np.array("a"), np.array([]), np.array([[1, 2], [3, 4]])],
    *[torch.tensor(5), torch.tensor([[1, 2]]), "\ud800", ["a", "\ud800"], '{"const": "\ud800"}', "a\0b"],
    *[DEEP, nested(5000, lambda inner: [inner]), [DEEP], "x" * 10**6, b"x" * 10**6],
    *[["x"] * 100_000 + [5], list(range(-1, 100_000)), dict.fromkeys(range(100_000), 1e9)],
]


@pytest.mark.parametrize(("cls", "name"), OPTIONS)
def test_every_odd_value_is_accepted_or_refused_in_few_words(cls, name):
    """Huge, deep, or no text that can be encoded."""
    beside, messages = dict(SPECS[cls][name].beside), []
    for value in ODD:
        try:
            make(cls, **beside | {name: value})
        except (ValueError, FileNotFoundError) as error:
            messages.append(str(error))
    assert [message for message in messages if not message.startswith(f"{name}=")] == []
    assert max(map(len, map(str.encode, messages)), default=0) < 1500


def test_short_values_are_quoted_as_they_are():
    for value in (5, -1, None, True, 1.5, "a", "\n", b"a", (1, "a"), [], {}, {"a": [1]}, {1, 2}, range(3), 10**300):
        assert quoted(value) == repr(value)
    assert "\n" not in quoted(np.zeros((40, 40)))
    assert quoted("ab" * 5000) == repr("ab" * 50) + "... (10000 characters)"


@pytest.mark.parametrize(
    ("cls", "name", "value", "says"),
    [
        (StructuredOutputsParams, "json", "{not json", "is not JSON"),
        (StructuredOutputsParams, "json", {"a": object()}, "is not JSON"),
        (StructuredOutputsParams, "json", '{"const": NaN}', "is not JSON"),
        (StructuredOutputsParams, "json", {"maximum": INF}, "is not JSON"),
        (StructuredOutputsParams, "json", {"const": "\ud800"}, "surrogate"),
        (StructuredOutputsParams, "choice", ["a", "\ud800"], "surrogate"),
        (StructuredOutputsParams, "regex", "a\udc00", "surrogate"),
        (SamplingParams, "stop", ["fine", "a\ud800"], "surrogate"),
        (SamplingParams, "bad_words", ["fine", "a\ud800"], "surrogate"),
    ],
)
def test_what_is_no_json_or_no_text(cls, name, value, says):
    with pytest.raises(ValueError, match=f"^{name}=.*{says}"):
        cls(**{name: value})


# -- unknown options ---------------------------------------------------------------------------------------------------

HINTED = (Config, SamplingParams, StructuredOutputsParams)


@pytest.mark.parametrize("cls", HINTED)
def test_an_unknown_option_is_refused_with_what_to_use_instead(cls):
    known = [field.name for field in dataclasses.fields(cls)]
    assert list(inspect.signature(cls).parameters) == known  # as editors and help() show them
    misspelt = {f"{name}x": f"did you mean {name!r}?" for name in known if len(name) > 2}
    for name, says in {**misspelt, **HINTS[cls.__name__], "zzz": f"known: {', '.join(known)}"}.items():
        makers = [lambda **options: make(cls, **options)]
        if cls is Config:  # Before the model is looked for.
            makers.append(lambda **options: Config("/no/such/model", **options))
        elif cls is SamplingParams:
            makers.append(lambda **options: dataclasses.replace(SamplingParams(), **options))
        for maker in makers:
            with pytest.raises(TypeError) as error:
                maker(**{name: 1})
            assert str(error.value) == f"unknown option {name!r}: {says}"


def test_hints_name_options_that_there_are():
    known = {cls.__name__: {field.name for field in dataclasses.fields(cls)} for cls in HINTED}
    for cls, of_cls in known.items():
        assert not of_cls & HINTS[cls].keys()
        for hint in HINTS[cls].values():
            assert set(re.findall(r"\buse (\w+_\w+)", hint)) <= set().union(*known.values())


# -- the objects -------------------------------------------------------------------------------------------------------


def test_parameters_of_requests_are_values():
    """They cannot be changed, and copies are equal, so that one object serves many requests."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")
    assert form == StructuredOutputsParams(json=json.dumps(schema), whitespace_pattern=" ?")
    params = SamplingParams(
        0.5, logit_bias={"5": -1}, allowed_token_ids=[5, 6], bad_words="no", stop="x", structured_outputs=form
    )
    for other in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), dataclasses.replace(params)):
        assert other == params
        assert hash(other) == hash(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 6
    with pytest.raises((AttributeError, TypeError)):
        params.top_q = 1
    assert dataclasses.replace(params, max_tokens=6).max_tokens == 6
    with pytest.raises(ValueError, match="max_tokens=0"):
        dataclasses.replace(params, max_tokens=0)


def test_a_pydantic_model_is_its_schema():
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str

    assert StructuredOutputsParams(json=City) == StructuredOutputsParams(json=City.model_json_schema())

    class Callback(pydantic.BaseModel):
        call: type[int] | object = pydantic.Field(json_schema_extra=lambda schema: 1 / 0)

    with pytest.raises(ValueError, match=r"json=.*Callback.*has no JSON schema"):
        StructuredOutputsParams(json=Callback)
