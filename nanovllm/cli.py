"""The command line: `nanovllm`, also as `python -m nanovllm`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nanovllm import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. arguments: those of the process by default."""
    parser = argparse.ArgumentParser(prog="nanovllm", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    tune = commands.add_parser(
        "tune",
        help="measure which kernels are the fastest for a model on this GPU",
        description="Measure which kernels are the fastest for a model's matrix products on this GPU. Engines of this "
        "user take the result from the cache directory when they start. No weights are read.",
    )
    tune.add_argument("model", help="a directory, a hub id, or the name of a published shape such as Qwen3-8B")
    tune.add_argument("--device", default="cuda", help="the GPU to measure, cuda or cuda:N (default: %(default)s)")
    tune.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="measure one GPU's part of a model split over N",
    )
    target = tune.add_mutually_exclusive_group()
    target.add_argument("--output", type=Path, metavar="FILE", help="write the table to this file instead")
    target.add_argument("--package", action="store_true", help="write the table into the package, to contribute it")
    tune.add_argument("--dry-run", action="store_true", help="list what would be measured; needs no GPU")
    tune.set_defaults(run=_tune)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"nanovllm {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"nanovllm {options.command}: interrupted, nothing was written", file=sys.stderr)
        return 130


def _tune(options: argparse.Namespace) -> int:
    from nanovllm.tuning.tune_model import tune_model

    tune_model(
        options.model,
        num_gpus=options.tensor_parallel_size,
        device=options.device,
        output=options.output,
        into_package=options.package,
        dry_run=options.dry_run,
    )
    return 0
