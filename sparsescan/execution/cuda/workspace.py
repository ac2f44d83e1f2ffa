"""Runs on a CUDA device: memory, run descriptors, and graphs of launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...arrays.addresses import kernel_address
from ...arrays.arrays import is_same_stream
from ...arrays.cuda import current
from ...arrays.streams import send
from ...chains.chain import Chain
from ...chains.grads import LocalGrads
from ...kernels.cuda.tables import Run
from ...symbolic.program import Program
from ..workspace import Parts
from .chunks import form_of
from .launches import Action, Launches, Matmul
from .memory import CountedMemory, TakenMemory


def device_bytes(program: Program, dtype: np.dtype[Any], batch: int, *, whole: bool = True) -> int:
    """Return the most device memory that scans take beside Jacobians and gradients, in bytes.

    They are those of its products, tables and patterns, once both scans have run: as if all
    Jacobians differed between samples, and with local gradients. Memory that cuBLAS keeps is not
    among them. Implicit steps run `whole`, where there are kernels for them, unless their weights
    differ.
    """
    form = form_of(program, dtype)
    whole = whole and form is not None and form.terms > 0
    steps = len(program.steps) if whole else program.n
    counted = CountedMemory(_descriptor_words(steps, False, "list"))
    differ = np.ones(program.n, bool)
    Launches(program, dtype, batch, differ, True, whole, counted).count()
    return counted.nbytes


def _descriptor_words(n: int, stacked: bool, local: str | None) -> int:
    """Return the words of a run descriptor: behind it addresses of steps and local gradients."""
    return Run.WIDTH + (0 if stacked else 2 * n) + (n + 1 if local == "list" else 0)


class DeviceWorkspace(TakenMemory):
    """Memory, tables and launches for a program on the current device, kept from run to run.

    Parameters
    ----------
    program : Program
        The program to run.
    dtype : dtype
        float32 or float64.
    batch : int
        Number of samples, at least 1.
    batched : ndarray of bool, shape (n,)
        Which Jacobians differ between samples.
    stacked : bool
        Whether the Jacobians come as one array.
    local : {None, "list", "stack"}
        Whether there are local gradients, and how they come.
    whole : bool, default False
        Whether to run implicit steps by kernels for chunks, where there are any: all steps share
        their second factor. Gradients and local gradients are then those of steps, and none within.

    Attributes
    ----------
    capture_error : str or None
        Why no graph could be made of the launches, if one was tried: runs then start them one by
        one.
    captures : Counter of str
        How captures have ended in this process, for benchmarks: ``"captured"``, or why they failed.

    Raises
    ------
    MemoryLimitError
        If the device has not enough memory left.
    """

    captures: ClassVar[Counter[str]] = Counter()

    def __init__(
        self,
        program: Program,
        dtype: np.dtype[Any],
        batch: int,
        batched: NDArray[np.bool_],
        stacked: bool,
        local: str | None,
        whole: bool = False,
    ) -> None:
        n = len(program.steps) if whole else program.n
        super().__init__(_descriptor_words(n, stacked, local))
        self._n, self._whole = n, whole
        self._device = self._cupy.cuda.Device()
        # The stream of the latest run, and when that is done: it is noted after each run, since
        # later that stream may have other work, capture a graph or be gone.
        self._latest = self._homes[0]
        self._done = self._cupy.cuda.Event(disable_timing=True)
        self._done.record(self._latest)
        self._locals = len(self._run) - (n + 1) if local == "list" else 0
        # The run descriptor as the host writes it; and what is on the device, but for the flag.
        self._told, self._sent = np.zeros(len(self._run), np.int64), b""
        self._chain: Chain | None = None
        self._may_capture = True
        self.capture_error: str | None = None
        self._launches = Launches(program, dtype, batch, batched, local is not None, whole, self)
        # One entry is for exclusive scans, one for inclusive ones; a second run makes a graph.
        self._actions: list[list[Action] | None] = [None, None]
        self._graphs: list[list[Action] | None] = [None, None]

    def __del__(self) -> None:
        # CuPy gives freed memory to others on the stream it was made on; a null stream is that of
        # the current device, which may be another one here. A stream that captures a graph cannot
        # wait for what is not in it. When a process ends CuPy may be gone already, and so is
        # whatever would have to wait.
        with suppress(Exception), self._device:
            for home in {id(home): home for home in self._homes}.values():
                if not home.is_capturing():
                    home.wait_event(self._done)

    def product(self, k: int) -> Parts | None:
        """Return the `k`-th product after a run, as :meth:`~.workspace.Workspace.product`.

        It is copied to host memory, which waits for the device. None if a value was not finite.
        """
        if self._run[Run.FLAG : Run.FLAG + 1].get()[0]:
            return None
        return self._launches.product(k)

    def run(
        self, chain: Chain, local: LocalGrads, out: Any, *, inclusive: bool, stream: Any = None
    ) -> None:
        """Fill `out`, whose first gradient is there.

        `stream` is CuPy's current one, for callers that have it.
        """
        told = self._told
        told[Run.FLAG], told[Run.OUT] = 0, kernel_address(out)
        stack, leaves = chain.stack, chain.leaves
        if self._whole:
            # Slopes and weights take turns.
            told[Run.WEIGHTS] = leaves[1, 0]
            stack, leaves = chain.stacks[0] if chain.stacks else None, leaves[::2]
        if stack is not None:
            told[Run.BASE : Run.SAMPLE + 1] = stack
        else:
            told[Run.WIDTH : Run.WIDTH + 2 * self._n] = leaves.ravel()
        if local.stack is not None:
            told[Run.LOCAL_BASE : Run.LOCAL_STEP + 1] = local.stack
        elif self._locals:
            told[Run.LOCALS] = self._locals
            local.fill(told[self._locals : self._locals + self._n + 1])
        if stream is None:
            stream = self._cupy.cuda.get_current_stream()
        # The memory is in use until the run before is done. Work on one stream is done in turn.
        if not is_same_stream(stream, self._latest):
            stream.wait_event(self._done)
        self._send(stream)
        self._chain = chain
        try:
            self._start(stream, inclusive)
        finally:
            self._chain = None
            self._latest = stream
            self._done.record(stream)

    def _send(self, stream: Any) -> None:
        """Bring the run descriptor to the device: of one that is there only the flag is lowered."""
        told = self._told.tobytes()
        if told == self._sent:
            flag = self._run.data + Run.FLAG * self._told.itemsize
            flag.memset_async(0, self._told.itemsize, stream)
            return
        self._sent = b""
        send(self._told, self._run, stream)
        self._sent = told

    def _start(self, stream: Any, inclusive: bool) -> None:
        graphs = self._graphs[inclusive]
        if graphs is None:
            with current(self._device.id):
                graphs = self._first_runs(stream, inclusive)
        for start in graphs:
            start(stream)

    def _first_runs(self, stream: Any, inclusive: bool) -> list[Action]:
        """Run without a graph, and return none; or return what all later runs start."""
        actions = self._actions[inclusive]
        if actions is None:
            self._homes.append(stream)  # of the tables that launches read
            actions = self._actions[inclusive] = self._launches.actions(inclusive)
        elif self._may_capture:
            # Kernels have been compiled and loaded, which no capture allows.
            graphs = self._graphs[inclusive] = self._captured(actions)
            if graphs is not None:
                return graphs
        for action in actions:
            action(stream)
        return []

    def _captured(self, actions: list[Action]) -> list[Action] | None:
        """Return a graph of all launches, or of those before, between and after calls of cuBLAS.

        CuPy makes none of those while a stream captures. None where no graph can be made.
        """
        graphs: list[Action] = []
        for apart, some in groupby(actions, lambda action: isinstance(action, Matmul)):
            if apart:
                graphs += some
                continue
            graph = self._capture(list(some))
            if graph is None:
                return None
            graphs.append(graph.launch)
        return graphs

    def _capture(self, actions: list[Action]) -> Any:
        """Return a graph of launches, or None where none can be made."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        try:
            stream.begin_capture()
            try:
                for action in actions:
                    action(stream)
            except Exception as error:
                # The end of this capture may fail, too, and say less.
                self.capture_error = _said(error)
                raise
            finally:
                graph = stream.end_capture()
        except Exception as error:
            # If it was not for the capture, plain launches will raise it again.
            self._may_capture = False
            self.capture_error = self.capture_error or _said(error)
            self.captures[self.capture_error] += 1
            return None
        self.captures["captured"] += 1
        return graph

    def multiply(
        self, left: Callable[[Chain], Any], right: Callable[[Chain], Any], out: Any
    ) -> None:
        """Make ``out = left @ right`` by cuBLAS, of arrays that are known when a chain is."""
        assert self._chain is not None
        a, b = left(self._chain), right(self._chain)
        # CuPy 13 writes to arrays of the product's own shape only.
        target = out if max(a.ndim, b.ndim) > 2 else out[0]
        self._cupy.matmul(a, b, out=target)


def _said(error: Exception) -> str:
    """Return the name and the message of an error."""
    return f"{type(error).__name__}: {error}"
