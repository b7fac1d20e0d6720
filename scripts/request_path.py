"""The path of a request: the functions of ours that a plain `generate` enters, from prompts to text.

    python scripts/request_path.py                 functions and lines of each file, and figures
    python scripts/request_path.py --all           and the functions themselves
    python scripts/request_path.py --device cuda   on a GPU
    python scripts/request_path.py --plain         through the plain Qwen3 (`LLM(model, plain=True)`)

An engine on the demo model answers two text prompts with four tokens each, with default sampling. Traced is its second
call: the first makes what later ones find ready, and a user's file of prompts is all later ones. A function counts
once, however often it is called; comprehensions count as part of their function. Its lines are those of its definition,
from the first decorator to the end, and a line counts once, also in a function within another. The depth is the number
of our own frames on the stack.

Only rank 0's thread is traced. What a CUDA graph replays is not there: those layers are traced in a prefill.
"""

import argparse
import inspect
import logging
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nanovllm"
PROMPTS = ["The capital of France is", "def f(x):\n    return"]


@dataclass
class RequestPath:
    """What one request passes through.

    Attributes:
        functions: {file, relative to the repository: {name of its function: numbers of its lines}}, in the order of the
            first calls.
        depth: the most of our frames that were on the stack at once.
    """

    functions: dict[str, dict[str, range]] = field(default_factory=lambda: defaultdict(dict))
    depth: int = 0

    def add(self, code: CodeType) -> None:
        lines, start = inspect.getsourcelines(code)
        file = str(Path(code.co_filename).relative_to(ROOT))
        name = getattr(code, "co_qualname", f"{code.co_name}:{start}")  # Python 3.10 has no co_qualname.
        self.functions[file][name] = range(start, start + len(lines))

    @property
    def num_functions(self) -> int:
        return sum(map(len, self.functions.values()))

    def lines(self, file: str) -> int:
        """Of the functions of a file."""
        return len(set[int]().union(*self.functions[file].values()))

    @property
    def num_lines(self) -> int:
        return sum(map(self.lines, self.functions))


def trace_request(device: str = "cpu", plain: bool = False) -> RequestPath:
    """Trace the path. Loads the package, and starts and ends an engine."""
    from nanovllm import LLM, SamplingParams

    path = RequestPath()
    seen: set[CodeType] = set()
    model = ROOT / "assets" / "demo-model"
    with LLM(model, device=device, plain=plain, max_model_len=256, num_kvcache_blocks=8) as llm:
        params = SamplingParams(max_tokens=4)
        llm.generate(PROMPTS, params, use_tqdm=False)
        depth = 0

        def profile(frame: FrameType, event: str, _: Any) -> None:
            nonlocal depth
            code = frame.f_code
            if event not in ("call", "return") or not code.co_filename.startswith(f"{PACKAGE}/"):
                return
            depth += 1 if event == "call" else -1
            path.depth = max(path.depth, depth)
            if event == "call" and code not in seen:
                seen.add(code)
                if code.co_name == "<lambda>" or not code.co_name.startswith("<"):
                    path.add(code)

        sys.setprofile(profile)
        try:
            llm.generate(PROMPTS, params, use_tqdm=False)
        finally:
            sys.setprofile(None)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="list the functions of each file, and their lines")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:N for the GPU number N (default: cpu)")
    parser.add_argument("--plain", action="store_true", help="run the plain Qwen3")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    path = trace_request(options.device, options.plain)
    for file, functions in sorted(path.functions.items()):
        print(f"{len(functions):4} functions {path.lines(file):5} lines  {file}")
        if options.all:
            print(*(f"{len(lines):20} lines      {name}" for name, lines in functions.items()), sep="\n")
    print(
        f"{path.num_functions} functions of {path.num_lines} lines in {len(path.functions)} files, "
        f"{path.depth} frames deep"
    )


if __name__ == "__main__":
    main()
