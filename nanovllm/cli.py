"""The command line: `nanovllm`, also as `python -m nanovllm`."""

from nanovllm.utils.quick_exit import QuickExit

with QuickExit():
    import argparse
    import logging
    import os
    import shlex
    import sys
    from collections.abc import Sequence
    from contextlib import suppress
    from pathlib import Path
    from typing import Any

    from nanovllm import __version__
    from nanovllm.commands.bench import add_bench
    from nanovllm.commands.completion import add_completion
    from nanovllm.commands.eval import add_eval
    from nanovllm.commands.generate import add_generate
    from nanovllm.commands.options import (
        ENGINE,
        SAMPLING,
        add_one_answer,
        given_of_one_answer,
        given_options,
        json_object,
        read_json,
    )
    from nanovllm.commands.parser import CommandParser, add_model
    from nanovllm.commands.pull import add_pull
    from nanovllm.commands.verbosity import NORMAL, add_verbosity, set_up_logging
    from nanovllm.commands.verify import add_verify
    from nanovllm.engine_options import EngineOptions
    from nanovllm.images.rules import OPTIONS as IMAGE_OPTIONS
    from nanovllm.images.rules import ImageRules
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.utils.command_options import add_options
    from nanovllm.utils.pages import page
    from nanovllm.utils.sigterm import sigterm_as_interrupt

logger = logging.getLogger(__name__)

_FAILED, _WRONG_CALL, _SOME_FAILED, _INTERRUPTED, _NO_READER = 1, 2, 3, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. arguments: those of the process by default."""
    with QuickExit():
        _open_standard_files()
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        options = _make_parser(arguments).parse_args(arguments)
        set_up_logging(options.verbosity or getattr(options, "usual_verbosity", NORMAL))
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # A reader such as `head` has seen enough. Python would flush again and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except KeyboardInterrupt:
        outcome = getattr(options, "interrupted", "nothing was written")
        print(f"\nnanovllm {options.command}: interrupted, {outcome}", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, TypeError, ImportError, OSError, RuntimeError, MemoryError) as error:
        logger.info("What the error comes from:", exc_info=error)
        print(f"nanovllm {options.command}: {error}", file=sys.stderr)
        return _WRONG_CALL if isinstance(error, _OF_CALLS) else _FAILED


# What a wrong option, model or file, and a missing package raise.
_OF_CALLS = (ValueError, TypeError, ImportError, FileNotFoundError, IsADirectoryError, NotADirectoryError)


def _make_parser(arguments: list[str]) -> CommandParser:
    parser = CommandParser(prog="nanovllm", description="Offline batch inference for language models.")
    parser.epilog = f"docs/reference.md and the other pages are in {page()}"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run_batch(commands, arguments)
    _add_status(commands)
    add_verify(commands)
    _add_chat(commands)
    add_generate(commands)
    add_pull(commands)
    _add_serve(commands)
    _add_fit(commands)
    _add_tune(commands)
    add_bench(commands)
    add_eval(commands)
    add_completion(commands, parser)
    add_verbosity(parser, default=NORMAL)
    for each in (parser, *commands.choices.values()):
        each.add_argument("--version", action="version", version=f"nanovllm {__version__}", help="print the version")
    for name, command in commands.choices.items():
        if name != "eval":  # The harness's.
            add_verbosity(command)
            add_model(command)
    return parser


def _open_standard_files() -> None:
    """A shell may close them, as `>&-` does. Then the next file that is opened, such as one of answers, would be what
    all that is printed goes to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest number that is free.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


# -- run-batch ---------------------------------------------------------------------------------------------------------


