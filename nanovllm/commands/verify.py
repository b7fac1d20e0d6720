"""`nanovllm verify FOLDER`: answer lines of a deterministic job again, and demand the same bits."""

import argparse
from typing import Any

from nanovllm.commands.verbosity import QUIET
from nanovllm.utils.quick_exit import QuickExit

_DIFFERENT = 1


def add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="answer lines of a deterministic job again, and demand the same bits",
        description="Answer lines of a job again that was run with --deterministic, and demand the same tokens and "
        "log-probabilities, vectors, classes or scores, bit by bit, and the same rows. Exit status: 0 all is the "
        "same, 1 it is not, or answers are gone, 2 bits cannot be compared here: another job, processor or version.",
    )
    parser.add_argument("output", metavar="FOLDER", help="the folder of the answers")
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="lines to answer (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="answer all lines again")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the lines (default: %(default)s)")
    model_help = "where the job's model is now, if it has moved: a directory or a hub id"
    parser.add_argument("--model", metavar="MODEL", help=model_help)
    root_help = "where the job's folder of images is now, if it has moved"
    parser.add_argument("--image-root", metavar="FOLDER", help=root_help)
    parser.add_argument("--alone", action="store_true", help="answer them one by one, not in each other's company")
    parser.set_defaults(run=_verify, interrupted="nothing is verified")


def _verify(options: argparse.Namespace) -> int:
    with QuickExit():
        from nanovllm.jobs import verify_batch

    sample = None if options.all else options.sample
    use_tqdm = options.verbosity != QUIET
    how = {"sample": sample, "seed": options.seed, "alone": options.alone, "model": options.model}
    found = verify_batch(options.output, **how, use_tqdm=use_tqdm, image_root=options.image_root)
    print(found)
    return _DIFFERENT if found.difference is not None else 0
