"""The engine: one thread that schedules, dispatches ahead of what it has read, and emits text."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from oscar_jax.config import EngineConfig
from oscar_jax.engine.blocks import BlockManager
from oscar_jax.engine.request import FinishReason, Output, Request
from oscar_jax.engine.runner import (
    Capacity,
    ModelRunner,
    Progress,
    compile_count,
    settings_of,
)
from oscar_jax.engine.sampling import BAD_LOGITS, GREEDY_BELOW
from oscar_jax.engine.scheduler import Scheduler, Sequence
from oscar_jax.engine.steps import IDLE, STOP_IDS
from oscar_jax.engine.text import TextStream
from oscar_jax.models import Loaded, Tokenizer
from oscar_jax.rotation import Rotation

log = logging.getLogger(__name__)
RECOVERIES_IN_A_ROW = 3


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of a moment, for logs and /metrics."""

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_total: int
    bits_per_element: float  # of the pages, metadata counted
    bytes_per_token: int  # in the pages, all layers
    compiles_after_ready: int
    preemptions: int
    recoveries: int  # steps that failed and were repeated with fresh pools
    saturated_rows: int  # cached rows clamped to float16's range


@dataclasses.dataclass
class _Dispatch:
    """A step that was queued on the device and not read yet."""

    tokens: jax.Array  # i32[steps, rows] or i32[1]
    sequences: list[Sequence]


