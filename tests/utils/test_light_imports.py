"""Packages are imported without torch's compiler, and whoever needs it has it afterwards."""

import subprocess
import sys

PACKAGE = """
import torch

@torch.compiler.disable
def plain(x):
    return x + 1

@torch._dynamo.assume_constant_result
def constant():
    return 3

double = torch.compile(lambda x: 2 * x, backend="eager")

@torch.compile(backend="eager")
def triple(x):
    return 3 * x
"""

PROGRAM = """
import sys
import torch
from nanovllm.utils.light_imports import without_torch_compile

with without_torch_compile():
    import decorated
assert "torch._dynamo" not in sys.modules
x = torch.ones(1)
assert (decorated.plain(x).item(), decorated.constant()) == (2, 3)
assert (decorated.double(x).item(), decorated.triple(x).item()) == (2, 3)
assert torch.compile(lambda x: x - 1, backend="eager")(x).item() == 0
with without_torch_compile():  # With the compiler there, nothing is replaced.
    assert torch._dynamo is sys.modules["torch._dynamo"] and hasattr(torch._dynamo, "optimize")
print("fine")
"""


def test_a_package_whose_decorators_would_import_the_compiler(tmp_path):
    (tmp_path / "decorated.py").write_text(PACKAGE)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr
