"""The context of a step."""

import threading

import pytest
import torch

from nanovllm.utils.context import (
    _CONTEXT,
    Context,
    get_context,
    reset_context,
    set_context,
    step_context,
    use_context,
)


def test_fields_by_place_and_by_name():
    ends, slots, lens, tables = (torch.tensor([i]) for i in range(4))
    try:
        set_context(True, ends, ends, 3, 5, slots, lens, tables, last_tokens=ends)
        context = get_context()
        assert context.is_prefill is True
        assert (context.max_seqlen_q, context.max_seqlen_k) == (3, 5)
        assert context.cu_seqlens_q is ends
        assert context.cu_seqlens_k is ends
        assert context.last_tokens is ends
        assert context.slot_mapping is slots
        assert context.context_lens is lens
        assert context.block_tables is tables
        set_context(False, slot_mapping=slots)
        assert get_context() == Context(slot_mapping=slots)
        assert _CONTEXT.get() is get_context()
    finally:
        reset_context()
    assert get_context() == Context()


def test_a_context_is_used_as_it_is():
    context = Context(is_prefill=True)
    try:
        use_context(context)
        assert get_context() is context
        with pytest.raises(TypeError, match="use_context takes a Context"):
            set_context(Context())
        with pytest.raises(TypeError, match="slots_mapping"):
            set_context(True, slots_mapping=None)
        assert get_context() is context
    finally:
        reset_context()


def test_a_block_ends_its_context_and_another_thread_has_its_own():
    seen = []
    with step_context(Context(is_prefill=True)):
        thread = threading.Thread(target=lambda: seen.append(get_context().is_prefill))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not get_context().is_prefill