class Engine:
    """Requests join and leave a running batch; results come through ``Request.emit``.

    ``build`` allocates and compiles, ``start`` begins to serve; ``submit`` and ``abort`` may be
    called from any thread.
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.degraded = False  # set by whoever skipped the canary
        capacity = runner.capacity
        self._blocks = BlockManager(capacity.pages)
        self._scheduler = Scheduler(capacity.slots, self._blocks, capacity.shape.windows)
        self._table = np.zeros((capacity.slots, runner.table_pages), np.int32)
        self._in_flight: collections.deque[_Dispatch] = collections.deque()
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._recoveries = self._recoveries_in_a_row = 0
        self._faults: jax.Array | None = None
        self._saturated = 0
        self._compiles_at_ready = compile_count()

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        loaded: Loaded,
        rotation: Rotation | None,
        progress: Progress = lambda _: None,
        *,
        available_bytes: int | None = None,
    ) -> Engine:
        """Allocate the pools and compile every step.

        Args:
            rotation: required for an INT2 cache. progress: told what is being done.
            available_bytes: memory that ``mem_fraction`` is a share of; default: what is free.

        Raises:
            ValueError: the rotation belongs to another shape, or the longest sequence cannot fit.
        """
        runner = ModelRunner(config, loaded, rotation, available_bytes=available_bytes)
        runner.compile(progress)
        return cls(runner, loaded.tokenizer)

    @property
    def capacity(self) -> Capacity:
        return self.runner.capacity

    @property
    def max_model_len(self) -> int:
        return self.capacity.max_model_len

    @property
    def alive(self) -> bool:
        """The engine's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    # ------------------------------------------------------------------------- from any thread

    def start(self) -> None:
        """Begin to serve, on a thread of its own."""
        self._compiles_at_ready = compile_count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is unfinished is aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never be served: no tokens, or longer than max_model_len.
        """
        params, prompt = request.params, len(request.prompt)
        if not prompt:
            raise ValueError("prompt has no tokens: it must have at least one")
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens={params.max_tokens}: must be at least 1")
        if prompt + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"{prompt} prompt tokens and max_tokens={params.max_tokens} exceed max_model_len="
                f"{self.max_model_len}"
            )
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.tokenizer.eos_ids
        if len(stop_ids) > STOP_IDS:
            raise ValueError(
                f"{len(stop_ids)} stop token ids (the model's own included): at most {STOP_IDS}"
            )
        sequence = Sequence(
            request=request,
            text=TextStream(self.tokenizer, params.stop, params.include_stop_str_in_output),
            stop_ids=frozenset(stop_ids),
            tokens=list(request.prompt),
        )
        self._post(lambda: self._scheduler.add(sequence))

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; one that is unknown or over is left alone."""
        self._post(lambda: self._abort(request_id))

    def stats(self) -> Stats:
        shape = self.capacity.shape
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_pages_used=self._blocks.used_count,
            kv_pages_total=self._blocks.total,
            bits_per_element=shape.bits_per_element,
            bytes_per_token=shape.bytes_per_token,
            compiles_after_ready=compile_count() - self._compiles_at_ready,
            preemptions=0,  # pages are reserved at admission: what runs never gives way
            recoveries=self._recoveries,
            saturated_rows=self._saturated,
        )

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # ------------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        except BaseException as error:
            self._failed = error
            log.exception("the engine has stopped")
        finally:
            reason: FinishReason = "error" if self._failed else "abort"
            self._take_commands()  # what was submitted and never seen is told as well
            for sequence in (*self._scheduler.running, *self._scheduler.waiting):
                self._finish(sequence, reason, error="the engine has stopped")

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the engine shall end."""
        with self._wake:
            while not (self._stopping or self._commands or self._busy):
                self._wake.wait()
            return not self._stopping

    @property
    def _busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting or self._in_flight)

    def step(self) -> None:
        """Take commands, queue one chunk and one decode dispatch, read what came before."""
        self._take_commands()
        self._scheduler.admit()
        try:
            dispatched = self._dispatch_prefill() | self._dispatch_decode()
            while len(self._in_flight) > (1 if dispatched else 0):
                self._read(self._in_flight.popleft())
            self._write_pages()
        except (jax.errors.JaxRuntimeError, RuntimeError) as error:
            self._recover(error)

    def _take_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _dispatch_prefill(self) -> bool:
        sequence = self._scheduler.prefilling()
        if sequence is None:
            return False
        if not sequence.prefilled:
            self._table[sequence.slot, : len(sequence.pages)] = sequence.pages
        chunk = sequence.tokens[sequence.prefilled : sequence.target][
            : self.runner.config.prefill_chunk
        ]
        sequence.prefilled += len(chunk)
        final = sequence.prefilled == sequence.target
        token = self.runner.prefill(
            self._table,
            sequence.slot,
            chunk,
            length=sequence.prefilled,
            final=final,
            settings=settings_of(
                sequence.request.params,
                prompt_len=sequence.prompt_len,
                stop_ids=sequence.stop_ids,
            ),
        )
        sequence.pages_written = self.capacity.shape.pages_written(sequence.prefilled)
        # Every chunk is read, so that the device is never more than one ahead: an abort or a
        # newcomer does not wait for a whole prompt. Only the last one's token means anything.
        self._queue(token, [sequence] if final else [], 1)
        return True

    def _dispatch_decode(self) -> bool:
        sequences = self._scheduler.decoding()
        if not sequences:
            return False
        greedy = all(s.request.params.temperature < GREEDY_BELOW for s in sequences)
        tokens = self.runner.decode(self._table, [s.slot for s in sequences], greedy=greedy)
        self._queue(tokens, sequences, self.runner.config.steps_per_dispatch)
        return True

    def _queue(self, tokens: jax.Array, sequences: list[Sequence], steps: int) -> None:
        for sequence in sequences:
            sequence.in_flight += steps
        self._in_flight.append(_Dispatch(tokens, sequences))

    def _read(self, dispatch: _Dispatch) -> None:
        """Wait for a dispatch and hand its tokens to their sequences."""
        tokens = np.asarray(dispatch.tokens)
        tokens = tokens.reshape(-1, tokens.shape[-1])  # [steps, rows]
        self._recoveries_in_a_row = 0
        for row, sequence in enumerate(dispatch.sequences):
            if sequence.slot < 0:
                continue  # it ended since this was queued
            sequence.in_flight -= tokens.shape[0]
            self._accept(sequence, [int(t) for t in tokens[:, row] if t != IDLE])

    def _accept(self, sequence: Sequence, ids: list[int]) -> None:
        """New tokens of a sequence: append, turn into text, and see whether they end it."""
        reason: FinishReason | None = None
        if BAD_LOGITS in ids:
            self._finish(sequence, "error", error="the model produced logits that are not finite")
            return
        words = ids
        if ids and ids[-1] in sequence.stop_ids:
            reason, words = "stop", ids[:-1]  # a stop id ends the text and is not part of it
        before = sequence.text.consumed
        delta, stopped = sequence.text.push(words)
        if stopped:
            reason, ids = "stop", words[: sequence.text.consumed - before]
        sequence.tokens += ids
        if reason is None and len(sequence.tokens) >= sequence.end:
            reason = "length"
        if reason is not None:
            self._finish(sequence, reason, text=delta, ids=ids)
        elif ids:
            self._emit(
                sequence, Output(delta, tuple(ids), None, sequence.prompt_len, sequence.generated)
            )

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        text: str = "",
        ids: list[int] | None = None,
        error: str | None = None,
    ) -> None:
        self._scheduler.release(sequence)
        output = Output(
            text + sequence.text.flush(),
            tuple(ids or ()),
            reason,
            sequence.prompt_len,
            sequence.generated,
            error if reason == "error" else None,
        )
        self._emit(sequence, output)

    def _emit(self, sequence: Sequence, output: Output) -> None:
        try:
            sequence.request.emit(output)
        except Exception:
            log.exception("request %s: its receiver failed", sequence.request.id)
            if output.finish_reason is None:
                self._post(lambda: self._abort(sequence.request.id))

    def _abort(self, request_id: str) -> None:
        sequence = self._scheduler.find(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    def _write_pages(self) -> None:
        """Write the pages that are complete by what was read; they are needed R tokens later."""
        jobs = []
        for sequence in self._scheduler.running:
            if sequence.prefilled < sequence.target:
                continue  # prefill writes its own pages, and the table may not be this one's yet
            cached = len(sequence.tokens) - 1  # the newest token is cached by the next step
            if self.capacity.shape.pages_written(cached) > sequence.pages_written:
                jobs.append((sequence.slot, sequence.pages_written))
                sequence.pages_written += 1
        if jobs:
            if self._faults is not None:
                self._check_faults(np.asarray(self._faults))
            self._faults = self.runner.write(self._table, jobs)

    def _check_faults(self, faults: Any) -> None:
        saturated, bad = (int(x) for x in faults)
        if saturated > self._saturated:
            log.warning("%d cached rows exceed float16 and were clamped so far", saturated)
            self._saturated = saturated
        if bad:
            raise RuntimeError(f"{bad} cached rows held NaN or inf when their page was written")

    def _recover(self, error: Exception) -> None:
        """After a failed step the donated pools are gone: start over with fresh ones."""
        self._recoveries += 1
        self._recoveries_in_a_row += 1
        if self._recoveries_in_a_row > RECOVERIES_IN_A_ROW:
            raise error
        log.error("a step failed and is repeated with fresh pools: %s", error)
        self._in_flight.clear()
        self._faults = None
        self._scheduler.requeue_all()
        self.runner.reset()
        time.sleep(0.1 * self._recoveries_in_a_row)
