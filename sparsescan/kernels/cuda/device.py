"""Launches, and memory by address on a device.

In Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) addresses are of the host, and kernels are Python.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import config, types

from ...arrays.cuda import SIMULATED, cuda
from ...locks import new_lock

if SIMULATED:
    intrinsic: Any = None  # what compiles to instructions of one's own is Python there
    _CTYPES = {
        np.float32: ctypes.c_float,
        np.float64: ctypes.c_double,
        np.int32: ctypes.c_int32,
        np.int64: ctypes.c_int64,
        np.uint16: ctypes.c_uint16,
    }
    _lock = new_lock()

    def _at(address: int, index: int, kind: type) -> Any:
        return _CTYPES[kind].from_address(int(address) + int(index) * np.dtype(kind).itemsize)

    def load(address: int, index: int, like: Any) -> Any:
        """Return ``address[index]``, of the type of the scalar `like`."""
        kind = type(like)
        return kind(_at(address, index, kind).value)

    def store(address: int, index: int, value: Any, like: Any) -> None:
        """Set ``address[index] = value``, of the type of the scalar `like`."""
        _at(address, index, type(like)).value = value

    def prefetch(address: int, index: int, like: Any) -> None:
        """Bring ``address[index]`` to the L2 cache, for a load that comes later."""

    def atomic_add(address: int, index: int, value: int) -> int:
        """Add to an int32 in one step that no thread can split; the old value."""
        with _lock:
            place = _at(address, index, np.int32)
            old: int = place.value
            place.value = old + value
            return old

    def atomic_max(address: int, index: int, value: int) -> int:
        """Make an int32 at least `value`, in one step; the old value."""
        with _lock:
            place = _at(address, index, np.int32)
            old: int = place.value
            place.value = max(old, value)
            return old

    def exponent_of(value: Any) -> int:
        """Return ``floor(log2 |value|) + 1`` of a finite value other than 0."""
        return math.frexp(value)[1]

    def scale(value: Any, exponent: int) -> Any:
        """Return ``value·2^exponent`` for any exponent, of the type of `value`."""
        with np.errstate(over="ignore", under="ignore"):
            return np.ldexp(value, min(max(int(exponent), -10000), 10000))

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    def _pointer(context, builder, address, index, dtype):  # type: ignore[no-untyped-def]
        # Global memory is never shared memory: so loads need not wait for stores to that.
        pointer = builder.inttoptr(address, context.get_data_type(dtype).as_pointer(1))
        return builder.gep(pointer, [index])

    @intrinsic
    def load(typingctx, address, index, like):  # type: ignore[no-untyped-def]
        """Return ``address[index]``, of the type of the scalar `like`."""

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.load(_pointer(context, builder, args[0], args[1], like))

        return like(types.int64, types.int64, like), codegen

    @intrinsic
    def store(typingctx, address, index, value, like):  # type: ignore[no-untyped-def]
        """Set ``address[index] = value``, of the type of the scalar `like`."""

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            builder.store(args[2], _pointer(context, builder, args[0], args[1], like))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, like, like), codegen

    @intrinsic
    def prefetch(typingctx, address, index, like):  # type: ignore[no-untyped-def]
        """Bring ``address[index]`` to the L2 cache, for a load that comes later."""

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            pointer = _pointer(context, builder, args[0], args[1], like)
            word = builder.ptrtoint(pointer, args[0].type)
            kind = ir.FunctionType(ir.VoidType(), [word.type])
            builder.asm(kind, "prefetch.global.L2 [$0];", "l", [word], side_effect=True)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, like), codegen

    def _atomic(operation: str) -> Any:
        def typed(typingctx, address, index, value):  # type: ignore[no-untyped-def]
            def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
                pointer = _pointer(context, builder, args[0], args[1], types.int32)
                return builder.atomic_rmw(operation, pointer, args[2], "monotonic")

            return types.int32(types.int64, types.int64, types.int32), codegen

        return intrinsic(typed)

    # Both take int32, and return the old value.
    atomic_add, atomic_max = _atomic("add"), _atomic("max")

    @cuda.jit(device=True)
    def exponent_of(value):  # type: ignore[no-untyped-def]
        """Return ``floor(log2 |value|) + 1`` of a finite value other than 0."""
        return np.int64(math.frexp(value)[1])

    @cuda.jit(device=True)
    def scale(value, exponent):  # type: ignore[no-untyped-def]
        """Return ``value·2^exponent`` for any exponent, of the type of `value`."""
        return math.ldexp(value, np.int32(min(max(exponent, np.int64(-10000)), np.int64(10000))))


def launch(kernel: Any, blocks: int, threads: int, stream: int, *arguments: Any) -> None:
    """Start a kernel on a stream, given by its handle, of the current device.

    Its arguments are integers, each of which it takes as int64.
    """
    if blocks > 0:
        _start(kernel, blocks, threads, stream, arguments)


if SIMULATED:

    def _start(
        kernel: Any, blocks: int, threads: int, stream: int, arguments: tuple[Any, ...]
    ) -> None:
        # The simulator has no streams: a launch returns when the kernel is done.
        kernel[blocks, threads](*arguments)

else:
    from .machine_code import load as load_kernel

    try:
        from numba.cuda.core import config as _settings
    except ImportError:  # Numba's own CUDA target
        _settings = config

    _configuring = new_lock()

    class _Handle(NamedTuple):
        """A stream, as far as CuPy looks at one in a launch."""

        ptr: int

    def _start(
        kernel: Any, blocks: int, threads: int, stream: int, arguments: tuple[Any, ...]
    ) -> None:
        loaded = load_kernel(kernel, len(arguments))
        if loaded is None:
            _configured(kernel, blocks, threads, stream)(*arguments)
        else:
            # CuPy takes int as int64, and scalars of NumPy as what they are.
            numbers = tuple(map(int, arguments))
            grid, block = (int(blocks),), (int(threads),)
            loaded.function(grid, block, numbers, loaded.shared, _Handle(stream))

    @lru_cache(maxsize=128)
    def _stream(handle: int) -> Any:
        """Return one object for each stream: Numba keeps launches by it, of which each costs."""
        return cuda.external_stream(handle) if handle else 0

    def _configured(kernel: Any, blocks: int, threads: int, stream: int) -> Any:
        """Return the kernel with its launch, without the warning that a grid is small."""
        with _configuring:
            warns = _settings.CUDA_LOW_OCCUPANCY_WARNINGS
            _settings.CUDA_LOW_OCCUPANCY_WARNINGS = 0
            try:
                return kernel[blocks, threads, _stream(stream)]
            finally:
                _settings.CUDA_LOW_OCCUPANCY_WARNINGS = warns
