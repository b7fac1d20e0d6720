"""Kernels written in Gluon are offered where Triton is."""

import pytest

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.gluon_stub import HAS_GLUON


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_this_triton_has_the_gluon_that_the_kernels_are_written_in():
    """A release that renames a function of Gluon takes the fastest kernels away without a word: they give way to those
    for all cards, and their own tests are skipped."""
    assert HAS_GLUON
