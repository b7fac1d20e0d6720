"""What is a prompt: the forms that every method accepts, and what they refuse."""

import collections
from array import array

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, assert_idle, complete, greedy, make_llm

pd = pytest.importorskip("pandas", reason="needs the extra test")

TEXTS = ["the table names a block", "slots"]
IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def encode(shared_llm):
    """The engine's tokenizer, with a padding token."""
    shared_llm.tokenizer.pad_token = "<|endoftext|>"
    return shared_llm.tokenizer


def joined(deltas) -> list[list[int]]:
    results = collections.defaultdict(list)
    for delta in deltas:
        results[delta["index"]] += delta["token_ids"]
    return [results[i] for i in sorted(results)]


def scored(llm, prompts) -> list[float]:
    return [score["total"] for score in llm.score(prompts, [[9]] * len(list(prompts)), use_tqdm=False)]


WAYS = {
    "generate": lambda llm, prompts: complete(llm, prompts, greedy(3)),
    "stream": lambda llm, prompts: joined(llm.stream(prompts, greedy(3))),
    "generate_iter": lambda llm, prompts: [
        output["token_ids"] for _, output in llm.generate_iter(prompts, greedy(3), ordered=True)
    ],
}

ONE = {
    "list": IDS,
    "tuple": tuple(IDS),
    "range": range(5, 8),
    "deque": collections.deque(IDS),
    "array": array("i", IDS),
    "ndarray": np.array(IDS, np.uint16),
    "list of numpy ints": list(np.array(IDS)),
    "tensor": torch.tensor(IDS),
    "list of a tensor's scalars": list(torch.tensor(IDS)),
    "column": pd.Series(IDS),
    "prompt_token_ids": {"prompt_token_ids": IDS},
    "both": {"prompt": "something else", "prompt_token_ids": torch.tensor(IDS)},
    "nothing beside it": {"prompt_token_ids": tuple(IDS), "multi_modal_data": None, "prompt": None},
    "mapping": collections.UserDict(prompt_token_ids=np.array(IDS)),
    "input_ids": {"input_ids": IDS, "attention_mask": [1, 1, 1]},
}


@pytest.mark.parametrize("prompt", ONE.values(), ids=ONE)
def test_one_prompt_alone_and_in_a_list(llm, prompt):
    expected = complete(llm, [IDS, [3]], greedy(3))
    for run in WAYS.values():
        assert run(llm, prompt) == expected[:1]
        assert run(llm, [prompt, [3]]) == expected
    llm.add_request(prompt, greedy(3))
    done = []
    while not llm.is_finished():
        done += llm.step()[0]
    assert [tokens for _, tokens in done] == expected[:1]
    (score,) = llm.score([[1, 2]], [prompt], use_tqdm=False)
    assert score["token_ids"] == IDS
    assert llm.score([1, 2], prompt, use_tqdm=False) == llm.score(prompts=(1, 2), completions=IDS, use_tqdm=False)
    assert llm.score(prompt, [9], use_tqdm=False) == llm.score([IDS], [[9]], use_tqdm=False)


BATCHES = {
    "tuple": lambda encode: tuple(TEXTS),
    "ndarray": lambda encode: np.array(TEXTS),
    "list of numpy strings": lambda encode: list(np.array(TEXTS)),
    "column": lambda encode: pd.Series(TEXTS, index=[7, 7]),
    "values of a dict": lambda encode: dict(enumerate(TEXTS)).values(),
    "generator": lambda encode: (text for text in TEXTS),
    "dicts": lambda encode: [{"prompt": text} for text in TEXTS],
    "column of dicts": lambda encode: pd.Series([{"prompt": text} for text in TEXTS]),
    "column of token ids": lambda encode: pd.Series([encode(text)["input_ids"] for text in TEXTS]),
    "tokenizer's output": lambda encode: encode(TEXTS),
    "padded right": lambda encode: encode(TEXTS, padding=True, return_tensors="pt", padding_side="right"),
    "padded left": lambda encode: encode(TEXTS, padding=True, return_tensors="np", padding_side="left"),
    "padded to a length": lambda encode: encode(TEXTS, padding="max_length", max_length=40),
    "list of outputs": lambda encode: [encode(text) for text in TEXTS],
    "list of outputs as tensors": lambda encode: [encode(text, return_tensors="pt") for text in TEXTS],
    "list of tensors": lambda encode: [encode(text, return_tensors="pt")["input_ids"] for text in TEXTS],
    "tensors in an output": lambda encode: {"input_ids": [torch.tensor(encode(text)["input_ids"]) for text in TEXTS]},
}


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_batches_of_every_kind(llm, encode, make):
    expected = complete(llm, TEXTS, greedy(3))
    for run in WAYS.values():
        assert run(llm, make(encode)) == expected


