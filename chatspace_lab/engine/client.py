"""The engine as the model sees it: started, asked, and stopped on the model's own loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from chatspace_lab import errors, wire
from chatspace_lab.engine.asked import Prepared, changes, prepare
from chatspace_lab.engine.bank import VectorBank
from chatspace_lab.engine.captures import CaptureBroker
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.fixed import fixed_tokenizer
from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.engine.observer import Observer
from chatspace_lab.engine.processes import descendants, end, shared_memory
from chatspace_lab.engine.requests import Submission
from chatspace_lab.engine.root_cause import CauseLog, start_error
from chatspace_lab.engine.stream import StreamDelta
from chatspace_lab.engine.texts import Echo, held_back, repeated
from chatspace_lab.engine.together import together
from chatspace_lab.quiet import quiet_children, quieten

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


SHUTDOWN_S = 30
"""Seconds that an engine may take to end by itself. A worker alone may take 9 of them."""

DEATH_S = 1
"""Seconds between two looks at whether the engine still lives, while a call waits for its answer."""

Stage = Callable[[str], None]
"""Receives the name of the stage that a start has reached."""

_open: weakref.WeakSet[EngineClient] = weakref.WeakSet()


def _close_open() -> None:
    for client in list(_open):
        client.close()


_starting = threading.Lock()
"""One engine of ours starts at a time, so that the processes of a failed start are not confused with another's."""


@contextlib.contextmanager
def _stages(progress: Stage | None) -> Iterator[Callable[[], None] | None]:
    """Give the workers a file to tell their stage, and yield what passes it on."""
    if progress is None:
        yield None
        return
    file = os.memfd_create("chatspace-lab-stage", os.MFD_CLOEXEC)
    os.pwrite(file, bytes(1), 0)
    os.environ[wire.STAGE_FILE] = f"/proc/{os.getpid()}/fd/{file}"
    try:
        yield lambda: progress(wire.STAGES[os.pread(file, 1, 0)[0]])
        progress(wire.STAGES[-1])
    finally:
        del os.environ[wire.STAGE_FILE]  # the number of a closed file means another one soon
        os.close(file)


@dataclass(frozen=True)
class ModelFacts:
    """What the engine told of its model."""

    architecture: str
    layer_count: int
    hidden_size: int
    dtype: torch.dtype
    dtype_reason: str
    max_model_len: int
    vocab_size: int
    tokenizer: Any
    runner: str
    block: str
    form: str
    doubt: str
    vllm_version: str


