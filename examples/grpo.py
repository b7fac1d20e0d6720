"""Teach SmolLM2-135M to answer in one word: TRL's GRPOTrainer learns from completions of an engine in its process.

pip install '.[trl,real]'
python examples/grpo.py "$(python scripts/real_model.py)"
python examples/grpo.py MODEL --rollouts transformers    # TRL's own way, to compare the time

Each line is a step. The engine gets the new weights after every update. `difference` is the largest one between its
log-probabilities of the sampled tokens and those of the trainer's model. The last lines say how the reward rose, and
what share of a step's time the rollouts took, with the updates of the engine, and without the comparison.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, median

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental in TRL.

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from nanovllm import LLM
from nanovllm.integrations.trl import Rollouts, logprob_differences

CAPITALS = "France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, Egypt Cairo, Greece Athens, Peru Lima"
OPPOSITES = "hot cold, big small, up down, good bad, fast slow, old new, light dark, wet dry"


def make_dataset() -> Dataset:
    rows = []
    for question, pairs in (("the capital of", CAPITALS), ("the opposite of", OPPOSITES)):
        for subject, answer in map(str.split, pairs.split(", ")):
            messages = [{"role": "user", "content": f"What is {question} {subject}? Answer with one word."}]
            rows.append({"prompt": messages, "answer": answer})
    return Dataset.from_list(rows)


def short(completions, **columns) -> list[float]:
    """1 for one word, 1/2 for two, and so on."""
    return [1 / max(len(completion[0]["content"].split()), 1) for completion in completions]


def right(completions, answer, **columns) -> list[float]:
    """1 if the answer is among the words."""
    words = [completion[0]["content"].lower().replace(".", " ").split() for completion in completions]
    return [float(each.lower() in found) for each, found in zip(answer, words, strict=True)]


class Report(TrainerCallback):
    """Prints a line for each step, and keeps its figures."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"step": [], "rollout": [], "check": []}
        self.rewards: list[float] = []
        self.differences: list[float] = []  # the largest one of each step

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = now()
        yield
        self.seconds[name].append(now() - start)

    def on_step_begin(self, *arguments, **others) -> None:
        self.start = now()

    def on_step_end(self, *arguments, **others) -> None:
        self.seconds["step"].append(now() - self.start)

    def on_log(self, args, state, control, logs, **others) -> None:
        if "reward" not in logs:
            return  # the summary at the end
        self.rewards.append(logs["reward"])
        last = {name: seconds[-1] for name, seconds in self.seconds.items() if seconds}
        figures = [f"reward {logs['reward']:.3f}", f"short {logs['rewards/short/mean']:.3f}"]
        figures += [f"right {logs['rewards/right/mean']:.3f}", f"tokens {logs['completions/mean_length']:.1f}"]
        figures += [f"difference {self.differences[-1]:.1e}"] if self.differences else []
        figures += [f"{name} {seconds:.2f} s" for name, seconds in last.items()]
        print(f"step {state.global_step}: {', '.join(figures)}", flush=True)

    def summarize(self) -> None:
        num = min(5, len(self.rewards) // 2)
        first, last = mean(self.rewards[:num]), mean(self.rewards[-num:])
        print(f"reward: {first:.3f} in the first {num} steps, {last:.3f} in the last")
        if self.differences:
            print(f"log-probabilities: engine and trainer differ by {max(self.differences):.1e} at most")
        rollout = median(self.seconds["rollout"])
        checks = self.seconds["check"] or [0.0] * len(self.seconds["step"])
        step = median(step - check for step, check in zip(self.seconds["step"], checks, strict=True))
        print(f"rollouts: {rollout:.3f} s of the {step:.3f} s of a step, {rollout / step:.0%} (medians)")


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # Otherwise a rollout's time would hold the work queued before it.
    return time.perf_counter()


def main() -> None:
    options = parse_args()
    on_gpu = torch.cuda.is_available() and not options.cpu
    report = Report()
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not on_gpu,
        bf16=on_gpu,  # mixed precision: the weights stay in float32
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.completions // options.batch_size,
        num_generations=options.group,
        max_completion_length=options.max_tokens,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": options.trainer_dtype},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )
    llm = None
    if options.rollouts == "nanovllm":
        llm = LLM(
            options.model,
            device="cuda" if on_gpu else "cpu",
            dtype="bfloat16" if on_gpu else "float32",
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_model_len=512 + options.max_tokens,
            max_num_seqs=min(options.completions, 512),
            kvcache_block_size=256 if on_gpu else 16,  # Small ones cost nothing on a CPU, and a group shares more.
            logprobs_mode="processed_logprobs",
            seed=options.seed,
        )
        rollouts = Rollouts(llm, sleep=options.sleep)

    def rollout_func(prompts, trainer):
        with report.timed("rollout"):
            output = rollouts(prompts, trainer)
        with report.timed("check"), trainer.accelerator.autocast():
            found = logprob_differences(trainer.model, output, trainer.temperature, options.batch_size)
            report.differences.append(max(map(max, found)))
        return output

    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[short, right],
        args=args,
        train_dataset=make_dataset(),
        callbacks=[report],
        rollout_func=None if llm is None else rollout_func,
    )
    trainer.remove_callback(PrinterCallback)
    if llm is None:
        generate = trainer.model.generate

        def timed_generate(*arguments, **others):
            with report.timed("rollout"):
                return generate(*arguments, **others)

        trainer.model.generate = timed_generate
    trainer.train()
    report.summarize()
    if llm is not None:
        llm.exit()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="a directory or a hub id")
    add("--rollouts", choices=["nanovllm", "transformers"], default="nanovllm", help="who generates the completions")
    add("--steps", type=int, default=20)
    add("--completions", type=int, default=32, help="of a step")
    add("--group", type=int, default=8, help="completions of one prompt")
    add("--batch-size", type=int, default=16, help="completions of one forward and backward pass")
    add("--max-tokens", type=int, default=16, help="of a completion")
    add("--learning-rate", type=float, default=2e-5)
    add("--trainer-dtype", default="float32", help="of the trainer's weights")
    add("--gpu-memory-utilization", type=float, default=0.2, help="of the engine")
    add("--sleep", action="store_true", help="give the engine's KV cache back to the trainer between rollouts")
    add("--seed", type=int, default=0)
    add("--cpu", action="store_true", help="even if there is a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
