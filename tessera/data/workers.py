"""Worker processes that may die: a crash of a native decoder costs one example, not the program.

Files of unknown origin are decoded by native libraries, and a damaged one can end the process that
reads it. A pool calls a function on blocks of keys (positions, or numbers of files) and returns the
results in order. If a worker dies, it is replaced, its blocks are loaded again, and the key that it
was reading is left out with a reason. Results are sent through pipes by value, so no shared memory
(64 MB in a container) and no descriptor for each tensor is needed. No torch is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import io
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_int64
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from typing import Any, Generic, Protocol, TypeVar

from tessera.data.errors import UnreadableFile
from tessera.run.errors import UserError

Result = TypeVar("Result", covariant=True)

PREFETCH = 4
"""The number of blocks that each worker is given ahead."""
STALLED_SECONDS = 900.0
"""A run ends if no worker returns anything for so long."""
MAX_DEATHS = 5
"""The number of consecutive deaths that no key explains, after which loading fails."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Signals by which a process ends because of what it does, unlike SIGKILL and SIGTERM."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PIPE_BYTES = 1 << 20
NOTHING = -1
"""The key of a worker that reads nothing."""


class WorkerError(RuntimeError):
    """A defect in the code that loads data; the message has the traceback of the worker."""


@dataclass
class Monitor:
    """Records which key is being read, and rejects the keys that ended a worker before."""

    crashed: Mapping[int, str] = field(default_factory=dict)
    current: Any = None
    """A value in the memory that a worker shares with its pool; None without workers."""

    def begin(self, key: int) -> None:
        """Announce that a key will be read; raise UnreadableFile if it must not be."""
        if key in self.crashed:
            raise UnreadableFile(self.crashed[key])
        if self.current is not None:
            self.current.value = key

    def end(self) -> None:
        if self.current is not None:
            self.current.value = NOTHING


class LoadBlock(Protocol[Result]):
    def __call__(self, block: Sequence[int], monitor: Monitor) -> Result:
        """Load some keys, each between `monitor.begin` and `monitor.end`."""


@dataclass(eq=False)
class Worker:
    process: BaseProcess
    requests: Connection
    results: Connection
    current: Any
    pending: deque[tuple[int, Sequence[int]]] = field(default_factory=deque)
    """Numbers and blocks that were sent and not returned."""
    last_seen: float = field(default_factory=time.monotonic)


