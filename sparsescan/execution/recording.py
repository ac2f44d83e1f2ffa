"""Kernel calls, recorded once for arrays of some shapes, and replayed by compiled code.

A :class:`Recorder` replaces :class:`Calls`. It hands out arrays at addresses without memory, and
finds these addresses among the arguments of kernels, which it does not call. A :class:`Recording`
holds the recorded calls. It runs without Python, and so without the GIL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import DTypeLike, NDArray

from ..arrays.addresses import array_at_address, kernel_address
from ..kernels.addresses import address_of
from ..kernels.cpu.copies import fill_with
from ..kernels.cpu.replay import Control, Header, again, again_on, begin
from .calls import LINE, Calls, Task
from .threads import replay, thread_count

Array = NDArray[Any]

# Arrays of a recorder begin at multiples of this number. No memory is there, and no other number
# among the arguments of kernels is as large.
_SPACE = 1 << 48
# Bytes after the end that kernels may read without using them: a few tiles of vectors.
_MARGIN = 1 << 13
# A replay that takes this many times the usual time, plus these seconds, has waited for other
# programs; and the most replays after it that run on one thread.
_CROWDED, _LATE, _MOST_ALONE = 3, 3e-4, 64
# Groups of members per thread, since some threads come late.
_TURNS = 4


class Space:
    """Work memory of recorded kernels: one array, whose size is known at the end.

    Parameters
    ----------
    number : int
        Which of the arrays of a replay it is.

    Attributes
    ----------
    nbytes : int
        The size.
    """

    def __init__(self, number: int) -> None:
        self._number, self._end, self.nbytes = number, 0, _MARGIN

    def take(self, count: int, dtype: DTypeLike) -> Array:
        """Return an array that begins with a cache line."""
        array = array_at_address((self._number + 1) * _SPACE + self._end, (count,), dtype)
        self._end += -(-array.nbytes // LINE) * LINE
        self.nbytes = max(self.nbytes, self._end + _MARGIN)
        return array

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Give back everything that the block takes."""
        end = self._end
        yield
        self._end = end