def test_rows_of_an_array_and_one_text_in_it(llm):
    rows = [[1, 2, 3], [4, 5, 6]]
    expected = complete(llm, rows, greedy(3))
    for batch in (np.array(rows), torch.tensor(rows)):
        assert complete(llm, batch, greedy(3)) == expected
    assert complete(llm, np.array(TEXTS[0]), greedy(3)) == complete(llm, TEXTS[:1], greedy(3))


def test_arrays_with_padding_and_masks_of_another_shape_are_refused(llm, encode):
    says = r"^prompts: must be .*attention_mask, or a list of these, not an array with the padding token 0 "
    for side in ("left", "right"):
        encoded = encode(TEXTS, padding=True, return_tensors="pt", padding_side=side)
        with pytest.raises(ValueError, match=says):
            llm.generate(encoded["input_ids"], greedy(3))
    for mask in ([1, 1], [[1, 1, 1]], [1]):
        with pytest.raises(ValueError, match="prompts: 'input_ids' and 'attention_mask' differ in shape"):
            llm.generate({"input_ids": IDS, "attention_mask": mask}, greedy(3))


WRONG = {
    "none": (None, "NoneType"),
    "int": (5, "int"),
    "numpy int": (np.int64(5), "not int64"),
    "scalar tensor": (torch.tensor(5), "not Tensor"),
    "bytes": (b"text", "bytes"),
    "bytearray": (bytearray(b"text"), "bytearray"),
    "memoryview": (memoryview(b"text"), "memoryview"),
    "set": ({"a", "b"}, "not set"),
    "frozenset": (frozenset([1, 2]), "not frozenset"),
    "dict of texts": ({"a": "text", "b": "text"}, "not {'a': str, 'b': str}"),
    "empty dict": ({}, "not {}"),
    "table": (pd.DataFrame({"prompt": TEXTS}), "not DataFrame"),
}


@pytest.mark.parametrize(("prompts", "message"), WRONG.values(), ids=WRONG)
def test_what_holds_no_prompts_is_refused_at_once(llm, prompts, message):
    uses = (
        lambda: llm.generate(prompts, greedy(3), use_tqdm=False),
        lambda: llm.generate(prompts, greedy(3), use_tqdm=False, on_error="return"),
        lambda: llm.stream(prompts, greedy(3)),
        lambda: llm.generate_iter(prompts, greedy(3)),
        lambda: llm.score(prompts, [[1]], use_tqdm=False),
    )
    for use in uses:
        with pytest.raises(TypeError, match=f"^prompts: .*{message}"):
            use()
    with pytest.raises(TypeError, match=f"^completions: .*{message}"):
        llm.score([[1]], prompts, use_tqdm=False)
    with pytest.raises(TypeError, match=r"^prompt: "):
        llm.add_request(prompts, greedy(3))