@dataclass
class WorkerPool(Generic[Result]):
    """Load blocks in worker processes, in order; or in this process if `num_workers` is 0."""

    load: LoadBlock[Result]
    """The function that loads a block."""
    num_workers: int
    """The number of processes."""
    max_seconds: float | None = None
    """A worker that needs longer for a block is replaced and its key left out. None waits, and
    raises UserError if nothing arrives for STALLED_SECONDS."""
    crashed: dict[int, str] = field(default_factory=dict)
    """The keys that ended a worker, with the reason."""
    _killed: set[int] = field(default_factory=set)
    _unexplained_deaths: int = 0
    _workers: list[Worker] = field(default_factory=list)

    def results(self, blocks: Iterable[Sequence[int]]) -> Iterator[Result]:
        """Yield the result of each block, in their order."""
        if self.num_workers == 0:
            monitor = Monitor(self.crashed)
            yield from (self.load(block, monitor) for block in blocks)
            return
        try:
            yield from self._results(enumerate(blocks))
        finally:
            self.close()

    def _results(self, blocks: Iterator[tuple[int, Sequence[int]]]) -> Iterator[Result]:
        done: dict[int, Result] = {}
        number = 0
        while True:
            self._send(blocks, self.num_workers * PREFETCH - len(done))
            while number not in done:
                if not any(worker.pending for worker in self._workers):
                    return
                self._receive(done)
            yield done.pop(number)
            number += 1

    def _send(self, blocks: Iterator[tuple[int, Sequence[int]]], limit: int) -> None:
        """Give blocks to the workers with the fewest, up to a number of blocks under way."""
        while sum(len(worker.pending) for worker in self._workers) < limit:
            numbered = next(blocks, None)
            if numbered is None:
                return
            if len(self._workers) < self.num_workers:
                self._workers.append(self._start())
            worker = min(self._workers, key=lambda one: len(one.pending))
            if not worker.pending:
                worker.last_seen = time.monotonic()
            worker.pending.append(numbered)
            self._request(worker, *numbered)

    def _request(self, worker: Worker, number: int, block: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # a dead worker is found when results are received
            worker.requests.send((number, block, self.crashed))

    def _receive(self, done: dict[int, Any]) -> None:
        """Wait until at least one worker returns something or dies."""
        waiting = [worker for worker in self._workers if worker.pending]
        patience = STALLED_SECONDS if self.max_seconds is None else self.max_seconds
        deadline = min(worker.last_seen for worker in waiting) + patience
        if self.max_seconds is None:
            deadline = time.monotonic() + patience
        ready = wait([w.results for w in waiting], timeout=max(0.0, deadline - time.monotonic()))
        for worker in [worker for worker in waiting if worker.results in ready]:
            try:
                number, result, error = receive_object(worker.results)
            except (EOFError, OSError):
                self._replace(worker)
                continue
            self._unexplained_deaths = 0
            worker.last_seen = time.monotonic()
            if error is not None:
                raise error if isinstance(error, UserError) else WorkerError(error)
            worker.pending.popleft()
            done[number] = result
        if not ready:
            self._handle_stall(waiting, patience)

    def _handle_stall(self, waiting: list[Worker], patience: float) -> None:
        if self.max_seconds is None:
            raise UserError(
                f"No worker that loads data has returned an example for {patience / 60:.0f} "
                "minutes: the disk or the network may not respond, or a file may be too large to "
                "be read. `tessera check` shows the time of each folder; use --num-workers 0 to "
                "read in the training process."
            )
        for worker in waiting:
            if time.monotonic() >= worker.last_seen + patience:
                self.crashed[int(worker.current.value)] = (
                    f"reading it took more than {patience:.0f} seconds"
                )
                worker.process.kill()
                self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        """Replace a worker that died, and leave out the key that it was reading if it crashed."""
        worker.process.join()
        code, key = worker.process.exitcode or 0, int(worker.current.value)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        is_crash = code < 0 and -code in CRASHES
        if key in self.crashed:
            pass
        elif key != NOTHING and (is_crash or key in self._killed):
            self.crashed[key] = f"the process that read it died ({name})"
        else:  # ended from outside, most likely: try once more
            self._killed.add(key)
            self._unexplained_deaths += 1
        if self._unexplained_deaths >= MAX_DEATHS:
            raise UserError(
                f"A process that loads data was ended {MAX_DEATHS} times ({name}): the memory may "
                "be too small for so many. Use a lower --num-workers."
            )
        close_worker(worker)
        new = self._start()
        new.pending = worker.pending
        self._workers[self._workers.index(worker)] = new
        for numbered in new.pending:
            self._request(new, *numbered)

    def _start(self) -> Worker:
        context = multiprocessing.get_context()
        current = RawValue(c_int64, NOTHING)
        requests_in, requests_out = context.Pipe(duplex=False)
        results_in, results_out = context.Pipe(duplex=False)
        enlarge_pipe(results_in)
        arguments = (requests_in, results_out, self.load, current)
        process = context.Process(target=serve, args=arguments, daemon=True)
        with stop_signals_blocked(), warnings.catch_warnings():
            # Python 3.12 warns about any fork of a process with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        requests_in.close()
        results_out.close()
        return Worker(process, requests_out, results_in, current)

    def close(self) -> None:
        """End all workers. They have no state, so they are killed."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            close_worker(worker)
        self._workers = []


def close_worker(worker: Worker) -> None:
    worker.requests.close()
    worker.results.close()
    worker.process.close()


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM, which a new process inherits until it ignores them.

    A batch system sends them to the whole process group, also between the start of a process and
    its first instruction.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


# ---- in the worker


def serve(requests: Connection, results: Connection, load: LoadBlock[Any], current: Any) -> None:
    """Load blocks until the pool closes its end; a thread sends the results meanwhile."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.disable()  # a crash is reported by the pool
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        ForkingPickler.register(torch.Tensor, reduce_by_value)
    outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=send_results, args=(results, outbox), daemon=True).start()
    while True:
        try:
            number, block, crashed = requests.recv()
        except (EOFError, OSError):
            return
        outbox.put((number, *load_safely(load, block, Monitor(crashed, current))))


def load_safely(load: LoadBlock[Any], block: Sequence[int], monitor: Monitor) -> tuple[Any, Any]:
    """Return the result and None, or None and the error: a UserError, or a traceback as text."""
    try:
        return load(block, monitor), None
    except UserError as error:
        return None, UserError(str(error))
    except Exception:
        return None, traceback.format_exc()
    finally:
        monitor.end()


def send_results(results: Connection, outbox: queue.SimpleQueue[object]) -> None:
    with contextlib.suppress(OSError):  # the pool was closed
        while True:
            send_object(results, outbox.get())


def reduce_by_value(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """Pickle a tensor as an array instead of a handle of shared memory."""
    return sys.modules["torch"].from_numpy, (tensor.detach().cpu().contiguous().numpy(),)


# ---- the pipe


def send_object(pipe: Connection, item: object) -> None:
    """Send an object: its arrays as they are in memory, after everything else."""
    buffers: list[Any] = []
    stream = io.BytesIO()
    ForkingPickler(stream, 5, True, buffers.append).dump(item)
    raw = [buffer.raw() for buffer in buffers]
    pipe.send_bytes(stream.getbuffer())
    pipe.send([len(one) for one in raw])
    for one in raw:
        while len(one):
            one = one[os.write(pipe.fileno(), one) :]


def receive_object(pipe: Connection) -> Any:
    """Receive what `send_object` sent, arrays without an intermediate copy.

    A batch of 16 images of 256 x 256 pixels takes 3 ms; through `Connection.send` it took 32.
    """
    content = pipe.recv_bytes()
    buffers = [bytearray(size) for size in pipe.recv()]
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest):
            count = os.readv(pipe.fileno(), [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
    return ForkingPickler.loads(content, buffers=buffers)


def enlarge_pipe(pipe: Connection) -> None:
    """Let a pipe hold more than 64 kB where the system allows it, for large batches."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


@atexit.register
def kill_workers() -> None:
    """Kill workers at exit, since they ignore the SIGTERM by which multiprocessing ends them.

    This is needed where an exception leaves a pool half read: its traceback keeps it alive.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