class Result(NamedTuple):
    """An array that a replay writes for the caller."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Recording:
    """Kernel calls that were recorded.

    Parameters
    ----------
    phases : list of list of list of tuple
        Pairs of a function and the words of its arguments, in strands, in phases.
    read : object
        Objects that must live as long as the recording.
    results : sequence of Result
        What the calls write for the caller, in arrays after all others.

    Attributes
    ----------
    header : ndarray of int64
        The addresses of everything that a replay reads, see :data:`Header`.
    width : int
        Strands of the widest phase.
    words : int
        How many words a replay takes.
    places : ndarray of int64, shape (count, 3)
        For each word that is an address in an array of a replay: which word, the number of the
        array, and bytes behind where that begins.
    """

    def __init__(
        self,
        phases: Sequence[Sequence[Sequence[tuple[int, list[int]]]]],
        read: object,
        results: Sequence[Result],
    ) -> None:
        self._read, self.results, self._phases = read, results, phases
        self._usual, self._alone, self._pause = inf, 0, 1
        strands = [strand for phase in phases for strand in phase]
        calls = [call for strand in strands for call in strand]
        self.width = max(map(len, phases), default=0)
        words = np.array([word for _, own in calls for word in own], np.int64)
        begins = np.cumsum([0, *(len(own) for _, own in calls)])[:-1]
        where = np.flatnonzero(words >= _SPACE)
        number, behind = np.divmod(words[where], _SPACE)
        functions = [function for function, _ in calls]
        self._tables = [
            np.cumsum([0, *map(len, phases)]),
            np.cumsum([0, *map(len, strands)]),
            np.array([functions, begins], np.int64).reshape(2, -1).T.copy(),
            words,
            np.array([where, number - 1, behind], np.int64).T.copy(),
        ]
        self.places = self._tables[-1]
        self.header = np.zeros(Header.SIZE, np.int64)
        places = Header.STRANDS, Header.CALLS, Header.TABLE, Header.WORDS, Header.PLACES
        self.header[list(places)] = [kernel_address(table) for table in self._tables]
        self.header[Header.PHASES] = len(phases)
        self.header[Header.WORD_COUNT] = len(words)
        self.header[Header.PLACE_COUNT] = len(where)
        self.words = Control.SIZE + len(words)

    def then(self, other: Recording, own: Sequence[int], others: Sequence[int]) -> Recording:
        """Return these calls followed by those of another recording, with its results.

        Parameters
        ----------
        other : Recording
            The other one.
        own, others : sequence of int
            The new numbers of the arrays of both.
        """

        def numbered(strand: Sequence[tuple[int, list[int]]], numbers: Sequence[int]) -> Any:
            return [
                (function, [_renumbered(word, numbers) for word in words])
                for function, words in strand
            ]

        pairs = (self._phases, own), (other._phases, others)
        phases = [
            [numbered(strand, numbers) for strand in phase]
            for each, numbers in pairs
            for phase in each
        ]
        return Recording(phases, (self._read, other._read), other.results)

    def members(self, count: int, nbytes: Sequence[int], scratch: Collection[int]) -> Recording:
        """Return these calls for `count` members, which threads share.

        Parameters
        ----------
        count : int
            How many members there are. Each has its own arrays, one after the other.
        nbytes : sequence of int
            The bytes of the array of one member, for each array of a replay.
        scratch : collection of int
            The numbers of memory that is not read later; each group of :func:`groups_of` members
            has one.
        """

        def moved(
            strand: Sequence[tuple[int, list[int]]], member: int, group: int
        ) -> list[tuple[int, list[int]]]:
            steps = [
                each * (group if number in scratch else member)
                for number, each in enumerate(nbytes)
            ]
            return [
                (function, [w + steps[w // _SPACE - 1] if w >= _SPACE else w for w in words])
                for function, words in strand
            ]

        groups = groups_of(count)
        if groups < thread_count():
            phases = [
                [moved(strand, k, k) for k in range(count) for strand in phase]
                for phase in self._phases
            ]
        else:  # no thread waits, and a thread's data stays in its cache
            strands = [strand for phase in self._phases for strand in phase]
            calls = [call for strand in strands for call in strand]
            members = [range(count * k // groups, count * (k + 1) // groups) for k in range(groups)]
            phases = [
                [
                    [call for member in own for call in moved(calls, member, group)]
                    for group, own in enumerate(members)
                ]
            ]
        results = [each._replace(shape=(count, *each.shape)) for each in self.results]
        return Recording(phases, self._read, results)

    @property
    def threads(self) -> int:
        """How many threads are useful."""
        return 1 if self.width == 1 else min(self.width, thread_count())

    def run(self, arrays: Sequence[Array]) -> None:
        """Make the calls with arrays in the order of their numbers."""
        self.run_at([address_of(each) for each in arrays])

    def run_at(self, addresses: Sequence[int]) -> None:
        """Make the calls with arrays at addresses.

        If other programs use the cores, threads that wait for each other also wait for those. After
        a replay that took much longer than usual, the next replays run on one thread; their number
        doubles each time this happens again.
        """
        control, parts = np.empty(self.words, np.int64), self.threads
        if self._alone:
            self._alone -= 1
            parts = 1
        begin = perf_counter()
        replay(self.header, np.array(addresses, np.int64), control, parts)
        if parts > 1:
            taken = perf_counter() - begin
            if taken > _CROWDED * self._usual + _LATE:
                self._alone = self._pause
                self._pause = min(2 * self._pause, _MOST_ALONE)
            else:
                self._pause = 1
            # Old measurements count less: the usual time grows a little with each replay.
            self._usual = min(taken, 1.01 * self._usual)
        if control[Control.FAILED]:
            raise RuntimeError("a kernel has failed")


class BoundRecording:
    """A recording whose arrays stay where they are, but for the last two, run by one caller.

    On one thread a run copies no words, and takes half a microsecond beside what the calls take.

    Parameters
    ----------
    recording : Recording
        The recording.
    arrays : sequence of ndarray
        The arrays that stay, in the order of their numbers.

    Attributes
    ----------
    is_alone : bool
        Whether it runs on the calling thread alone.
    """

    def __init__(self, recording: Recording, arrays: Sequence[Array]) -> None:
        self._recording, self._arrays = recording, arrays
        self._fixed = [address_of(each) for each in arrays]
        self.is_alone = recording.width == 1
        words, number, behind = recording.places.T
        moves = number >= len(arrays)
        table = Control.SIZE + words[moves], number[moves] - len(arrays), behind[moves]
        self._control = np.empty(recording.words + 3 * moves.sum(), np.int64)
        begin(recording.header, np.array([*self._fixed, 0, 0], np.int64), self._control)
        self._control[Control.MOVES] = recording.words
        self._control[recording.words :] = np.array(table, np.int64).T.reshape(-1)

    def run(self, x: Array, y: Array) -> None:
        """Make the calls with the last two arrays, which are contiguous and aligned."""
        if not self.is_alone:
            self._recording.run([*self._arrays, x, y])
        elif again_on(self._control, x, y):
            raise RuntimeError("a kernel has failed")

    def run_at(self, x: int, y: int) -> None:
        """Make the calls with the last two arrays at these addresses."""
        if not self.is_alone:
            self._recording.run_at([*self._fixed, x, y])
        elif again(self._control, x, y):
            raise RuntimeError("a kernel has failed")


def groups_of(count: int) -> int:
    """Return the number of groups of members that share scratch memory."""
    return min(count, _TURNS * thread_count())


class Recorder(Calls):
    """Record calls of kernels.

    Parameters
    ----------
    space : Space
        Where memory is taken.
    first : int
        The number of the first result among the arrays of a replay.
    effort : int, default 0
        How much LLVM optimises what loads the words of a call: 1 halves the time of that, and
        doubles that of compiling it.

    Attributes
    ----------
    results : list of Result
        What the caller gets, in the order of their numbers.
    """

    def __init__(self, space: Space, first: int, effort: int = 0) -> None:
        super().__init__()
        self.results: list[Result] = []
        self._space, self._first, self._effort = space, first, effort
        self._read: list[Any] = []
        self._known: dict[int, tuple[Any, Any, list[int]]] = {}
        self._phases: list[list[list[tuple[int, list[int]]]]] = []
        self._strand: list[tuple[int, list[int]]] | None = None

    def array(self, number: int, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a placeholder for a contiguous array of the caller, with this number."""
        return array_at_address((number + 1) * _SPACE, shape, dtype)

    def launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Record the call of a kernel."""
        words: list[int] = []
        kinds = _unpack(arguments, words, self._known)
        # Each replay reads the tables among them.
        self._read.append(arguments)
        self._open_strand().append((_entry(kernel, kinds, arguments, self._effort), words))

    def _open_strand(self) -> list[tuple[int, list[int]]]:
        if self._strand is None:
            self._strand = []
            self._phases.append([self._strand])
        return self._strand

    def together(self, tasks: Sequence[Task]) -> None:
        """Record the calls of functions, as strands of a phase."""
        phase: list[list[tuple[int, list[int]]]] = []
        with self._space.borrowed():
            for task in tasks:
                self._strand = []
                task()
                phase.append(self._strand)
        self._phases.append([strand for strand in phase if strand])
        self._strand = None

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        """Return a placeholder for zeros, and record that they are written."""
        array = self.room(count, dtype)
        self.launch(fill_with, array, 0)
        return array

    def room(self, count: int, dtype: DTypeLike) -> Array:
        """Return a placeholder for memory."""
        return self._space.take(count, dtype)

    def result(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a placeholder for an array that the caller gets."""
        self.results.append(Result(name, shape, np.dtype(dtype)))
        return self.array(self._first + len(self.results) - 1, shape, dtype)

    def borrow(self, count: int, dtype: DTypeLike) -> Array:
        """Return a placeholder for memory that no other strand of the phase uses."""
        return self.room(count, dtype)

    def give_back(self, room: Array) -> None:
        """Do nothing: the phase gives everything back at its end."""

    def recording(self) -> Recording:
        """Return the recording."""
        return Recording([phase for phase in self._phases if phase], self._read, self.results)


