"""Jobs on Ray Data: the same answers as from one engine, whoever dies."""

import os
import signal
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from job_files import ReadHere, by_id, interrupted_after, prompts, read_folder, read_lines, write_lines

ray = pytest.importorskip("ray")

from pyarrow import Table  # noqa: E402
from pyarrow.parquet import read_table, write_table  # noqa: E402
from ray.data.checkpoint import CheckpointConfig  # noqa: E402

from nanovllm.jobs import GenerateActor, ray_job, run, run_batch, work  # noqa: E402
from nanovllm.jobs.arguments import Arguments, Cluster  # noqa: E402
from nanovllm.jobs.progress import Generated, Progress  # noqa: E402
from nanovllm.jobs.ray_engine import RayEngine, Started  # noqa: E402
from nanovllm.jobs.ray_job import RayEngines  # noqa: E402

ENGINE = {"max_num_seqs": 8, "max_model_len": 200, "kvcache_block_size": 16, "num_kvcache_blocks": 128}
LINES = [*prompts(150), "not json", {"id": "no prompt"}, {"id": "long", "prompt": "a " * 500}]


@pytest.mark.slow
def test_the_same_folder_with_one_engine_and_on_ray_with_a_dead_engine(cluster, path, tmp_path, answers, monkeypatch):
    """In order, for which lines of the dead engine are waited for."""
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    options = {"temperature": 0, "max_tokens": 8, "ordered": True} | ENGINE
    run_batch(file, answers, path, **options)
    shown = []

    class Seen(Progress):
        def __exit__(self, *exc_info):
            super().__exit__(*exc_info)
            shown.append((self._read().num_tokens - self._first, self._answers.num_tokens))

    monkeypatch.setattr(run, "Progress", Seen)
    in_order = read_folder(answers)
    expected, errors = by_id(in_order), by_id(read_lines(answers / "_errors.jsonl"))
    assert (len(expected), len(errors)) == (150, 3)

    def assert_complete(summary):
        assert summary[:3] == (153, 150, 3)
        assert by_id(read_folder(answers)) == expected
        assert by_id(read_lines(answers / "_errors.jsonl")) == errors
        assert read_folder(answers) == in_order

    write_lines(answers / "part-00000.jsonl", in_order[:20])
    (answers / "_errors.jsonl").unlink()
    killer = threading.Thread(target=kill_an_engine, args=(answers,), daemon=True)
    killer.start()
    assert_complete(run_batch(file, answers, path, replicas=2, **options))
    killer.join()
    tokens = sum(row["num_completion_tokens"] for row in in_order[20:])
    assert shown == [(tokens, tokens)], "What an engine had under way when it died does not count."

    write_lines(answers / "part-00000.jsonl", in_order[:20])
    assert_complete(run_batch(file, answers, path, **options))
    assert_complete(run_batch(file, answers, path, replicas=2, **options))


