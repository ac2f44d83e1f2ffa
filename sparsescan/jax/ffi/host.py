"""Functions of Python that XLA calls on its own buffers.

``jax.pure_callback`` copies arguments by programs of JAX, which may wait for the thread that runs
it. Here a function reads the buffers of the call frame (see :mod:`.handler`).
"""

from __future__ import annotations

import ctypes
import functools
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from .calls import vary, varying
from .handler import API, EXECUTE, FRAME, INTERNAL, METADATA, UNKNOWN

_TARGET = "sparsescan_host"
Shapes = Sequence[jax.ShapeDtypeStruct]
_ADDRESS = ctypes.c_int64
_CALL = ctypes.CFUNCTYPE(_ADDRESS, _ADDRESS)


class _Entry(NamedTuple):
    """A function, and the arrays that it takes and returns."""

    function: Callable[..., Sequence[Any]]
    arguments: Shapes
    results: Shapes


# By numbers that are drawn, so that a program that another process compiled finds none of them.
_entries: dict[int, _Entry] = {}


@functools.cache
def _key_of(function: Callable[..., Sequence[Any]], *kinds: tuple[Any, ...]) -> int:
    """Return the number of a function for arrays of these shapes and dtypes."""
    _register()
    key = secrets.randbits(62)
    arguments, results = ([jax.ShapeDtypeStruct(*each) for each in group] for group in kinds)
    _entries[key] = _Entry(function, arguments, results)
    return key


def call_host(
    function: Callable[..., Sequence[Any]], arguments: Sequence[Any], results: Shapes
) -> list[Any]:
    """Return what a function of NumPy's arrays returns, within a program of JAX.

    Parameters
    ----------
    function : callable
        A function of as many arrays, to be read only, that returns one for each result. It is kept:
        there may be programs that call it.
    arguments : sequence of jax.Array
        The arrays.
    results : sequence of jax.ShapeDtypeStruct
        The shapes and dtypes of results.
    """
    kinds = (tuple((each.shape, each.dtype) for each in group) for group in (arguments, results))
    call = jax.ffi.ffi_call(_TARGET, list(results), vmap_method="sequential")
    key = np.int64(_key_of(function, *kinds))
    return list(vary(call(*arguments, key=key), varying(arguments)))


@functools.cache
def _register() -> None:
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_FOR_C), platform="cpu")


def _handle(frame: int) -> int:
    """Run what a call frame asks for; return an error of XLA, or 0."""
    api, extension = _word(frame + FRAME.API), _word(frame + FRAME.EXTENSION)
    if extension and _short(extension + 8) == METADATA:
        version = _word(extension + 24)
        ctypes.memmove(version + 24, api + API.VERSION, 8)
        return 0
    if _short(frame + FRAME.STAGE) != EXECUTE:
        return 0
    key = _word(_word(_word(_word(frame + FRAME.ATTRIBUTES)) + 8))
    entry = _entries.get(key)
    if entry is None:
        return _error(api, UNKNOWN.decode())
    arguments = _arrays(_word(frame + FRAME.ARGUMENTS), entry.arguments)
    for array in arguments:
        array.flags.writeable = False
    try:
        found = entry.function(*arguments)
        for out, each in zip(
            _arrays(_word(frame + FRAME.RESULTS), entry.results), found, strict=True
        ):
            out[...] = each
    except BaseException as error:  # nothing may leave through XLA's frames
        return _error(api, f"{type(error).__name__}: {error}")
    return 0


def _arrays(buffers: int, kinds: Shapes) -> list[NDArray[Any]]:
    """Return XLA's buffers as arrays."""
    arrays = []
    for k, kind in enumerate(kinds):
        nbytes = math.prod(kind.shape) * kind.dtype.itemsize
        held = (ctypes.c_byte * nbytes).from_address(_word(_word(buffers + 8 * k) + 24))
        arrays.append(np.frombuffer(held, kind.dtype).reshape(kind.shape))
    return arrays


def _word(address: int) -> int:
    return _ADDRESS.from_address(address).value


def _short(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def _error(api: int, text: str) -> int:
    """Return an error of XLA with a message."""
    message = ctypes.create_string_buffer(text.encode())
    words = (ctypes.c_int64 * 4)(28, 0, ctypes.addressof(message), INTERNAL)
    return int(_CALL(_word(api + API.CREATE_ERROR))(ctypes.addressof(words)))


_FOR_C = _CALL(_handle)
