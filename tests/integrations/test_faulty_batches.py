"""Every call of the disk that a server's batch makes goes wrong once: whatever happens, each line has one outcome.

As tests/jobs/test_faulty_disk.py does it for jobs. The service runs without HTTP and without its threads, behind an
engine that answers at once. After the fault the server starts anew, and a client repeats the calls that failed.
"""

import json
import shutil
import time

import pytest
from checkpoints import make_ascii_checkpoint, make_llm
from faulty_disk import FAILS, STAYS_BROKEN, FaultyDisk
from job_files import ReadHere
from served import MODEL, as_lines, request

from nanovllm.integrations.serving.batches import runner
from nanovllm.integrations.serving.batches.input_check import disk_error
from nanovllm.integrations.serving.batches.records import Batch, new_id
from nanovllm.integrations.serving.batches.runner import BatchRunner
from nanovllm.integrations.serving.batches.store import BatchStore
from nanovllm.jobs import work
from nanovllm.jobs.folder import MANIFEST
from nanovllm.jobs.run import JobError

# The second of them fails when it is read, and the fourth when it is answered.
ROWS = [request(0), request(1, temperature=-1), request(2), request(3), request(4)]
REFUSED = "line-3"


class AtOnce:
    """Stands for the background of an engine."""

    has_ended = False

    def __init__(self, refused: list[int]):
        """refused: the prompt that has no answer."""
        self._refused = refused

    def answer(self, pairs, check):
        for index, (token_ids, _) in enumerate(pairs):
            check()
            output = {"text": f"{sum(token_ids)} is the sum", "token_ids": token_ids[:3], "finish_reason": "length"}
            output |= {"stop_reason": None, "logprobs": None, "prompt_logprobs": None}
            output |= {"num_prompt_tokens": len(token_ids)}
            yield index, {"error": "it is refused", "token_ids": []} if token_ids == self._refused else output


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = make_ascii_checkpoint(tmp_path_factory.mktemp("faulty"))
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as llm:
        yield llm


class Client:
    """What a client has been told."""

    def __init__(self):
        self.file_id = self.batch_id = None

    def call(self, store):
        """Upload the file, and make the batch, unless it has been told that they are there."""
        if self.file_id is None:
            with store.upload() as upload:
                upload.write(as_lines(ROWS))
                self.file_id = upload.keep("lines.jsonl", "batch").id
        if self.batch_id is None:
            batch_id = new_id("batch_")
            expires = int(time.time()) + 3600
            store.add_batch(Batch(batch_id, self.file_id, "/v1/completions", "24h", expires, None, MODEL))
            self.batch_id = batch_id


def serve(folder, llm, client):
    """A server from its start until nothing is left to do. Raises what a server would log, or a client be told."""
    with BatchStore(folder, 1 << 20, 1 << 24) as store:
        refused = llm.get_tokenizer()(ROWS[3]["body"]["prompt"])["input_ids"]
        service = BatchRunner(store, llm, AtOnce(refused), MODEL)
        try:
            client.call(store)
            for batch in store.batches():
                service._check(batch.id)
            while (batch := service._next()) is not None:
                service._work(batch)
        finally:
            service._checks.shutdown()


def lines_of(store, file_id):
    return [] if file_id is None else [json.loads(line) for line in store.content(file_id).read_text().splitlines()]


def check_folder(folder, client):
    with BatchStore(folder, 1 << 20, 1 << 24) as store:
        assert store.file(client.file_id) is not None, "the file that the client knows"
        assert store.content(client.file_id).read_bytes() == as_lines(ROWS)
        assert store.batch(client.batch_id) is not None, "the batch that the client knows"
        known = {file.id for file in store.files()}
        for batch in store.batches():
            assert batch.status == "completed", batch
            answers, errors = lines_of(store, batch.output_file_id), lines_of(store, batch.error_file_id)
            ids = [row["custom_id"] for row in (*answers, *errors)]
            assert sorted(ids) == [row["custom_id"] for row in ROWS], "each line once"
            assert sorted(row["custom_id"] for row in errors) == ["line-1", REFUSED]
            counts = batch.num_lines, batch.num_answered, batch.num_failed
            assert counts == (5, 3, 2)
            assert {batch.output_file_id, batch.error_file_id} <= known
            assert not store.job_folder(batch.id).exists()
        names = {path.name for path in (folder / "files").iterdir()}
        assert names == {f"{file_id}.{suffix}" for file_id in known for suffix in ("json", "jsonl")}, "and no others"
        assert {path.suffix for path in (folder / "batches").iterdir()} == {".json"}
        store.delete_file(client.file_id)
        assert store.file(client.file_id) is None


def is_of_disk(error):
    """After these a server tries again."""
    return isinstance(error, JobError) or disk_error(error) is not None


@pytest.mark.parametrize("how", [FAILS, STAYS_BROKEN])
def test_each_line_has_one_outcome_whatever_goes_wrong(llm, tmp_path, monkeypatch, how):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0)
    at, num_hit = 0, 0
    while True:
        folder, client = tmp_path / str(at), Client()
        with FaultyDisk(folder, at, how) as disk:
            try:
                serve(folder, llm, client)
            except Exception as error:
                if not disk.is_hit or not is_of_disk(error):
                    raise
        if not disk.is_hit:
            break
        num_hit += 1
        name, path = disk.calls[at]
        try:
            serve(folder, llm, client)
            check_folder(folder, client)
        except Exception as error:
            raise AssertionError(f"after call {at}, {name} of {path}") from error
        at += 1
    assert num_hit == at == len(disk.calls), "every call of a batch"
    assert {name for name, _ in disk.calls} >= {"open", "write", "fsync", "replace", "unlink", "rmdir"}
    assert ("unlink", f"batches/{client.batch_id}/{MANIFEST}") in disk.calls, "also the removal of the job"
    check_folder(folder, client)


def read_and_delete(folder, num_files):
    """A server that starts where batches are, and a client that reads all files and deletes them. Files that are known
    are whole, also after a call has failed."""
    with BatchStore(folder, 1 << 20, 1 << 24) as store:
        assert len(store.batches()) == 1, "no record is lost"
        assert len(store.files()) <= num_files
        try:
            for file in store.files():
                with store.content(file.id).open("rb") as content:
                    assert len(content.read()) == file.bytes
            for file in store.files():
                store.delete_file(file.id)
        finally:
            for file in store.files():
                assert (folder / "files" / f"{file.id}.json").exists()
                assert (folder / "files" / f"{file.id}.jsonl").stat().st_size == file.bytes


@pytest.mark.parametrize("how", [FAILS, STAYS_BROKEN])
def test_files_are_read_and_deleted_whatever_goes_wrong(llm, tmp_path, monkeypatch, how):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    client = Client()
    serve(tmp_path / "done", llm, client)
    at = 0
    while True:
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "done", folder)
        with FaultyDisk(folder, at, how) as disk:
            try:
                read_and_delete(folder, 3)
            except OSError:
                if not disk.is_hit:
                    raise
        if not disk.is_hit:
            break
        read_and_delete(folder, 3)
        assert [*(folder / "files").iterdir()] == [], disk.calls[at]
        assert [path.suffix for path in (folder / "batches").iterdir()] == [".json"], disk.calls[at]
        at += 1
    assert at == len(disk.calls), "every call"
    assert {name for name, _ in disk.calls} >= {"open", "read", "fsync", "unlink"}
