"""The command line: what it prints, what it writes, and its exit status."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from gpus import pretend_gpu

from nanovllm.cli import main
from nanovllm.layers.matmul.table import Key, load_table, user_path

GPU = "NVIDIA Test GPU"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "nanovllm", *arguments], capture_output=True, text=True, timeout=300)


COMMANDS = ["run-batch", "status", "chat", "generate", "pull", "serve", "fit", "tune", "bench", "completion"]


def test_version_and_help_of_the_module():
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("nanovllm ")
    assert "tune" in run("--help").stdout
    assert run().returncode == 2
    assert "no command 'tun': did you mean tune?" in run("tun").stderr


def test_help_fits_a_terminal_and_tells_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = {}
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80, command
        told[command] = " ".join(text.split())
    for command in ("chat", "generate"):
        assert "--temperature N default: the model's" in told[command]
        assert "--presence-penalty N default: 0.0" in told[command]
        assert "--max-num-seqs N sequences of a step (default: 1)" in told[command]
    assert "--temperature N default: 1.0" in told["run-batch"]
    assert "--max-num-seqs N sequences of a step (default: 512)" in told["run-batch"]
    assert "--workload NAME [NAME ...] one or more of bench, many, " in told["bench"]


def dry_run(capsys, *arguments: str) -> list[str]:
    """The lines of `nanovllm tune --dry-run`, with single spaces."""
    assert main(["tune", *arguments, "--dry-run"]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_dry_run_needs_no_gpu(capsys, tmp_path):
    lines = dry_run(capsys, "Qwen3-8B")
    assert "decode 64 tokens linear_silu [24576, 4096] cublas x 1" in lines
    assert any("quack-kernels" in line for line in lines)
    assert "layers to measure" in lines[-1]
    *lines, _ = dry_run(capsys, "Qwen3-8B", "--tokens", "64", "2048")
    assert {tuple(line.split()[:2]) for line in lines} == {("decode", "64"), ("prefill", "2048")}
    of_two_gpus = dry_run(capsys, "Qwen3-8B", "--tensor-parallel-size", "2")
    assert "decode 64 tokens linear_sum [4096, 6144] cublas x 1" in of_two_gpus
    in_fp8 = "\n".join(dry_run(capsys, "Qwen3-30B-A3B", "--quantization", "fp8"))
    for candidate in ("split-k", "experts-gemv", "expert-tiles", "quack-experts"):
        assert f" {candidate} x " in in_fp8
    assert "cublas" in "\n".join(dry_run(capsys, str(make_checkpoint(tmp_path))))


def test_a_reader_may_stop_early():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nanovllm", "tune", "Qwen3-0.6B", "--dry-run"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


DEMO = str(Path(__file__).parents[2] / "assets" / "demo-model")


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("tune no/such/model", 2, "model='no/such/model'"),
        ("tune Qwen3-8B --output a --package", 2, "not allowed with argument"),
        ("tune Qwen3-8B --tensor-parallel-size 3", 2, "tensor_parallel_size=3: must divide"),
        ("tune Qwen3-8B --tensor-parallel-size 0", 2, "tensor_parallel_size=0"),
        ("tune Qwen3-8B --tokens 1 3", 2, "--tokens 3: must be among 1, 2, 4, 8"),
        ("fit Qwen3-8B --max-num-seqs 0", 2, "max_num_seqs=0"),
        ("fit Qwen3-8B --quantization x", 2, "quantization='x'"),
        ("fit Qwen3-8B --dtype int4", 2, "--dtype: invalid choice: 'int4'"),
        *[(f"fit Qwen3-8B --gpu-memory={size}", 2, "no size of a GPU") for size in ("0", "-3", "nan", "much")],
        (f"serve {DEMO} --port 99999", 2, "'99999' is no port: a number in 0..65535"),
        (f"chat {DEMO} --chat-template-kwargs [1]", 2, "'[1]' is no JSON object"),
        ("chat", 2, "nanovllm chat: missing: MODEL (usage: nanovllm chat MODEL [options])"),
        ("genrate m", 2, "nanovllm: no command 'genrate': did you mean generate?"),
        ("nothing-like-it", 2, "no command 'nothing-like-it': run-batch, status, verify, chat, "),
        ("chat m --maxtokens 5", 2, "unknown option --maxtokens: did you mean --max-tokens?"),
        ("chat m --max_model_len 5", 2, "unknown option --max_model_len: did you mean --max-model-len?"),
        ("serve m --trust-remote-code", 2, "--trust-remote-code: no code of a model's repository is run"),
        ("chat -tp 2 m", 2, "unknown option -tp: use --tensor-parallel-size"),
        ("serve m --calculate-kv-scales", 2, "use --kv-cache-scales calibrated"),
        ("fit m --gpu-mem 8", 2, "did you mean --gpu-memory or --gpu-memory-utilization?"),
        ("chat m --watchdog-timeout 5", 2, "an option of LLM in Python"),
        ("chat m n", 2, "unexpected argument 'n'"),
        ("chat --model m n", 2, "unexpected argument 'n'"),
        ("chat --model m --model=n", 2, "argument --model: is given twice"),
        (f"chat {DEMO} --temperature -1", 2, "temperature=-1"),
        (f"chat {DEMO} --top-k -7", 2, "top_k=-7"),
        (f"chat {DEMO} --quantization int3", 2, "quantization='int3'"),
    ],
)
def test_mistakes_are_named(capsys, monkeypatch, command, status, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    try:
        found = main(command.split())
    except SystemExit as error:
        found = error.code
    assert found == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_mistake_takes_two_lines_and_something_missing_one(capsys):
    for command, num_lines in (("run-batch", 1), ("", 1), ("run-batch -i a m --maxtokens 5", 2), ("bench --tp 2", 2)):
        with pytest.raises(SystemExit):
            main(command.split())
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == num_lines
        if num_lines == 2:
            assert lines[0].startswith(f"usage: nanovllm {command.split()[0]} ")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("fit {}", {}),
        ("fit --model {} -v", {}),
        ("--quiet fit --model={}", {"use_tqdm": False}),
        ("fit --max-num-seqs 8 {}", {"max_num_seqs": 8}),
    ],
)
def test_the_model_and_the_verbosity_stand_where_they_are_written(monkeypatch, command, expected):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # --quiet would set it.
    asked = []
    monkeypatch.setattr("nanovllm.fit.print_fit", lambda model, **options: asked.append((model, options)) or True)
    assert main(command.format(DEMO).split()) == 0
    assert asked == [(DEMO, expected)]


def test_a_model_that_may_be_missing_follows_an_option(monkeypatch):
    asked = []
    monkeypatch.setattr("nanovllm.bench.run.run_bench", lambda model, *rest: asked.append(model))
    for words in (["m", "--passes", "2"], ["--passes", "2", "m"], ["--model", "m"], []):
        assert main(["bench", *words]) == 0
    assert asked == ["m", "m", "m", None]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError, 2), (TypeError, 2), (FileNotFoundError, 2), (OSError, 1), (RuntimeError, 1), (MemoryError, 1)],
)
def test_an_error_is_a_line_in_every_command(capsys, monkeypatch, error, status):
    def fail(*args, **options):
        raise error("what is wrong")

    monkeypatch.setattr("nanovllm.bench.run.run_bench", fail)
    assert main(["bench"]) == status
    assert capsys.readouterr().err == "nanovllm bench: what is wrong\n"


def test_ctrl_c_while_modules_are_imported():
    program = (
        "import signal, sys; from nanovllm.utils.quick_exit import QuickExit\n"
        "with QuickExit():\n"
        "    try: signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException: print('swallowed')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nnanovllm: interrupted\n")
    outside = program.splitlines()[0] + "\nwith QuickExit(): pass\nsignal.raise_signal(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", outside], capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize(
    ("module", "command", "line"),
    [
        ("jobs", ["run-batch", "m", "-i", "a", "-o", "b"], "Interrupted. To go on: nanovllm run-batch m -i a -o b"),
        ("integrations.serving.server", ["serve", "m"], "nanovllm serve: interrupted, the server has ended"),
    ],
)
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_while_torch_is_imported(module, command, line, number):
    """It ends the process itself: a KeyboardInterrupt inside of torch's code may abort it, or change its status."""
    program = (
        "import signal, sys, types; from nanovllm.cli import main; module = types.ModuleType('slow')\n"
        "def slow(name):\n"
        f"    try: signal.raise_signal(signal.{number})\n"
        "    except BaseException: print('swallowed')\n"
        f"module.__getattr__ = slow; sys.modules['nanovllm.{module}'] = module; main({command})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"\n{line}\n")


def test_ctrl_c_in_bench(capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("nanovllm.bench.run.run_bench", interrupt)
    assert main(["bench"]) == 130
    assert capsys.readouterr().err == "\nnanovllm bench: interrupted, nothing was written\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["tune", "Qwen3-8B"]) == 2
    assert capsys.readouterr().err == (
        "nanovllm tune: needs a CUDA device, and torch finds none; --dry-run lists what would be measured\n"
    )


class GemvWins:
    """Stands for LayerTimer: the GEMV kernel is the fastest of what there is."""

    def __init__(self, products, attention):
        from nanovllm.layers.matmul.candidates import Cublas, Gemv

        self.candidates = {"cublas": Cublas(), "gemv": Gemv()}

    def fitted(self, i, choice):
        return choice

    def compile(self, trials, tell):
        assert {choice.candidate for *_, choice in trials} == {"cublas", "gemv"}
        tell(1, 1)

    def __call__(self, phase, num_tokens, picks):
        return sum(10.0 if pick.candidate == "gemv" else 20.0 for pick in picks)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that seems to have one."""
    pytest.importorskip("triton")
    from nanovllm.tuning import layer_timer, timed_attention

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layer_timer, "LayerTimer", GemvWins)
    monkeypatch.setattr(timed_attention, "TimedAttention", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    pretend_gpu(monkeypatch, name=GPU)
    return torch.device("cuda", 0)


def test_engines_find_what_was_measured(gpu, tmp_path, capsys):
    before = load_table(gpu)
    for model in ("Qwen3-0.6B", "Qwen3-1.7B"):
        assert main(["tune", model]) == 0
    path = user_path(GPU)
    assert path == Path(tmp_path, "nanovllm", "tuned", "NVIDIA_Test_GPU.json")
    assert f"rows in 0 s: {path}" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["gpu"] == GPU
    assert content["versions"]["torch"]
    table = load_table(gpu)
    for N, K in ((4096, 1024), (4096, 2048)):
        key = Key("linear", "decode", N, K, "bfloat16")
        assert table.rows[key][4][0].candidate == "gemv"
        assert table.rows[key][64] == ()
    assert table.rows.keys() >= before.rows.keys()
    other = Key("linear", "decode", 6144, 4096, "bfloat16")
    assert table.rows[other].choices == before.rows[other].choices
    assert table.settings == before.settings


def test_a_table_goes_where_it_is_wanted(gpu, tmp_path):
    path = tmp_path / "own.json"
    assert main(["tune", "Qwen3-8B", "--output", str(path)]) == 0
    assert json.loads(path.read_text())["gpu"] == GPU
    assert not user_path(GPU).exists()


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "the-first"])
def test_a_gpu_that_is_not_there_is_named(gpu, capsys, device):
    assert main(["tune", "Qwen3-8B", "--device", device]) == 2
    assert f"--device {device}: must be cuda or cuda:N, with N less than 1" in capsys.readouterr().err


def test_what_an_interruption_leaves_is_not_measured_again(gpu, monkeypatch, capsys, tmp_path):
    """By Ctrl-C or, with half a line written, by a kill. The table is that of a run in one go, and no layer is timed
    for a number of tokens that is known."""
    assert main(["tune", "Qwen3-8B", "--output", str(tmp_path / "whole.json")]) == 0
    time_layer, timed = GemvWins.__call__, []

    def timed_until(most):
        def time(self, phase, num_tokens, picks):
            if len(timed) >= most:
                raise KeyboardInterrupt
            timed.append((phase, num_tokens))
            return time_layer(self, phase, num_tokens, picks)

        return time

    path = tmp_path / "parts.json"
    monkeypatch.setattr(GemvWins, "__call__", timed_until(400))
    assert main(["tune", "Qwen3-8B", "--output", str(path)]) == 130
    assert capsys.readouterr().err.endswith("interrupted, and the same command goes on from there\n")
    assert not path.exists()
    (journal,) = Path(tmp_path, "nanovllm", "tuning").iterdir()
    with journal.open("a") as file:
        file.write('\n{"phase": "decode", "tok')
    known = set(timed) - {timed[-1]}
    assert known
    timed.clear()
    monkeypatch.setattr(GemvWins, "__call__", timed_until(10**6))
    assert main(["tune", "Qwen3-8B", "--output", str(path)]) == 0
    assert f"{len(known)} of 25 numbers of tokens were measured by a run that was stopped" in capsys.readouterr().out
    assert not known & set(timed)
    assert json.loads(path.read_text())["rows"] == json.loads((tmp_path / "whole.json").read_text())["rows"]
    assert not journal.exists()


def test_progress_in_a_file_is_lines(gpu, capsys):
    """No bar, which would draw over itself."""
    assert main(["tune", "Qwen3-8B"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\r" not in out
    assert sum(line.startswith(("decode", "prefill")) for line in out.splitlines()) == 25


# -- jobs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def answered(monkeypatch):
    """What run_batch is called with, instead of working. Its item "result" is what it returns or raises."""
    from nanovllm import jobs

    called = {"result": jobs.Summary(3, 3, 0, 5, 7, 1.0)}

    def run_batch(**arguments):
        called["arguments"] = arguments
        if isinstance(called["result"], BaseException):
            raise called["result"]
        return called["result"]

    monkeypatch.setattr(jobs, "run_batch", run_batch, raising=False)
    return called


BATCH = ["run-batch", "-i", "a.jsonl", "b.jsonl", "-o", "answers", "--model", "m"]


def test_run_batch_passes_on_what_is_given(answered, capsys, monkeypatch):
    arguments = ["--temperature", "0.6", "--max-tokens", "512", "--stop", "x", "--chat-template-kwargs", '{"a": false}']
    arguments += ["-i", "c.jsonl", "--stop", "y", "z"]
    assert main([*BATCH, *arguments, "--max-model-len", "2048", "--enforce-eager"]) == 0
    assert answered["arguments"] == {
        "input": ["a.jsonl", "b.jsonl", "c.jsonl"],
        "output": "answers",
        "model": "m",
        "temperature": 0.6,
        "max_tokens": 512,
        "stop": ["x", "y", "z"],
        "chat_template_kwargs": {"a": False},
        "max_model_len": 2048,
        "enforce_eager": True,
        "ordered": False,
        "overwrite": False,
        "retry_errors": False,
    }
    expected = "3 of 3 lines answered in answers\n5 prompt tokens, 7 completion tokens\nthis call took 1.0 s\n"
    said = capsys.readouterr().out
    assert said == expected
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # --quiet would set it.
    assert main([*BATCH, "--quiet"]) == 0
    assert (answered["arguments"]["use_tqdm"], capsys.readouterr().out) == (False, said)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--json-schema", '{"type": "object"}'], {"structured_outputs": {"json": {"type": "object"}}}),
        (["--json-schema", "schema.json"], {"structured_outputs": {"json": {"type": "array"}}}),
        (["--regex", "a+"], {"structured_outputs": {"regex": "a+"}}),
        (["--choice", "yes", "no"], {"structured_outputs": {"choice": ["yes", "no"]}}),
        (["--grammar", "schema.json"], {"structured_outputs": {"grammar": '{"type": "array"}'}}),
        (["--stop-token-ids", "5", "7"], {"stop_token_ids": [5, 7]}),
        (["--bad-words", "x", "--logit-bias", '{"5": -100}'], {"bad_words": ["x"], "logit_bias": {"5": -100}}),
        (["--chat-template", "schema.json"], {"chat_template": '{"type": "array"}'}),
        (["--no-line-parameters", "--id-column", "key"], {"line_parameters": False, "id_column": "key"}),
    ],
    ids=str,
)
def test_run_batch_passes_on_what_is_for_all_lines(answered, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"type": "array"}')
    assert main([*BATCH, *arguments]) == 0
    assert expected.items() <= answered["arguments"].items()
    assert not {"json_schema", "regex", "choice", "grammar"} & answered["arguments"].keys()


def test_the_exit_status_of_run_batch(answered, capsys):
    from nanovllm.jobs import JobError, Summary

    for result, status, message in (
        (Summary(3, 1, 2, 5, 7, 1.0), 3, f"2 lines failed: {Path('answers', '_errors.jsonl')} says why"),
        (Summary(3, 3, 0, 5, 7, 1.0, 7.0, 3.0, 0.5), 0, ""),
        (ValueError("format='x'"), 2, "nanovllm run-batch: format='x'"),
        (FileNotFoundError("no such file"), 2, "nanovllm run-batch: no such file"),
        (OSError(28, "No space left on device"), 1, "nanovllm run-batch: [Errno 28] No space left on device\n"),
        (JobError("full"), 1, "full\nThe same command goes on with the job, without --overwrite and --retry-errors.\n"),
        (KeyboardInterrupt(), 130, f"Interrupted. To go on: nanovllm {' '.join(BATCH)}\n"),
    ):
        answered["result"] = result
        assert main([*BATCH, "--overwrite", "--retry-errors"]) == status
        assert message in capsys.readouterr().err
    # An abbreviation of --overwrite would not be left out when the command is repeated.
    for wrong, message in (
        (BATCH[:4], "missing: MODEL (usage: nanovllm run-batch MODEL -i FILE"),
        ([*BATCH, "--no-such-option"], "unknown option --no-such-option: "),
        ([*BATCH, "--sample", "5"], "argument --sample: needs --dry-run"),
        ([*BATCH, "--overw"], "unknown option --overw: did you mean --overwrite?"),
        ([*BATCH, "--temperature", "warm"], "invalid float value: 'warm'"),
        ([*BATCH, "--chat-template", "no/file"], "--chat-template: 'no/file' cannot be read: "),
        ([*BATCH, "--json-schema", "no/file"], "--json-schema: 'no/file' cannot be read: "),
        ([*BATCH, "--json-schema", "{"], "--json-schema: '{' is not JSON"),
        ([*BATCH, "--regex", "a", "--choice", "b"], "not allowed with argument --regex"),
        ([*BATCH, "--chat-template-kwargs", "{"], "--chat-template-kwargs: '{' is not JSON"),
    ):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2
        assert message in capsys.readouterr().err


def test_a_dry_run_of_a_job(tmp_path, capsys):
    path = make_checkpoint(tmp_path / "model", tokenizer=True)
    line = '{"prompt": "a block", "max_tokens": 5}\n'
    (tmp_path / "a.jsonl").write_text(3 * line + '{"text": "a"}\n')
    assert main(["run-batch", "-i", str(tmp_path / "a.jsonl"), "--model", str(path), "--dry-run"]) == 3
    captured = capsys.readouterr()
    assert "a.jsonl:4: has no prompt" in captured.err
    columns = "columns that are parameters of their lines: max_tokens (--no-line-parameters makes them data)\n"
    columns += "columns that answers repeat: text\n"
    counts = "3 of 4 lines can be answered\n6 prompt tokens, at most 15 completion tokens\n"
    assert captured.out == counts + columns
    sample = ["--sample", "1", "--price-per-hour", "9", "--ignore-eos", "--device", "cpu", "--max-num-seqs", "4"]
    assert main(["run-batch", "-i", str(tmp_path / "a.jsonl"), "--model", str(path), "--dry-run", *sample]) == 3
    first, batch, whole = capsys.readouterr().out.removeprefix(counts + columns).splitlines()
    assert re.fullmatch(r"a sample of 1 line: 5.0 completion tokens each, [\d,]+ tokens a second", first)
    assert batch == "    The job runs 3 lines at once, which is faster than 1."
    assert re.fullmatch(r"the whole job: about 15 completion tokens, \d+ s, price 0.\d{4}", whole)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "model"]


def test_a_job_in_fp8(tmp_path, capsys):
    path = make_checkpoint(tmp_path / "model", tokenizer=True)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a block"}\n')
    batch = ["run-batch", "-i", str(tmp_path / "a.jsonl"), "--model", str(path), "--device", "cpu"]
    formats = ["--quantization", "fp8", "--kv-cache-dtype", "fp8", "--kv-cache-scales", "one"]
    assert main([*batch, *formats, "--dry-run"]) == 0
    output = ["-o", str(tmp_path / "answers"), "--max-tokens", "4"]
    assert main([*batch, *formats, *output]) == 0
    job = json.loads((tmp_path / "answers" / "_manifest.json").read_text())["job"]
    assert (job["quantization"], job["kv_cache_dtype"], job["kv_cache_scales"]) == ("fp8", "fp8", "one")
    assert main([*batch, *formats, *output, "--speculation", "suffix"]) == 0  # It changes no answer.
    # Answers of another format are those of another job.
    capsys.readouterr()
    assert main([*batch, *formats[2:], *output]) == 2
    assert "holds another job: quantization was 'fp8' and is now None" in capsys.readouterr().err
    assert main([*batch, "--quantization", "int3", "-o", str(tmp_path / "others")]) == 2
    assert "quantization='int3': must be None or one of fp8" in capsys.readouterr().err


def test_the_status_of_a_job(tmp_path, capsys):
    manifest = {"job": {"model": "m"}, "num_lines": 3, "progress": {"seconds": 2.0}, "input": []}
    (tmp_path / "_manifest.json").write_text(json.dumps(manifest))
    row = {"id": 1, "text": "a", "finish_reason": "stop", "num_prompt_tokens": 4, "num_completion_tokens": 5}
    (tmp_path / "part-00000.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("interrupted: 1 of 3 lines answered, 0 failed, 2 left\n4 prompt tokens, 5 completion tokens")
    assert "model='m'" in said
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_help_and_status_do_not_wait_for_torch():
    program = (
        "import sys; from nanovllm.cli import main; main(['status', '/nowhere'])\n"
        "try: main(['run-batch', '--help'])\n"
        "except SystemExit: print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_bench_reads_its_own_options(capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "--workload", "no-such"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: nanovllm bench")
    assert "laptop" in said