def _add_run_batch(commands: Any, arguments: list[str]) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer files of prompts, resumably",
        usage="%(prog)s MODEL -i FILE [options]",
        description="Answer every line of files of prompts exactly once, and write the answers to a folder. The same "
        'command goes on where it was interrupted. Lines are {"prompt": ...}, {"messages": [...]} or requests of '
        "OpenAI's batch format. Exit status: 0 all lines are answered, 1 the job stopped half-way, 2 a wrong call, 3 "
        "some lines cannot be answered (_errors.jsonl says why), 130 interrupted.",
    )
    add = parser.add_argument
    several: Any = {"nargs": "+", "action": "extend"}
    add("-i", "--input", **several, metavar="FILE", help="JSON lines, also .gz, or Parquet; globs; URLs")
    add("-o", "--output", metavar="FOLDER", help="where the answers go, or one file (answers.jsonl)")
    add("model", metavar="MODEL", help="a directory or a hub id")
    help = "what is done with lines: vectors, classes, ranks, or texts (default: generate)"
    add("--task", choices=("generate", "embed", "classify", "rerank"), help=help)
    add("--format", choices=("jsonl", "parquet"), help="of the answers (default: Parquet for an input of Parquet)")
    add("--prompt-column", metavar="NAME", help="the column of the prompt (default: prompt or messages)")
    add("--id-column", metavar="NAME", help="the column of the id (default: id)")
    add("--template", metavar="TEXT", help="makes the prompt of columns: 'Summarise: {text}'")
    add("--system", metavar="TEXT", help="a system message; prompts become user messages")
    add("--chat-template", type=_file, metavar="FILE", help="a Jinja template instead of the tokenizer's")
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help="variables of the chat template")
    help = "columns called as parameters, such as temperature or n, are data"
    add("--no-line-parameters", dest="line_parameters", action="store_false", default=None, help=help)
    help = "what a model thinks is a conversation's reasoning, and not its text"
    add("--split-reasoning", action="store_true", default=None, help=help)
    help = "what a model calls of a conversation's tools is its tool_calls, and not its text"
    add("--split-tool-calls", action="store_true", default=None, help=help)
    add("--ordered", action="store_true", help="keep the order of the input")
    add("--overwrite", action="store_true", help="delete the answers in the folder and start over")
    retry = "try the lines of _errors.jsonl again, or take these corrected lines instead"
    add("--retry-errors", nargs="?", const=True, default=False, metavar="FILE", help=retry)
    add("--dry-run", action="store_true", help="check the whole input and write nothing")
    help = "with --dry-run: answer N random lines, and say what the whole job would take"
    add("--sample", type=int, metavar="N", help=help)
    add("--price-per-hour", type=float, metavar="PRICE", help="of all that the job runs on: say what the job costs")
    add("--replicas", type=int, metavar="N", help="run N engines by Ray, each on tensor_parallel_size GPUs")
    add("--ray-address", metavar="ADDRESS", help="run on this Ray cluster, such as 'auto' (default: this machine)")
    images = parser.add_argument_group("images (docs/images.md)")
    help = "instead of --input: files or globs of images, each of them a line that asks --prompt"
    images.add_argument("--images", **several, metavar="FILE", help=help)
    images.add_argument("--prompt", metavar="TEXT", help="what is asked of each of --images")
    images.add_argument("--image-column", metavar="NAME", help="the column of a line's images (default: images)")
    add_options(images, ImageRules, IMAGE_OPTIONS, other_defaults={"image_root": "that of the images, or of the input"})
    vectors = parser.add_argument_group("--task embed and rerank")
    help = "of which tokens a vector is made: auto, last, mean or cls (default: as the model's files say)"
    vectors.add_argument("--pooling", metavar="NAME", help=help)
    help = "leave vectors as long as they are, instead of scaling them to length 1"
    vectors.add_argument("--no-normalize", dest="normalize", action="store_false", default=None, help=help)
    vectors.add_argument("--dimensions", type=int, metavar="N", help="the first N numbers of each vector alone")
    help = "the name of the text that the model puts before each text, such as query"
    vectors.add_argument("--prompt-name", metavar="NAME", help=help)
    help = "the type of the numbers: float32 or float16 (default: float32)"
    vectors.add_argument("--embedding-dtype", metavar="NAME", help=help)
    vectors.add_argument("--instruction", metavar="TEXT", help="of --task rerank: what queries are for")
    sampling = parser.add_argument_group("sampling, for lines without their own (docs/reference.md)")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="default: 64; of OpenAI's requests: no limit")
    sampling.add_argument("--seed", type=int, metavar="N", help="makes all answers reproducible")
    help = "tokens after which the end of a model's thinking is forced; 0 is no thinking"
    sampling.add_argument("--thinking-token-budget", type=int, metavar="N", help=help)
    sampling.add_argument("--thinking-end-text", metavar="TEXT", help="what is written before that end")
    sampling.add_argument("--stop", **several, metavar="TEXT", help="texts that end an answer")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end of an answer")
    sampling.add_argument("--stop-token-ids", **several, type=int, metavar="N", help="tokens that end an answer")
    sampling.add_argument("--bad-words", **several, metavar="TEXT", help="texts that an answer must not have")
    help = "added to logits: '{\"1234\": -100}' (token id, number)"
    sampling.add_argument("--logit-bias", type=json_object, metavar="JSON", help=help)
    help = "objects of the JSON schema may have other keys than their properties, as in the standard"
    sampling.add_argument("--additional-properties", action="store_true", default=None, help=help)
    form = sampling.add_mutually_exclusive_group()
    form.add_argument("--json-schema", type=_schema, metavar="JSON", help="the form of all answers; or a file of it")
    form.add_argument("--regex", metavar="TEXT", help="a regular expression that all answers match")
    form.add_argument("--choice", **several, metavar="TEXT", help="texts of which each answer is one")
    form.add_argument("--grammar", type=_file, metavar="FILE", help="a grammar of all answers, in Lark's form or GBNF")
    add_options(sampling, SamplingParams, SAMPLING)
    add_options(parser.add_argument_group("engine (docs/reference.md)"), EngineOptions, ENGINE)
    parser.set_defaults(run=_run_batch, parser=parser, arguments=arguments)


