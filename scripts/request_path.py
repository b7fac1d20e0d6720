"""The path of a request: the functions of ours that a plain `generate` calls, from prompts to text.

    python scripts/request_path.py            figures, and the files
    python scripts/request_path.py --all      and the functions of each file

A CPU engine on the demo model answers two text prompts with four tokens each, with default sampling. Traced is its
second call: the first makes what later ones find ready, and a user's file of prompts is all later ones. A function
counts once, however often it is called; comprehensions count as part of their function. The lines are those of the
whole files, because that is what a reader opens. The depth is the number of our own frames on the stack.
"""

import argparse
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
        functions: {file, relative to the repository: names of its functions, in the order of the first calls}.
        depth: the most of our frames that were on the stack at once.
    """

    functions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    depth: int = 0

    @property
    def num_functions(self) -> int:
        return sum(map(len, self.functions.values()))

    def lines(self, file: str) -> int:
        return len((ROOT / file).read_text(encoding="utf-8").splitlines())

    @property
    def num_lines(self) -> int:
        return sum(map(self.lines, self.functions))


def trace_request() -> RequestPath:
    """Trace the path. Loads the package, and starts and ends an engine."""
    from nanovllm import LLM, SamplingParams

    path = RequestPath()
    seen: set[CodeType] = set()
    with LLM(ROOT / "assets" / "demo-model", device="cpu", max_model_len=256, num_kvcache_blocks=8) as llm:
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
                    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no co_qualname.
                    path.functions[str(Path(code.co_filename).relative_to(ROOT))].append(name)

        sys.setprofile(profile)
        try:
            llm.generate(PROMPTS, params, use_tqdm=False)
        finally:
            sys.setprofile(None)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="list the functions of each file")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    path = trace_request()
    for file, names in sorted(path.functions.items()):
        print(f"{path.lines(file):5} lines {len(names):4} functions  {file}")
        if options.all:
            print(*(f"                            {name}" for name in names), sep="\n")
    print(
        f"{path.num_functions} functions in {len(path.functions)} files of {path.num_lines} lines, "
        f"{path.depth} frames deep"
    )


if __name__ == "__main__":
    main()
