"""Does the machine have the GPUs that a script needs? Shared by the other scripts."""

from argparse import ArgumentParser

import torch


def require_gpus(parser: ArgumentParser, count: int = 1) -> None:
    """End the script with its usage where there are fewer CUDA devices."""
    found = torch.cuda.device_count()
    if found < count:
        parser.error(f"needs {count} CUDA device{'s' * (count > 1)}, and there {'is' if found == 1 else 'are'} {found}")
