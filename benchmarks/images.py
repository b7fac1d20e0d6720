"""How fast does a job read pages? Images a second, the encoder's share of it, and how long the GPU waits.

    python benchmarks/images.py --model Qwen3-VL-8B --num-images 500
    python benchmarks/images.py --model Qwen3-VL-2B --layers 2 --num-images 4 --width 320 --height 448 \\
        --output-tokens 4 --device cpu                                                     # a trial on a CPU

Weights are random, in a published shape. The pages are drawn here, of random words, and all differ. `run_batch` reads
them from PNG files, as `nanovllm run-batch --images` does: another process decodes and preprocesses them. The report is
JSON:

preprocessing: what that process gives when nothing waits for it: of the second half of the pages, so that its start is
    left out.
job: of one job. `seconds` are from the engine's first step to its last, and all rates are of them.
    `seconds_before_first_step` are those of the reading process's start.
encoder: the vision tower. `seconds` are the device's, between CUDA events around each of its calls (a CPU's are the
    host's), and `share` is of the job's seconds.
gpu: of a second job, with other pages. CUPTI (torch.profiler) records all kernels and copies for `--profile-seconds`,
    from a quarter of the first job's time on. `idle_share` is the share of that window in which none ran.
    `copy_share` is of copies from the host with no kernel beside them. Tracing makes kernels a little slower, so a
    GPU without it waits a little longer. None on a CPU.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.autograd.profiler import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM
from nanovllm.jobs import run_batch
from nanovllm.jobs.arguments import Arguments
from nanovllm.jobs.image_options import ask_images
from nanovllm.jobs.reader import ReadAhead
from nanovllm.models.presets import preset_config
from nanovllm.models.registry import find_vision
from nanovllm.utils.threads import available_cores

PROMPT = " ".join(f"w{i}" for i in range(20))
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}w1 <image> w2 "
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def draw_page(folder: Path, width: int, height: int, index: int) -> None:
    """A PNG file with lines of random words, as a page of a scanned book has them."""
    from PIL import Image, ImageDraw, ImageFont

    rng = random.Random(index)
    page = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=height // 60)
    for y in range(height // 20, height - height // 20, height // 45):
        words = ("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(width // 70))
        draw.text((width // 20, y), " ".join(words), fill="black", font=font)
    page.save(folder / f"page-{index:05d}.png", compress_level=1)


def draw_pages(folder: Path, width: int, height: int, indices: Iterable[int]) -> str:
    """The pattern of their files."""
    folder.mkdir()
    with ProcessPoolExecutor(available_cores(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(draw_page, folder, width, height), indices, chunksize=8))
    return str(folder / "*.png")


def write_tokenizer(folder: Path, vocab_size: int, placeholder_id: int) -> str:
    """A tokenizer with a word for each token, because a published shape has none."""
    vocab = {f"w{i}": i for i in range(vocab_size) if i != placeholder_id} | {"<image>": placeholder_id}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return str(folder)


def shape(model: str, num_layers: int | None) -> Any:
    """A published configuration; with num_layers, of so many layers in the decoder and in the tower."""
    config = preset_config(model)
    if num_layers is not None:
        tower = config.vision["vision_config"]
        config.num_hidden_layers = num_layers
        for name in {"depth", "num_hidden_layers"} & tower.keys():
            tower[name] = min(tower[name], num_layers)
        if tower.get("deepstack_visual_indexes"):
            tower["deepstack_visual_indexes"] = list(range(min(3, num_layers - 1)))
    return config


def measure_preprocessing(llm: LLM, pages: str) -> dict[str, Any]:
    arguments = Arguments(llm, {})
    inputs, arguments.image_rules = ask_images(None, pages, PROMPT, (None, False, None, None, None), arguments.task)
    arguments.checker()
    start, times = time.perf_counter(), []
    with ReadAhead(arguments.read_plan(inputs)) as lines:
        for _ in lines:
            times.append(time.perf_counter())
    middle = len(times) // 2
    rate = (len(times) - middle) / (times[-1] - times[middle - 1])
    return {"images_per_second": rate, "cores": available_cores(), "seconds_to_first": times[0] - start}


class Encoder:
    """Measures the calls of a vision tower."""

    def __init__(self, tower: torch.nn.Module, is_gpu: bool):
        self._is_gpu, self._spans = is_gpu, list[tuple[Any, Any]]()
        self._begun: Any = None
        tower.register_forward_pre_hook(self._begin)
        tower.register_forward_hook(self._end)

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, *_: Any) -> None:
        self._begun = self._now()

    def _end(self, *_: Any) -> None:
        self._spans.append((self._begun, self._now()))

    def report(self, seconds: float) -> dict[str, Any]:
        """seconds: of the job."""
        if self._is_gpu:
            torch.cuda.synchronize()
        took = sum(a.elapsed_time(b) / 1e3 if self._is_gpu else b - a for a, b in self._spans)
        return {"seconds": took, "share": took / seconds, "calls": len(self._spans)}


class Steps:
    """Notes when an engine's steps are launched.

    Attributes:
        times: of each launch.
        at_launch: called before each.
    """

    def __init__(self, llm: LLM):
        self.times: list[float] = []
        self.at_launch = lambda: None
        self._call = llm.model_runner.call
        setattr(llm.model_runner, "call", self._note)  # noqa: B010

    def _note(self, *args: Any) -> Any:
        self.at_launch()
        self.times.append(time.perf_counter())
        return self._call(*args)


def measure_job(llm: LLM, pages: str, folder: Path, output_tokens: int, steps: Steps) -> dict[str, Any]:
    start = time.perf_counter()
    options = {"temperature": 0.6, "max_tokens": output_tokens, "ignore_eos": True, "use_tqdm": False}
    summary = run_batch(None, folder, llm, images=pages, prompt=PROMPT, **options)
    end = time.perf_counter()
    assert summary.num_answered == summary.num_lines, summary
    seconds = end - steps.times[0]
    return {
        "seconds": seconds,
        "seconds_before_first_step": steps.times[0] - start,
        "images_per_second": summary.num_answered / seconds,
        "output_tokens_per_second": summary.num_completion_tokens / seconds,
        "prompt_tokens_per_image": summary.num_prompt_tokens / summary.num_answered,
        "num_steps": len(steps.times),
    }


class _Enough(Exception):
    """Ends a job whose profile is complete."""


class Window:
    """Records what a GPU does for some seconds of a job."""

    def __init__(self, steps: Steps, begin: float, seconds: float):
        """begin: seconds after the first step."""
        self._begin, self._seconds, self._steps = begin, seconds, steps
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._started = 0.0
        with profile(activities=[ProfilerActivity.CUDA]):  # The first one loads CUPTI.
            torch.cuda.synchronize()
        steps.times.clear()
        steps.at_launch = self._look

    def _look(self) -> None:
        now, times = time.perf_counter(), self._steps.times
        if self._started and now > self._started + self._seconds:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self._started
            self._profile.stop()
            raise _Enough
        if not self._started and times and now > times[0] + self._begin:
            torch.cuda.synchronize()  # What was launched before is not recorded.
            self._profile.start()
            self._started = time.perf_counter()

    def report(self) -> dict[str, Any]:
        result = self._profile.profiler.kineto_results
        spans, copies, of_names = [], [], defaultdict(float)
        for event in result.events():
            if event.device_type() != DeviceType.CUDA:
                continue
            span = event.start_ns(), event.start_ns() + event.duration_ns()
            (copies if "HtoD" in event.name() else spans).append(span)
            of_names[event.name()[:80]] += event.duration_ns() / 1e9
        kernels, all_work = covered(spans), covered(spans + copies)
        top = sorted(of_names, key=of_names.__getitem__, reverse=True)[:12]
        return {
            "window_seconds": self.seconds,
            "idle_share": 1 - all_work / 1e9 / self.seconds,
            "copy_share": (all_work - kernels) / 1e9 / self.seconds,
            "kernels": {name: of_names[name] / self.seconds for name in top},
        }


def covered(spans: list[tuple[int, int]]) -> int:
    """Nanoseconds in which at least one of them ran: dependent launches overlap."""
    busy = reached = 0
    for start, end in sorted(spans):
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy


@contextmanager
def make_engine(args: argparse.Namespace, folder: Path) -> Iterator[LLM]:
    config = shape(args.model, args.layers)
    vision = find_vision(config)
    if vision is None:
        raise SystemExit(f"--model {args.model}: has no vision tower with this transformers")
    tokenizer = write_tokenizer(folder / "tokenizer", config.vocab_size, vision.placeholder_id)
    names = ("device", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "kvcache_gib")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    options |= {"hf_config": config, "tokenizer": tokenizer, "load_format": "dummy", "seed": 0}
    with LLM(args.model, **options) as llm:
        yield llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-VL-8B", help="a published shape")
    parser.add_argument("--num-images", type=int, default=500)
    parser.add_argument("--width", type=int, default=1000, help="pixels")
    parser.add_argument("--height", type=int, default=1400, help="pixels")
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--layers", type=int, help="of the decoder and of the tower, for trials")
    parser.add_argument("--profile-seconds", type=float, default=10, help="0: without the second job")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--kvcache-gib", type=float)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, num = Path(name), args.num_images
        draw = partial(draw_pages, width=args.width, height=args.height)
        pages, others = draw(folder / "a", indices=range(num)), draw(folder / "b", indices=range(num, 2 * num))
        with make_engine(args, folder) as llm:
            is_gpu = llm.config.device == "cuda"
            report: dict[str, Any] = {name: getattr(args, name) for name in ("model", "layers", "num_images")}
            report |= {name: getattr(args, name) for name in ("width", "height", "output_tokens")}
            report["device"] = torch.cuda.get_device_name() if is_gpu else "cpu"
            report["preprocessing"] = measure_preprocessing(llm, others)
            steps, encoder = Steps(llm), Encoder(llm.model_runner.model.vision, is_gpu)
            report["job"] = measure_job(llm, pages, folder / "answers", args.output_tokens, steps)
            report["encoder"] = encoder.report(report["job"]["seconds"])
            report["gpu"] = None
            if is_gpu and args.profile_seconds:
                begin = report["job"]["seconds"] / 4
                window = Window(steps, begin, min(args.profile_seconds, begin))
                with suppress(_Enough):
                    measure_job(llm, others, folder / "more", args.output_tokens, steps)
                report["gpu"] = window.report()
            text = json.dumps(report, indent=1)
            print(text, flush=True)
            if args.json:
                args.json.write_text(text)


if __name__ == "__main__":
    main()
