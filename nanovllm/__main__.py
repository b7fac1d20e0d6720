"""`python -m nanovllm`: the command line of `cli.py`."""

import os
import sys

if __name__ == "__main__":
    # `-m` has put the current directory first, where a file of the user's may be called as a module of Python.
    if sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

    from nanovllm.utils.quick_exit import QuickExit

    with QuickExit():
        from nanovllm.cli import main

    sys.exit(main())