def _port(text: str) -> int:
    with suppress(ValueError):
        if 0 <= int(text) < 2**16:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: a number in 0..65535; 0 takes a free one")


def _file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read: {error}") from None


def _schema(text: str) -> Any:
    """JSON, or a file of it."""
    return read_json(text if text.lstrip().startswith("{") else _file(text))


def _run_batch(options: argparse.Namespace) -> int:
    if options.output is None and not options.dry_run:
        options.parser.error("the following arguments are required: -o/--output")
    if options.sample is not None and not options.dry_run:
        options.parser.error("argument --sample: needs --dry-run")
    if options.input is None and options.images is None:
        options.parser.error("the following arguments are required: -i/--input or --images")
    if options.input is not None and options.images is not None:
        options.parser.error("argument --images: not allowed with -i/--input: a job has one kind of lines")
    if (options.prompt is None) != (options.images is None):
        options.parser.error("argument --prompt: is asked of --images, and they need it")
    # To go on with a job, the command is repeated without these.
    once = {"--overwrite"} | ({"--retry-errors"} if options.retry_errors is True else set())
    given = given_options(options)
    given.pop("dry_run")
    given.setdefault("input", None)
    for name, key in (("json_schema", "json"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar")):
        if name in given:
            given["structured_outputs"] = {key: given.pop(name)}
    if given.pop("additional_properties", None):
        if "json" not in given.get("structured_outputs", {}):
            options.parser.error("argument --additional-properties: needs --json-schema")
        given["structured_outputs"]["additional_properties"] = True
    again = [word for word in options.arguments if word not in once]
    to_go_on = f"Interrupted. To go on: {shlex.join(['nanovllm', *again])}"
    try:
        with QuickExit(to_go_on, with_sigterm=True):
            from nanovllm.jobs import check_batch, run_batch
            from nanovllm.jobs.report import print_check, print_summary

        if options.dry_run:
            for name in ("output", "format", "ordered", "overwrite", "retry_errors", "ray_address", "seed"):
                given.pop(name, None)
            print_check(check := check_batch(**given))
            return _SOME_FAILED if check.num_failed else 0
        summary = run_batch(**given)
    except KeyboardInterrupt:
        print(f"\n{to_go_on}", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"nanovllm run-batch: {error}", file=sys.stderr)
        return _WRONG_CALL if isinstance(error, _OF_CALLS) else _FAILED
    except (RuntimeError, MemoryError) as error:
        without = " and ".join(word for word in options.arguments if word in once)
        hint = f"\nThe same command goes on with the job{without and f', without {without}'}."
        print(f"nanovllm run-batch: {error}{hint if getattr(error, 'goes_on', True) else ''}", file=sys.stderr)
        return _FAILED
    print_summary(summary, options.output)
    return _SOME_FAILED if summary.num_failed else 0


def _add_status(commands: Any) -> None:
    parser = commands.add_parser("status", help="say how far a job is", description="Say how far a job is.")
    parser.add_argument("output", metavar="FOLDER", help="the folder of the answers")
    parser.set_defaults(run=_status)


def _status(options: argparse.Namespace) -> int:
    from nanovllm.jobs import job_status
    from nanovllm.jobs.report import print_status

    print_status(job_status(options.output))
    return 0


# -- chat --------------------------------------------------------------------------------------------------------------


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model: each line is a message. /clear forgets the conversation, /exit ends. Sampling is "
        "what the model's generation_config.json recommends unless options say otherwise.",
    )
    parser.add_argument("model", help="a directory or a hub id")
    add_one_answer(parser)
    parser.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> int:
    with QuickExit():
        from nanovllm.terminal_chat import chat_in_terminal

    chat_in_terminal(**given_of_one_answer(options))
    return 0


# -- serve -------------------------------------------------------------------------------------------------------------


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine by OpenAI's API",
        description="Serve a model by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, "
        "and with --batches /v1/files and /v1/batches; also /v1/rerank, /classify, /health and /metrics. Needs the "
        "extra serve. Ends with Ctrl-C. docs/integrations.md says more.",
    )
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("--host", help="the address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=_port, metavar="N", help="0 takes a free one (default: 8000)")
    key_help = "what clients must send (default: the variable NANOVLLM_API_KEY, or no key)"
    parser.add_argument("--api-key", metavar="KEY", help=key_help)
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: MODEL)")
    parser.add_argument(
        "--chat-template", type=_file, metavar="FILE", help="a Jinja template instead of the tokenizer's"
    )
    split_help = "give what a model thinks as reasoning_content (and reasoning), apart from the content"
    parser.add_argument("--split-reasoning", action="store_true", help=split_help)
    calls_help = "give calls of a request's tools as tool_calls, apart from the content"
    parser.add_argument("--split-tool-calls", action="store_true", help=calls_help)
    parser.add_argument("--access-log", action="store_true", help="write a line about each request to standard error")
    hosts_help = "names by which clients without a key may call the server, beside addresses and localhost"
    parser.add_argument("--allowed-hosts", nargs="+", action="extend", metavar="NAME", help=hosts_help)
    images = parser.add_argument_group("images (docs/images.md)")
    other_defaults = {"image_root": "no files are read", "max_images": "64"}
    add_options(images, ImageRules, IMAGE_OPTIONS, other_defaults=other_defaults)
    batches = parser.add_argument_group("batches: /v1/files and /v1/batches (docs/batches.md)")
    batches.add_argument("--batches", metavar="FOLDER", help="serve batches, and keep them and their files here")
    size_help = "MiB of one file that is uploaded (default: 200)"
    batches.add_argument("--batch-file-max-mib", type=_size(int), metavar="MIB", help=size_help)
    sizes_help = "GiB of the folder, beyond which no file is uploaded and no batch begins (default: 20)"
    batches.add_argument("--batches-max-gib", type=_size(float), metavar="GIB", help=sizes_help)
    add_options(parser.add_argument_group("engine (docs/reference.md)"), EngineOptions, ENGINE)
    parser.set_defaults(run=_serve, interrupted="the server has ended", parser=parser)


