"""The code of docs/adding-a-kernel.md does what the page says."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import assert_refused, hold, rounding

from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key

GUIDE = (Path(__file__).parents[2] / "docs" / "adding-a-kernel.md").read_text()
NAMES = "nanovllm.kernels.matmul.thin", "nanovllm.layers.matmul.candidates.thin"


@pytest.fixture
def guide(monkeypatch, tmp_path):
    """The page's modules: (the kernel's, the candidate's)."""
    modules = []
    for name, code in zip(NAMES, re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL), strict=True):
        file = tmp_path / f"{name}.py"  # Triton reads a kernel's source.
        file.write_text(code)
        spec = spec_from_file_location(name, file)
        modules.append(module_from_spec(spec))
        monkeypatch.setitem(sys.modules, name, modules[-1])
        monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], "thin", modules[-1], raising=False)
        spec.loader.exec_module(modules[-1])
    return modules


@pytest.mark.parametrize(("num_tokens", "N", "K"), [(1, 7, 33), (5, 64, 64), (16, 100, 200)])
def test_the_kernel_of_the_guide_equals_its_twin(guide, num_tokens, N, K, device):
    kernels, _ = guide
    x, y = torch.randn(num_tokens, K, device=device).half(), torch.zeros(num_tokens, N, device=device).half()
    weight, config = (torch.randn(N, K, device=device) * K**-0.5).half(), kernels.ThinConfig(32, 64, 4)
    close = rounding(torch.float16, 1, K)
    hold(kernels.thin.kernel, kernels.thin.twin, (x, weight, y, config), written=(2,), close=close)
    given = {"x": x, "weight": weight, "out": y, "config": config}
    assert_refused(kernels.thin.kernel, given, {"x": x.repeat(17, 1)})


def test_the_candidate_of_the_guide(guide, device):
    candidate = guide[1].Thin()
    weight = Weight(Unquantized(), torch.randn(24, 32, device=device).half())
    key, x = Key.of("linear", False, weight), torch.randn(3, 32, device=device).half()
    assert candidate.supports(key, weight) == (device == "cuda")
    challengers = list(candidate.challengers(key, 3, 1, 132))
    assert len(challengers) == 18
    y = candidate.launch(Problem(key, x, weight), challengers[0])
    torch.testing.assert_close(y, torch.nn.functional.linear(x.float(), weight.values.float()).half())
    assert candidate.launch(Problem(key, x.repeat(6, 1), weight), challengers[0]) is None
    assert not candidate.supports(key._replace(operation="linear_add"), weight)
    assert not list(candidate.challengers(key, 17, 1, 132))
