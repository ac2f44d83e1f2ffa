"""Recordings as functions that XLA calls by their keys."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import llvmlite.binding
import numpy as np
from numpy.typing import DTypeLike

from ... import __version__
from ...arrays.addresses import kernel_address
from ...execution.recording import Recording
from ...execution.recurrence import Recorded
from ...execution.threads import thread_count
from ...kernels.compile import entry_for_c
from ...locks import new_lock
from .calls import vary, varying
from .handler import ROOT, Program, Root, handle, help_replay

_TARGET = "sparsescan"
# Bytes from which memory is best in large pages.
_LARGE = 1 << 22
_lock = new_lock()
_root = np.zeros(Root.SIZE, np.int64)
_programs: dict[int, Any] = {}
# Tables that a call may still read.
_tables: list[Any] = []


class Lengths(NamedTuple):
    """Lengths among the arguments of a program, int32, which each replay checks.

    Attributes
    ----------
    argument : int
        Which argument they are.
    samples, steps : int
        How many, and the largest that is allowed.
    """

    argument: int
    samples: int
    steps: int


def key_of(*parts: Any) -> int:
    """Return a number that stands for all that a program depends on, in any process."""
    text = repr((__version__, thread_count(), parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1 or 1


def add(
    key: int,
    recording: Recording,
    sources: Sequence[int],
    nbytes: int,
    lengths: Lengths | None = None,
) -> None:
    """Let XLA call a recording by a key.

    Parameters
    ----------
    key : int
        As :func:`key_of` returns it.
    recording : Recording
        What is called.
    sources : sequence of int
        For each array of the recording which argument it is, or -1 and below for a result.
    nbytes : int
        The bytes of the first, which is new memory; 0 if that is an argument.
    lengths : Lengths, optional
        What is checked before a call.
    """
    with _lock:
        if key in _programs:
            return
        _register()
        words, own = np.zeros(Program.SIZE, np.int64), np.array(sources, np.int64)
        words[Program.HEADER] = kernel_address(recording.header)
        words[Program.WORDS] = recording.words
        words[Program.SOURCES], words[Program.ARRAYS] = kernel_address(own), len(own)
        words[Program.THREADS] = min(recording.width, thread_count())
        large = np.zeros(len(own), np.int64)
        large[0] = nbytes
        for k, each in enumerate(reversed(recording.results), start=1):
            large[-k] = math.prod(each.shape) * each.dtype.itemsize
        large[large < _LARGE] = 0
        words[Program.LARGE] = kernel_address(large)
        about = (-1, 0, 0) if lengths is None else lengths
        words[[Program.LENGTHS, Program.LENGTH_COUNT, Program.STEPS]] = about
        _publish(key, kernel_address(words))
        _programs[key] = words, own, large, recording


def _publish(key: int, address: int) -> None:
    """Let the next calls find a program, maybe in a larger table."""
    size = 16
    while size < 2 * (len(_programs) + 1):
        size *= 2
    todo = {key: address}
    if not _tables or len(_tables[-1]) < 1 + size:
        table = np.zeros((1 + size, 2), np.int64)
        table[0, 0] = size - 1
        todo.update((each, kernel_address(words)) for each, (words, *_) in _programs.items())
    else:
        table = _tables[-1]
    for each, where in todo.items():
        place = each & (size - 1)
        # It is there already if that was as far as another thread came before a fork.
        while table[1 + place, 0] not in (0, each):
            place = (place + 1) & (size - 1)
        # The address comes first: a call that finds the key reads it.
        table[1 + place] = 0, where
        table[1 + place, 0] = each
    if not _tables or table is not _tables[-1]:
        _tables.append(table)
    _root[Root.TABLE] = kernel_address(table)


@functools.cache
def _register() -> None:
    """Compile what XLA calls, and tell XLA."""
    llvmlite.binding.add_symbol(ROOT, kernel_address(_root))
    _root[Root.HELP] = entry_for_c(help_replay)
    handler = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(entry_for_c(handle))
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform="cpu")


def call(
    key: int,
    arguments: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], DTypeLike]],
    aliases: dict[int, int] | None = None,
) -> list[Any]:
    """Return the results of a program, of these shapes and dtypes.

    Parameters
    ----------
    aliases : dict of int to int, optional
        Arguments that the program overwrites, which are results, too.
    """
    kinds = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    function = jax.ffi.ffi_call(
        _TARGET, kinds, vmap_method="sequential", input_output_aliases=aliases
    )
    return list(vary(function(*arguments, key=np.int64(key)), varying(arguments)))


def replay(
    record: Callable[..., Recorded], about: tuple[Any, ...], arguments: Sequence[Any]
) -> list[Any]:
    """Return the results of the calls that ``record(*about)`` records.

    Parameters
    ----------
    record : callable
        A function of a module, whose name stands for it.
    about : tuple
        Its arguments, whose texts, or those of their keys, stand for them.
    arguments : sequence of jax.Array
        The arrays between the memory and the results.
    """
    key, kinds = _program(record, about, len(arguments))
    return call(key, arguments, kinds)[:-1]


@functools.lru_cache(maxsize=1024)
def _program(
    record: Callable[..., Recorded], about: tuple[Any, ...], arguments: int
) -> tuple[int, list[Any]]:
    """Return the key of a program, and the shapes and dtypes of its results and its memory."""
    recording, nbytes = record(*about)
    results = [(each.shape, each.dtype) for each in recording.results]
    name = f"{record.__module__}.{record.__qualname__}"
    key = key_of(name, *(getattr(each, "key", each) for each in about))
    count = len(results)
    add(key, recording, [-1 - count, *range(arguments), *range(-1, -1 - count, -1)], nbytes)
    return key, [*results, ((nbytes,), np.uint8)]