def _size(kind: Any) -> Any:
    def read(text: str) -> Any:
        with suppress(ValueError):
            if 0 < kind(text) < 2**20:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a positive number")

    return read


def _serve(options: argparse.Namespace) -> int:
    for name in ("batch_file_max_mib", "batches_max_gib"):
        if getattr(options, name) is not None and options.batches is None:
            options.parser.error(f"argument --{name.replace('_', '-')}: needs --batches")
    try:
        with QuickExit("nanovllm serve: interrupted, the server has ended", with_sigterm=True):
            from nanovllm.integrations.serving.server import serve

        with sigterm_as_interrupt():
            serve(**given_options(options))
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ImportError("needs starlette and uvicorn: pip install 'nanovllm[serve]'") from error
    return 0


# -- fit ---------------------------------------------------------------------------------------------------------------

_FIT = (
    *("tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"),
    *("dtype", "quantization", "kv_cache_dtype", "kvcache_gib", "revision", "state_dtype", "text_only"),
    *("speculation", "max_speculative_tokens"),
)


def _add_fit(commands: Any) -> None:
    parser = commands.add_parser(
        "fit",
        help="say whether a model fits a GPU",
        description="Say what a model needs of a GPU's memory, what is left for the KV cache, and which options make "
        "it fit. From its shapes: no weights are downloaded or read, and no GPU is needed. Exit status: 0 it fits one, "
        "1 it fits none.",
    )
    parser.add_argument("model", help="a directory, a hub id, or the name of a published shape such as Qwen3-8B")
    memory_help = "GiB of each GPU (default: this machine's GPU and CPU, and common sizes)"
    parser.add_argument("--gpu-memory", dest="memory_gib", type=_gib, nargs="+", metavar="GIB", help=memory_help)
    gpus_help = "say how to divide N GPUs: data_parallel_size x tensor_parallel_size, and which is the fastest"
    parser.add_argument("--gpus", dest="num_gpus", type=int, metavar="N", help=gpus_help)
    add_options(parser.add_argument_group("engine (docs/reference.md)"), EngineOptions, _FIT)
    parser.set_defaults(run=_fit)