LONG = "a row of slots " * 100_000
NO_IDS = "integer token ids"
WRONG_ELEMENTS = {
    "none": (None, TypeError, f"{NO_IDS}.*NoneType"),
    "int": (5, TypeError, "not int"),
    "nan": (float("nan"), TypeError, "not float"),
    "numpy int": (np.int64(5), TypeError, "not int64"),
    "bytes": (b"text", TypeError, "not bytes"),
    "set": ({1, 2}, TypeError, "not set"),
    "table": (pd.DataFrame({"prompt": TEXTS}), TypeError, "not DataFrame"),
    "dict": ({"text": "a"}, TypeError, "not {'text': str}"),
    "numbers for keys": ({1: 2, 3: 4}, TypeError, "not {1: int, 3: int}"),
    "nested": ([[1, 2]], TypeError, f"{NO_IDS}; this list holds a list"),
    "texts": (TEXTS, TypeError, f"{NO_IDS}; this list holds a str"),
    "rows": (np.array([[1, 2], [3, 4]]), TypeError, f"{NO_IDS}; this list holds a list"),
    "bool among ids": ([1, True], TypeError, f"{NO_IDS}; this list holds a bool"),
    "bools": (np.array([True, False]), TypeError, NO_IDS),
    "float among ids": ([1, 2.0], TypeError, f"{NO_IDS}; this list holds a float"),
    "floats": (torch.tensor([1.0]), TypeError, f"{NO_IDS}; this list holds a float"),
    "none among ids": ([1, None], TypeError, NO_IDS),
    "image": ({"prompt": "a", "multi_modal_data": {}}, TypeError, "not {'prompt': str, 'multi_modal_data': dict}"),
    "pixels": ({"input_ids": [1], "pixel_values": 0}, TypeError, "not {'input_ids': list, 'pixel_values': int}"),
    "ids as prompt": ({"prompt": [1, 2]}, TypeError, "'prompt_token_ids': token ids.*, not {'prompt': list}"),
    "text as ids": ({"prompt_token_ids": "a"}, TypeError, "not {'prompt_token_ids': str}"),
    "several texts": ({"input_ids": [[1], [2]]}, ValueError, "tokenizer's output for 2 texts"),
    "no text": ("", ValueError, "is empty"),
    "empty": ([], ValueError, "is empty"),
    "empty array": (np.array([], int), ValueError, "is empty"),
    "no ids": ({"prompt_token_ids": []}, ValueError, "is empty"),
    "padding alone": ({"input_ids": [1, 2], "attention_mask": [0, 0]}, ValueError, "is empty"),
    "input_ids of text": ({"input_ids": "a"}, TypeError, "not {'input_ids': str}"),
    "first id too many": ([1, VOCAB_SIZE], ValueError, f"token id 320 is outside the vocabulary, 0..{VOCAB_SIZE - 1}"),
    "no int64": ([2**70, 1], ValueError, f"token id {2**70} is outside"),
    "thousands of digits": ([10**5000], ValueError, "token id an integer of 16610 bits is outside the vocabulary"),
    "array": (np.array([1, VOCAB_SIZE]), ValueError, "token id 320 is outside"),
    "negative": ([3, -1, 2], ValueError, "token id -1 is outside"),
    "no room": ([1] * 200, ValueError, "200 tokens.* 200 tokens"),
    "text without room": ("é" * 1000, ValueError, "2000 tokens.* 200 tokens"),
    "megabytes": (LONG, ValueError, "the text has 1500000 characters"),
    "half a surrogate pair": ("a lone surrogate: \ud800", ValueError, "surrogate"),
}


@pytest.mark.parametrize(("prompt", "error", "message"), WRONG_ELEMENTS.values(), ids=WRONG_ELEMENTS)
def test_a_wrong_prompt_is_named_by_its_index_and_spoils_no_other(llm, reference, prompt, error, message):
    prompts = [IDS, "text", prompt, {"prompt": "text"}]
    for run in WAYS.values():
        with pytest.raises(error, match=rf"^prompts\[2\]: .*{message}") as raised:
            run(llm, prompts)
        assert_idle(llm)
    for name, arguments in (("prompts", (prompts, [[1]] * 4)), ("completions", ([[1]] * 4, prompts))):
        if "200 tokens" not in message:  # A prompt counts with its completion.
            with pytest.raises(error, match=rf"^{name}\[2\]: .*{message}"):
                llm.score(*arguments, use_tqdm=False)
    with pytest.raises(error, match=f"^prompt: .*{message}"):
        llm.add_request(prompt, greedy(3))
    options = {"on_error": "return"}
    for outputs in (
        llm.generate(prompts, greedy(2), use_tqdm=False, **options),
        [output for _, output in llm.generate_iter(prompts, greedy(2), ordered=True, **options)],
    ):
        assert [output["finish_reason"] for output in outputs] == ["length", "length", "error", "length"]
        fault = outputs.pop(2)
        assert (fault["error"], fault["text"], fault["token_ids"]) == (str(raised.value), None, [])
        assert outputs[0]["token_ids"] == reference.greedy([IDS], 2)[0]
        assert not any("error" in output or output.keys() - fault.keys() for output in outputs)


def test_a_prompt_that_the_cache_cannot_hold(path, reference):
    with make_llm(path, num_kvcache_blocks=3) as llm:
        with pytest.raises(ValueError, match=r"prompts\[1\]: .*48 tokens.* 48 tokens.*3 blocks x 16"):
            llm.generate([[1], [1] * 48], greedy(3), use_tqdm=False)
        assert_idle(llm)
        assert len(complete(llm, [[1] * 47, IDS], greedy(3))[0]) == 1


class Disk(collections.abc.Sequence):
    """A sequence that tells what was read of it."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10**9

    def __getitem__(self, i):
        self.read.append(i)
        return [1 + i % 100]


def test_generate_iter_reads_no_further_than_it_needs(llm):
    def endless():
        while True:
            taken.append(0)
            yield {"prompt_token_ids": IDS}

    taken, disk = [], Disk()
    for prompts, read in ((endless(), taken), (disk, disk.read)):
        results = llm.generate_iter(prompts, greedy(2))
        assert len(read) <= 1
        next(results)
        results.close()
        assert len(read) < 200
