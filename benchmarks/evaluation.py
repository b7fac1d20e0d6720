"""CPU seconds of lm-evaluation-harness with this engine and with its own hf model, one thread each, in one run.

python benchmarks/evaluation.py MODEL --dtype float32 --batch-size 1 16

The tasks are those of tests/integrations/tasks. Neither loading is counted nor what other programs do meanwhile. Needs
the extra `eval`, and accelerate.
"""

import argparse
import os
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import lm_eval
import torch
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import nanovllm.integrations.lm_eval  # noqa: F401, which registers the model

TASKS = Path(__file__).parents[1] / "tests" / "integrations" / "tasks"
SHOTS = {"local_choices": (0, 5), "local_texts": (None,), "local_capitals": (5,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16], help="of the hf model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(TASKS)  # where their data is
    arguments = {"pretrained": options.model, "dtype": options.dtype, "device": "cpu"}
    time_tasks("nanovllm", get_model("nanovllm")(**arguments))
    for batch_size in options.batch_size:
        time_tasks(f"hf, batch size {batch_size}", get_model("hf")(**arguments, batch_size=batch_size))


def time_tasks(name: str, model) -> None:
    manager = TaskManager(include_path=".", include_defaults=False)
    for task, all_shots in SHOTS.items():
        for shots in all_shots:
            start = time.process_time()
            found = lm_eval.simple_evaluate(
                model, tasks=[task], num_fewshot=shots, task_manager=manager, bootstrap_iters=0, verbosity="ERROR"
            )
            seconds = time.process_time() - start
            scores = {metric: value for metric, value in found["results"][task].items() if isinstance(value, float)}
            shown = ", ".join(f"{metric.split(',')[0]} {value:.4f}" for metric, value in scores.items())
            print(f"{task}, {shots or 0} examples, {name}: {seconds:.2f} s ({shown})", flush=True)


if __name__ == "__main__":
    main()
