"""SequenceMaker: prompts that are checked together give what each of them gives by itself."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.text.sequence_maker import SequenceMaker

VOCAB_SIZE, LONGEST = 1000, 40
GOOD = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=LONGEST)
FAULTS = {
    "empty": [],
    "below": [5, -1, 7],
    "above": [0, VOCAB_SIZE],
    "beyond int32": [2**31, 1],
    "beyond uint32": [1, 2**32 + 1],
    "beyond int64": [2**70],
    "true": [500, True],
    "false": [500, False, 3],
    "float": [1, 2.0],
    "too large and no integer": [2**40, "a"],
    "none": None,
    "nested": [[1]],
    "bytes": b"\x01\x02",
    "too long": [3] * (LONGEST + 1),
}


def check_length(num_tokens: int) -> None:
    if num_tokens > LONGEST:
        raise ValueError("is too long")


config = SimpleNamespace(
    hf_config=SimpleNamespace(vocab_size=VOCAB_SIZE),
    eos=(),
    kvcache_block_size=16,
    seed=0,
    features=(),
    task="generate",
)
maker = SequenceMaker(config, None, SimpleNamespace(check=check_length, max_seq_len=LONGEST, remedy=""))


def check(prompts: list, **options) -> list:
    return maker.make_all(prompts, [SamplingParams()] * len(prompts), **options)


@given(prompts=st.lists(GOOD | st.sampled_from([(1, 2), range(3), array("i", [4]), np.array([5, 6])]), max_size=12))
def test_checked_prompts_are_what_they_were(prompts):
    checked = check(prompts)
    assert [seq.token_ids for (seq,) in checked] == [list(prompt) for prompt in prompts]
    assert all(seq.token_ids.typecode == "i" for (seq,) in checked)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@settings(max_examples=20)
@given(before=st.lists(GOOD, max_size=6), after=st.lists(GOOD, max_size=6), start=st.integers(0, 100))
def test_a_fault_is_found_where_it_is_and_nowhere_else(fault, before, after, start):
    prompts = [*before, fault, *after]
    checked = check(prompts, on_error="return", start=start)
    error = checked.pop(len(before))
    assert isinstance(error, TypeError | ValueError)
    assert str(error).startswith(f"prompts[{start + len(before)}]: ")
    assert [seq.token_ids for (seq,) in checked] == before + after
    with pytest.raises(type(error)) as raised:
        check(prompts, start=start)
    assert str(raised.value) == str(error)
    with pytest.raises(type(error), match=r"^prompt: "):
        maker.make_one(fault, SamplingParams())


def test_of_several_faults_the_first_is_raised():
    with pytest.raises(ValueError, match=r"prompts\[1\]: is empty"):
        check([[1], [], [True], None])
