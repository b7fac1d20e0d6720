"""Jobs on Ray Data: the same answers as from one engine, whoever dies."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from job_files import ReadHere, by_id, prompts, read_folder, read_lines, write_lines

ray = pytest.importorskip("ray")

from pyarrow import Table  # noqa: E402
from pyarrow.parquet import read_table, write_table  # noqa: E402
from ray.data.checkpoint import CheckpointConfig  # noqa: E402

from nanovllm.jobs import GenerateActor, ray_job, run, run_batch  # noqa: E402
from nanovllm.jobs.folder import JobFolder  # noqa: E402

ENGINE = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 200, "kvcache_block_size": 16, "num_kvcache_blocks": 128}
LINES = [*prompts(150), "not json", {"id": "no prompt"}, {"id": "long", "prompt": "a " * 500}]


@pytest.fixture(scope="module")
def cluster():
    """One for all tests, since it takes seconds to start. Its workers find the package and the tests' modules."""
    paths = os.pathsep.join([os.getcwd(), str(Path(__file__).parents[1])])
    environment = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def test_the_same_folder_with_one_engine_and_on_ray_with_a_dead_actor(cluster, path, tmp_path, answers, monkeypatch):
    monkeypatch.setattr(ray_job, "BLOCKS_PER_PART", 1)
    monkeypatch.setattr(run, "ReadAhead", ReadHere)
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    options = {"temperature": 0, "max_tokens": 8} | ENGINE
    run_batch(file, answers, path, **options)
    expected, errors = by_id(read_folder(answers)), by_id(read_lines(answers / "errors.jsonl"))
    assert (len(expected), len(errors)) == (150, 3)

    def assert_complete(summary):
        assert summary[:3] == (153, 150, 3)
        assert by_id(read_folder(answers)) == expected
        assert by_id(read_lines(answers / "errors.jsonl")) == errors

    write_lines(answers / "part-00000.jsonl", read_folder(answers)[:20])
    (answers / "errors.jsonl").unlink()
    killer = threading.Thread(target=kill_an_actor, args=(answers,), daemon=True)
    killer.start()
    assert_complete(run_batch(file, answers, path, replicas=2, **options))
    killer.join()
    assert len(list(answers.glob("part-*"))) > 2

    (answers / "part-00001.jsonl").unlink()
    assert_complete(run_batch(file, answers, path, **options))
    assert_complete(run_batch(file, answers, path, replicas=2, **options))


def kill_an_actor(answers):
    """Once there are answers of Ray."""
    while not (answers / "part-00001.jsonl").exists():
        time.sleep(0.02)
    titles = {int(file.parent.name): file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")}
    actors = [pid for pid, title in titles.items() if title.startswith(b"ray::MapWorker(MapBatches(_AnswerLines")]
    os.kill(actors[0], signal.SIGKILL)


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


def test_a_worker_that_outlives_its_run_completes_no_part(tmp_path):
    with JobFolder(tmp_path) as folder:
        sink = ray_job._Parts(folder, None)
        sink._write_part(['{"id": 1}'], 0)
    with JobFolder(tmp_path) as folder:
        with pytest.raises(FileNotFoundError, match="share the folder"):
            sink._write_part(['{"id": 2}'], 1)
        assert [path.name for path in folder.parts()] == ["part-00000.jsonl"]
    assert not list(tmp_path.glob(".*-*"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"replicas": 0}, ValueError, "replicas=0"),
        ({"replicas": 2, "ordered": True}, ValueError, "ordered"),
        ({"ray_address": "auto", "ordered": True}, ValueError, "ordered"),
    ],
)
def test_wrong_calls(path, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        run_batch(write_lines(tmp_path / "prompts.jsonl", LINES), tmp_path / "answers", path, **options)
    assert not (tmp_path / "answers").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"quantization": "int4"}, "quantization='int4'"), ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'")],
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
