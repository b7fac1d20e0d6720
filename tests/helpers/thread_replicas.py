"""Replicas in threads of the test's own process: an engine of replicas without the seconds that processes take.

Messages are packed and unpacked as between processes.
"""

import queue
import sys
import threading
from types import SimpleNamespace

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.replicas.messages import EXIT, NEWS, pack, unpack
from nanovllm.engine.replicas.replica import Replica
from nanovllm.engine.replicas.replicas import OPTION, Replicas


class ThreadReplicas(Replicas):
    """
    Attributes:
        engines: of the replicas.
        told: ids of sequences whose news came, replica by replica.
        sent: (replica, kind, content) of what they were sent.
        is_held: a replica for whose news the caller waits; None for none.
    """

    def __init__(self, config, options):
        self.device_name, self.mixed_step_rows, self.failure, self._error = "", 0, None, None
        self.connections, self._unread = [], []
        self.processes = [SimpleNamespace(pid=0)] * config.data_parallel_size
        self._config, self._size, self._has_ended = config, config.data_parallel_size, False
        self._call_number = self._sleep_level = 0
        self._messages = queue.SimpleQueue()
        own = dict(options) | {OPTION: 1, "use_tqdm": False, "device": "cpu"}
        self.engines = [LLMEngine(config.model, **own) for _ in range(self._size)]
        self._outboxes = [queue.SimpleQueue() for _ in self.engines]
        self.sent, self.told = [], [[] for _ in self.engines]
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(self._size)]
        # By default a thread that computes is interrupted after 5 ms, for which the others would wait in every step.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        for thread in self._threads:
            thread.start()

    def _run(self, i):
        def send(kind, content):
            kind, content = unpack(pack(kind, content))
            if kind == NEWS:
                self.told[i] += content.ids.tolist()
            self._messages.put((i, kind, content))

        try:
            Replica(self.engines[i], send, self._outboxes[i]).run()
        except BaseException as error:
            self.failure = f"replica {i} failed: {error!r}"
            raise

    def send(self, i, kind, content=None):
        self.sent.append((i, kind, content))
        super().send(i, kind, content)

    def wait_ready(self):
        return min(engine.config.num_kvcache_blocks for engine in self.engines)

    def exit(self):
        if self._has_ended:
            return
        self._has_ended = True
        for i in range(self._size):
            self.send(i, EXIT)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        sys.setswitchinterval(self._interval)
        for engine in self.engines:
            engine.exit()