class EngineClient:
    """A running engine. Coroutines run on :attr:`loop`.

    Attributes
    ----------
    observers
        Told of every request from now on.
    """

    def __init__(self, loop: LoopThread, engine: AsyncLLM, log: CauseLog) -> None:
        self.loop = loop
        self.observers: list[Observer] = []
        self._engine, self._log = engine, log
        self._closed = False
        self._processes: set[psutil.Process] = set()
        self._shared: set[str] = set()
        self.facts: ModelFacts
        self.bank: VectorBank
        self.captures: CaptureBroker

    @classmethod
    def start(
        cls, config: VLLMSteeringConfig, enforce_eager: bool | None, progress: Stage | None = None
    ) -> EngineClient:
        """Start an engine and wait until it is ready.

        ``progress`` is called repeatedly with the current stage. An interrupt ends the start and all its processes.

        Raises
        ------
        EngineStartError, UnsupportedError
            If it does not start; its processes are gone then.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself finds out
            raise errors.EngineStartError(
                "the engine's processes import the main script again: put what it does under "
                "`if __name__ == '__main__':`"
            )
        quieten()
        with _starting:
            before = descendants()
            loop, log = LoopThread("chatspace-lab"), CauseLog()
            try:
                with quiet_children(), log.listening(), _stages(progress) as tick:
                    prepared = prepare(config, enforce_eager)
                    client = loop.call(cls._start(loop, log, config, prepared), tick=tick, patience_s=0)
            except BaseException as error:
                left = descendants() - before
                end(left, shared_memory(left), timeout_s=0)
                loop.close()
                try:
                    _raise_start_error(error, log)
                finally:
                    log.close()
                raise
        _open.add(client)
        # The last to be registered runs first: before vLLM's own, which gives the engine five seconds and kills it.
        atexit.unregister(_close_open)
        atexit.register(_close_open)
        for note in (*prepared.notes, *changes(prepared.asked, client._engine.vllm_config)):
            warnings.warn(note, errors.EngineWarning, stacklevel=3)
        if client.facts.doubt:
            warnings.warn(client.facts.doubt, errors.UncomparedWarning, stacklevel=3)
        return client

    @staticmethod
    def check(config: VLLMSteeringConfig, enforce_eager: bool | None) -> Prepared:
        """Look up the model and check the options, without starting anything.

        Raises
        ------
        EngineStartError, UnsupportedError
            If an engine of these could not start, as far as can be known beforehand.
        """
        log = CauseLog()
        try:
            with quiet_children(), log.listening():
                return prepare(config, enforce_eager)
        except BaseException as error:
            _raise_start_error(error, log)
            raise
        finally:
            log.close()

    @classmethod
    async def _start(
        cls, loop: LoopThread, log: CauseLog, config: VLLMSteeringConfig, prepared: Prepared
    ) -> EngineClient:
        import vllm
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ[wire.OWNER_PID] = str(os.getpid())  # inherited by the engine's processes
        # This process has threads, and perhaps CUDA: a forked engine could deadlock or fail to start.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        engine = AsyncLLM.from_vllm_config(prepared.vllm_config, disable_log_stats=prepared.asked["disable_log_stats"])
        client = cls(loop, engine, log)
        try:
            described = await client.rpc(wire.RPC_DESCRIBE)
        except BaseException:
            engine.shutdown()
            raise
        # The workers and what is above them: the engine, or this process where the worker is in the engine itself.
        pids = {pid for each in described for pid in each.pop("pids")} - {os.getpid()}
        client._processes = {psutil.Process(pid) for pid in pids}
        client._shared = shared_memory(client._processes)
        facts = described[0]
        dtype = getattr(torch, facts.pop("dtype"))
        tokenizer = None if engine.model_config.skip_tokenizer_init else fixed_tokenizer(engine.get_tokenizer())
        vocab_size = engine.model_config.get_vocab_size()
        client.facts = ModelFacts(
            **facts,
            dtype=dtype,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            vllm_version=vllm.__version__,
            max_model_len=engine.model_config.max_model_len,
            dtype_reason=prepared.dtype_reason,
        )
        client.bank = VectorBank(config.max_vectors, client._put_vectors)
        client.captures = CaptureBroker(
            loop,
            client.rpc,
            dtype=dtype,
            hidden_size=client.facts.hidden_size,
            limit=config.max_capture_bytes,
            shared=config.capture_transport == "shared",
        )
        return client

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every worker and return their answers.

        Raises
        ------
        WorkerError
            Or the error of ours that the worker raised, caused by the worker's own traceback.
        EngineDeadError
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        call = asyncio.ensure_future(self._engine.collective_rpc(method, args=args))
        try:
            # vLLM never answers a call that was under way when its engine died (``call_utility_async``).
            while not (await asyncio.wait([call], timeout=DEATH_S))[0]:
                if self._engine.errored:
                    raise self._dead()
            answers = call.result()
        except EngineDeadError as error:
            raise self._dead() from error
        finally:
            call.cancel()
        for answer in answers:
            if answer[0] == "error":
                _, kind, message, traceback_text = answer
                known = getattr(errors, kind, None)
                raised = known(message) if known else errors.WorkerError(f"{kind}: {message}")
                raise raised from errors.WorkerTracebackError(traceback_text)
        return [answer[1] for answer in answers]

    async def _put_vectors(self, rows: list[int], data: bytes) -> None:
        await self.rpc(wire.RPC_PUT_VECTORS, rows, data)

    async def run(self, submissions: Sequence[Submission]) -> list[RequestOutput]:
        """Run requests together and return their outputs in order. If one fails, the others are aborted."""
        try:
            self.captures.admit([s.handle for s in submissions if s.handle is not None])
            return await together(self._run_watched(submission, None) for submission in submissions)
        except BaseException:
            for submission in submissions:
                self.forget(submission)
            raise

    async def run_one(self, submission: Submission, put: Callable[[StreamDelta], None]) -> None:
        """Run one request and hand its pieces to ``put``. Cut off, its captures so far stay."""
        try:
            if submission.handle is not None:
                self.captures.admit([submission.handle])
            await self._run_watched(submission, put)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.forget(submission)
            raise

    async def _run_watched(self, submission: Submission, put: Callable[[StreamDelta], None] | None) -> RequestOutput:
        observers = [*self.observers, *([] if submission.progress is None else [submission.progress])]
        for observer in observers:
            observer.began(submission)

        def pass_on(piece: StreamDelta) -> None:
            for observer in observers:
                observer.received(submission, piece)
            if put is not None:
                put(piece)

        error: BaseException | None = None
        try:
            return await self._run_admitted(submission, pass_on if observers else put)
        except BaseException as raised:
            error = raised
            raise
        finally:
            for observer in observers:
                observer.ended(submission, error)

    async def _run_admitted(self, submission: Submission, put: Callable[[StreamDelta], None] | None) -> RequestOutput:
        from vllm.exceptions import VLLMValidationError  # a ValueError in some versions
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        program, handle = submission.program, submission.handle
        if self._closed:
            raise errors.EngineDeadError("this model was closed; make a new one")
        tokenizer, prompt, params = self.facts.tokenizer, submission.prompt.token_ids, submission.params
        echo = Echo(repeated(tokenizer, prompt, params))
        rows = await self.bank.acquire(program.vectors) if program else []
        received: list[int] = []
        sent = ""
        output: RequestOutput | None = None
        try:
            stream = self._engine.generate(
                submission.engine_prompt(),
                submission.engine_params(rows, stream=put is not None),
                submission.request_id,
            )
            async with contextlib.aclosing(stream):
                async for part in stream:
                    piece = part.outputs[0]
                    received.extend(piece.token_ids)
                    piece.text = echo.without(piece.text)
                    sent += piece.text
                    cached = part.num_cached_tokens or 0
                    delta = StreamDelta(piece.text, tuple(piece.token_ids), piece.finish_reason, cached_tokens=cached)
                    if output is None:
                        output = part
                    else:
                        output.add(part, aggregate=True)
                    if put is not None:
                        put(delta)
        except EngineDeadError as error:
            raise self._dead() from error
        except EngineGenerateError as error:
            raise errors.WorkerError(f"request {submission.request_id} failed in the engine") from error
        except (ValueError, VLLMValidationError) as error:
            if isinstance(error, errors.LabError):
                raise
            raise errors.RequestError(str(error)) from error
        finally:
            if program:
                self.bank.release(program.vectors)
            if handle is not None and handle.state == "running":
                handle.complete(received)
                self.captures.completed(handle)
            elif handle is not None:  # closed while it ran; rows may have come after that
                self.captures.discard(handle.request_id)
            if put is not None and received and (output is None or not output.finished):
                rest = held_back(tokenizer, prompt, params, received, sent)
                if rest:
                    put(StreamDelta(rest, ()))
        if output is None or not output.finished:
            raise errors.WorkerError(f"request {submission.request_id} ended without an answer")
        return output

    def forget(self, submission: Submission) -> None:
        """Drop the captures of a request that failed, or that never began."""
        if submission.handle is not None and submission.handle.state != "fetched":
            self.captures.discard(submission.handle.request_id)
            submission.handle.lose()

    def _dead(self) -> errors.EngineDeadError:
        if self._closed:
            return errors.EngineDeadError("this model was closed; make a new one")
        cause = self._log.read()
        why = "" if cause is None else f" ({cause.sentence})"
        return errors.EngineDeadError(
            f"the engine, or one of its workers, has died{why}; close the model and make a new one"
        )

    async def stats(self) -> dict[str, Any]:
        """Return what the first worker holds for us."""
        return (await self.rpc(wire.RPC_STATS))[0]

    @property
    def is_alive(self) -> bool:
        """Whether all processes of the engine run."""
        return not self._closed and not self._engine.errored and all(each.is_running() for each in self._processes)

    def memory(self) -> int:
        """Return the resident memory of the engine's processes, in bytes."""
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def close(self) -> None:
        """Stop the engine and the loop. Again is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(errors.EngineDeadError, TimeoutError):
                self.loop.call(self._shutdown(), timeout_s=60, patience_s=0)
        finally:  # also when it is interrupted: there is no second time
            end(self._processes, self._shared, timeout_s=5)
            self.loop.close()
            self._log.close()

    async def _shutdown(self) -> None:
        # By default vLLM kills an engine that is not gone after 5 seconds, and then its shared memory stays.
        self._engine.shutdown(timeout=SHUTDOWN_S)


def _raise_start_error(error: BaseException, log: CauseLog) -> None:
    """Raise the reason why an engine did not start, unless ``error`` is one of ours, or an interrupt."""
    if isinstance(error, Exception) and not isinstance(error, errors.LabError):
        found = start_error(error, log)
        raise found from found.__cause__