# -- Calls by words --------------------------------------------------------------------------------


def _renumbered(word: int, numbers: Sequence[int]) -> int:
    """Return a word; an address in an array is changed to the array's new number."""
    if word < _SPACE:
        return word
    return (numbers[word // _SPACE - 1] + 1) * _SPACE + word % _SPACE


# The flags of an array that its type depends on: C and Fortran order, aligned, writeable.
_C = 0x1
_FLAGS = _C | 0x2 | 0x100 | 0x400


def _unpack(
    values: tuple[Any, ...], words: list[int], known: dict[int, tuple[Any, Any, list[int]]]
) -> tuple[Any, ...]:
    """Add the words of arguments, as Numba passes them: tuples and arrays as their parts.

    Return a key that is different for arguments of different Numba types; the types themselves take
    far longer to find. `known` caches the keys of tuples, by their addresses.
    """
    kinds: list[Any] = [type(values)]
    for value in values:
        kind: Any = type(value)
        if kind is int or kind is bool:
            words.append(int(value))
        elif isinstance(value, np.ndarray):
            flags = value.flags.num & _FLAGS
            address = address_of(value) if flags & _C else kernel_address(value, value.ndim)
            words += (0, 0, value.size, value.itemsize, address, *value.shape, *value.strides)
            kind = value.dtype, value.ndim, flags
        elif isinstance(value, tuple):
            if id(value) not in known:
                own: list[int] = []
                known[id(value)] = value, _unpack(value, own, known), own
            _, kind, own = known[id(value)]
            words += own
        elif isinstance(value, (np.integer, np.bool_)):
            words.append(int(value))
        else:
            raise TypeError(f"a kernel takes {kind}; expected integers, flags, arrays and tuples")
        kinds.append(kind)
    return tuple(kinds)


# The entries of kernels by the kinds of their arguments, and the code that they call.
_entries: dict[tuple[Any, Any, int], int] = {}
_read_by_entries: list[Any] = []


def _entry(kernel: Any, kinds: Any, arguments: tuple[Any, ...], effort: int) -> int:
    """Return the address of a function that calls a kernel with arguments from words."""
    key = kernel, kinds, effort
    found = _entries.get(key)
    if found is None:
        own = tuple(map(numba.typeof, arguments))
        with global_compiler_lock:
            if own not in kernel.overloads:
                kernel.compile(own)
            found = _entries[key] = _compile_entry(kernel.overloads[own], effort)
    return found


def _compile_entry(compiled: Any, effort: int) -> int:
    """Return the address of the function, compiled fast: it only loads words and calls."""
    context, about = compiled.target_context, compiled.fndesc
    word = ir.IntType(64)
    lines = [f"%words = inttoptr i64 %0 to {word.as_pointer()}"]
    arguments = []
    for k, kind in enumerate(context.get_arg_packer(about.argtypes).argument_types):
        lines += [
            f"%at{k} = getelementptr i64, {word.as_pointer()} %words, i64 {k}",
            f"%word{k} = load i64, {word.as_pointer()} %at{k}",
        ]
        if kind == word:
            arguments.append(f"i64 %word{k}")
            continue
        how = "inttoptr" if isinstance(kind, ir.PointerType) else "trunc"
        lines.append(f"%argument{k} = {how} i64 %word{k} to {kind}")
        arguments.append(f"{kind} %argument{k}")
    kind = context.call_conv.get_function_type(about.restype, about.argtypes)
    lines += [f"%result{k} = alloca {each.pointee}" for k, each in enumerate(kind.args[:2])]
    results = [f"{each} %result{k}" for k, each in enumerate(kind.args[:2])]
    address = compiled.library.get_pointer_to_function(about.llvm_func_name)
    lines += [
        f"%function = inttoptr i64 {address} to {kind.as_pointer()}",
        f"%status = call {kind.return_type} %function({', '.join(results + arguments)})",
        f"%end = sext {kind.return_type} %status to i64",
        "ret i64 %end",
    ]
    name, body = f"entry{len(_entries)}", "\n".join(lines)
    engine = _engine(effort)
    engine.add_module(binding.parse_assembly(f"define i64 @{name}(i64 %0) {{\n{body}\n}}"))
    engine.finalize_object()
    _read_by_entries.append(compiled)
    return int(engine.get_function_address(name))


@functools.cache
def _engine(effort: int) -> Any:
    """Return the engine that compiles entries, with a level of optimisation."""
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(opt=effort, jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