def kill_an_engine(answers):
    """Once there are answers of Ray, which others see while it works."""
    while not list(answers.glob("_part-*")):
        time.sleep(0.02)
    titles = {int(file.parent.name): file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")}
    engines = [pid for pid, title in titles.items() if title.startswith(b"ray::RayEngine")]
    os.kill(engines[0], signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize(("num_engines", "num_gpus"), [(2, 1), (1, 2)])
def test_each_engine_has_gpus_of_its_own(cluster, path, tmp_path, answers, monkeypatch, num_engines, num_gpus):
    seen = tmp_path / "seen"
    seen.mkdir()

    class Telling(RayEngine):
        """Says which it has been given, and ends the job once all have."""

        def start(self, *args):
            (seen / os.environ["CUDA_VISIBLE_DEVICES"]).touch()
            while len(os.listdir(seen)) < num_engines:
                time.sleep(0.01)
            return Started({}, ValueError("all have started"))

    monkeypatch.setattr(ray_job, "RayEngine", Telling)
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    file = write_lines(tmp_path / "prompts.jsonl", prompts(4))
    options = ENGINE | {"tensor_parallel_size": num_gpus, "max_tokens": 2}
    with pytest.raises(ValueError, match="3 engines need"):
        run_batch(file, answers, path, replicas=3, **options)
    with pytest.raises(ValueError, match="all have started"):
        run_batch(file, answers, path, replicas=num_engines, **options)
    assert sorted(os.listdir(seen)) == (["0", "1"] if num_gpus == 1 else ["0,1"])


@pytest.mark.nightly
def test_an_interrupt_writes_what_is_finished(cluster, path, tmp_path, answers, llm, monkeypatch):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    run_batch(file, tmp_path / "here", llm, temperature=0, max_tokens=8)
    options = {"replicas": 1, "temperature": 0, "max_tokens": 8} | ENGINE
    with interrupted_after(40), pytest.raises(KeyboardInterrupt):
        run_batch(file, answers, path, **options)
    assert 36 < len(read_folder(answers)) < 150
    assert not list(answers.glob("*.tmp"))
    assert run_batch(file, answers, path, **options)[:3] == (153, 150, 3)
    assert by_id(read_folder(answers)) == by_id(read_folder(tmp_path / "here"))


@pytest.mark.nightly
def test_an_engine_whose_machine_lacks_the_model(cluster, path, tmp_path, answers, monkeypatch):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    monkeypatch.setattr(ray_job, "on_any_machine", lambda arguments: Arguments("nowhere/model", {}))
    file = write_lines(tmp_path / "prompts.jsonl", prompts(4))
    with pytest.raises(OSError, match=r"model='nowhere/model': no such directory.*\(on .*\)$"):
        run_batch(file, answers, path, replicas=1, **ENGINE)


@pytest.mark.nightly
def test_an_own_pipeline(cluster, path, tmp_path):
    kept = {"text": "kept", "error": "of before", "body": "of a mail"}
    rows = [{"id": i, "question": f"a block {i}", "max_tokens": 1 + i % 5} | kept for i in range(20)]
    rows[7]["question"] = None
    source = tmp_path / "prompts.parquet"
    write_table(Table.from_pylist(rows), source)
    context = ray.data.DataContext.get_current().copy()
    context.checkpoint_config = CheckpointConfig("id", str(tmp_path / "checkpoint"), delete_checkpoint_on_success=False)
    with ray.data.DataContext.current(context):
        dataset = ray.data.read_parquet(str(source)).repartition(target_num_rows_per_block=8)
        pool = GenerateActor.pool(path, replicas=1, prompt_column="question", temperature=0, **ENGINE)
        dataset.map_batches(GenerateActor, **pool).write_parquet(str(tmp_path / "answers"))
    found = {row["id"]: row for row in read_table(tmp_path / "answers").to_pylist()}
    assert sorted(found) == list(range(20))
    assert [found[i]["num_completion_tokens"] for i in (0, 1, 2)] == [1, 2, 3]
    assert [found[3][name] for name in ("input_text", "input_error", "body")] == list(kept.values())
    assert found[3]["question"] == "a block 3"
    assert found[3]["error"] is None
    assert found[7]["text"] is None
    assert "'question'" in found[7]["error"]
    assert len(list((tmp_path / "checkpoint").iterdir())) > 0


def test_what_a_dead_engine_had_under_way_is_not_generated(path):
    class Dead:
        has_started, num_starts, lines = True, 1, {}
        generated, num_returned = Generated(50, 3), 20

        def restart(self):
            self.generated, self.num_returned = Generated(), 0

    engines = RayEngines(Cluster(1, None), Arguments(str(path), {}), lambda *_: None)
    engines._all, engines._again = [Dead()], deque()
    assert engines.generated() == Generated(50, 3)
    engines._replace(engines._all[0], ray.exceptions.RayActorError())
    assert engines.generated() == Generated(20, 0)


def test_wrong_calls(path, tmp_path):
    with pytest.raises(ValueError, match="replicas=0"):
        run_batch(write_lines(tmp_path / "prompts.jsonl", LINES), tmp_path / "answers", path, replicas=0)
    assert not (tmp_path / "answers").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"quantization": "int3"}, "quantization='int3'"), ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'")],
)
def test_wrong_options_of_the_engines_leave_the_old_answers(path, tmp_path, options, message):
    """Without Ray: they are refused before it starts."""
    file, answers = write_lines(tmp_path / "prompts.jsonl", LINES[:3]), tmp_path / "answers"
    run_batch(file, answers, path, temperature=0, max_tokens=2, **ENGINE)
    before = read_folder(answers)
    with pytest.raises(ValueError, match=message):
        run_batch(file, answers, path, replicas=2, overwrite=True, **ENGINE, **options)
    assert read_folder(answers) == before


def test_replicas_make_their_own_engines(llm, tmp_path):
    with pytest.raises(TypeError, match="directory or a hub id"):
        run_batch(write_lines(tmp_path / "prompts.jsonl", LINES), tmp_path / "answers", llm, replicas=2)