def _gib(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 2**20:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no size of a GPU in GiB")


def _fit(options: argparse.Namespace) -> int:
    given = given_options(options)
    with QuickExit():
        from nanovllm.fit import print_fit
        from nanovllm.fit_gpus import print_divisions

    fits = print_divisions(**given) if "num_gpus" in given else print_fit(**given)
    return 0 if fits else _FAILED


# -- tune --------------------------------------------------------------------------------------------------------------


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure which kernels are the fastest for a model on this GPU",
        description="Measure which kernels are the fastest for a model's matrix products on this GPU. Engines of this "
        "user take the result from the cache directory when they start. No weights are read. A run that was "
        "stopped goes on where it was.",
    )
    tune.add_argument("model", help="a directory, a hub id, or the name of a published shape such as Qwen3-8B")
    tune.add_argument("--device", default="cuda", help="the GPU to measure, cuda or cuda:N (default: %(default)s)")
    help = "measure one GPU's part of a model split over N"
    tune.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help=help)
    add_options(tune, EngineOptions, ["quantization"])
    target = tune.add_mutually_exclusive_group()
    target.add_argument("--output", type=Path, metavar="FILE", help="write the table to this file instead")
    target.add_argument("--package", action="store_true", help="write the table into the package, to contribute it")
    help = "numbers of tokens to measure, of those that --dry-run lists; others take the next larger one's choice"
    tune.add_argument("--tokens", type=int, nargs="+", metavar="N", help=f"{help} (default: all)")
    tune.add_argument("--dry-run", action="store_true", help="list what would be measured; needs no GPU")
    tune.set_defaults(run=_tune, interrupted="and the same command goes on from there")


def _tune(options: argparse.Namespace) -> int:
    with QuickExit():
        from nanovllm.tuning.tune_model import tune_model

    tune_model(
        options.model,
        num_gpus=options.tensor_parallel_size,
        quantization=options.quantization,
        device=options.device,
        output=options.output,
        into_package=options.package,
        dry_run=options.dry_run,
        tokens=options.tokens,
    )
    return 0
