"""A multiprocessor: memory that is checked, and threads that run from barrier to barrier.

All is compiled by Numba, and called by the kernels that :mod:`translate` makes. They share one
table of int64, the *machine*: its slots are named here.

A cell of the *shadow memory* stands for four bytes. It says which thread wrote them last, and which
read them, in which block and epoch. A block's epoch ends at a barrier of all its threads, a warp's
at one of that warp, too. Two threads of a block *conflict* if both touch four bytes in one epoch,
and one of them changes what is there; to write what is there already is to read nothing and to
change nothing, as several threads may that raise a flag. Threads of two blocks conflict unless the
first is known to be done: it has waited for its block, executed a fence and then an atomic
operation, upon which the other made an atomic operation there and executed a fence, and so did not
begin before. Atomic operations do not conflict with each other.

A cell keeps one writer and one reader, or that there were several of one block. So a race with
another reader than the last may be missed in one order of the threads, which is why it is random.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cfunc, int64, njit, types
from numba.extending import intrinsic


class _Slot(NamedTuple):
    """Slots of the machine."""

    # Addresses of the helpers, in the order of `HELPERS`.
    LOAD: int = 0
    STORE: int = 1
    ATOMIC: int = 2
    FENCE: int = 3
    # Stopped by: kind, line or site, thread, address, what else is there.
    FAULT: int = 4
    SITE: int = 5
    ADDRESS: int = 6
    OTHER: int = 7
    # Who runs.
    THREAD: int = 8
    BLOCK: int = 9
    THREADS: int = 10
    BLOCKS: int = 11
    # Addresses of the parameters, of counts for each piece of the program.
    PARAMETERS: int = 12
    COUNTS: int = 13
    # How often a thread may still jump back, in all.
    PATIENCE: int = 14
    # A thread's vote, and the result; the old value of an atomic operation.
    VOTE: int = 15
    RESULT: int = 16
    # Shared memory: address, bytes, address of its cells.
    SHARED: int = 17
    SHARED_SIZE: int = 18
    SHARED_CELLS: int = 19
    # Allocations: how many, where their first bytes, ends, and first cells are listed.
    ALLOCATIONS: int = 20
    STARTS: int = 21
    STOPS: int = 22
    CELLS: int = 23
    # Whether races are looked for; the epoch of the block; address of those of its warps.
    RACES: int = 24
    EPOCH: int = 25
    WARP_EPOCHS: int = 26
    # By thread: epoch of its last fence, whether it wrote since. By block: whether anything that is
    # not fenced was written before this epoch, and up to which epoch all is.
    FENCED: int = 27
    WROTE: int = 28
    DIRTY: int = 29
    CLEAN: int = 30
    # Releases, (block, epoch, thread, next), by address; how many there are, and how many fit.
    RELEASES: int = 31
    RELEASED: int = 32
    RELEASE_ROOM: int = 33
    HEADS: int = 34
    # By block: what this one has acquired: (turn, epoch, thread, by, since).
    ACQUIRED: int = 35
    TURN: int = 36
    # Blocks whose releases are acquired but for a fence: how many, and a list of them.
    PENDING_COUNT: int = 37
    PENDING: int = 38
    # Which allocation each site used last.
    LATEST: int = 39
    # A trace, (step, thread, site, address) of accesses: address, how many, how many fit; how often
    # all threads have run to a barrier.
    TRACE: int = 40
    TRACED: int = 41
    TRACE_ROOM: int = 42
    STEP: int = 43
    # The state of the random numbers, not 0.
    RANDOM: int = 44
    # Memory that each thread has: address of that of the first, bytes of each.
    LOCAL: int = 45
    LOCAL_SIZE: int = 46
    # The mutation that is made, or 0; address of how often each makes a difference where it stands.
    MUTANT: int = 47
    DIFFERENT: int = 48
    WIDTH: int = 49


Slot = _Slot()


class _Space(NamedTuple):
    GLOBAL: int = 0
    SHARED: int = 1
    GENERIC: int = 2
    LOCAL: int = 3


Space = _Space()


class _Fault(NamedTuple):
    """Why a launch stops."""

    NONE: int = 0
    MISALIGNED: int = 1
    OUTSIDE: int = 2
    RACE: int = 3
    RACE_OF_BLOCKS: int = 4
    OVERFLOW: int = 5
    DIVERGENT: int = 6
    LEFT: int = 7
    ENDLESS: int = 8
    DIVISION: int = 9
    ROOM: int = 10


Fault = _Fault()
FAULTS = {
    Fault.MISALIGNED: "a misaligned address",
    Fault.OUTSIDE: "an address outside of what the launch was given",
    Fault.RACE: "a race between threads of a block",
    Fault.RACE_OF_BLOCKS: "a race between blocks",
    Fault.OVERFLOW: "an address from arithmetic that overflowed",
    Fault.DIVERGENT: "threads that wait at different barriers",
    Fault.LEFT: "threads that wait for those that have left",
    Fault.ENDLESS: "a loop that does not end",
    Fault.DIVISION: "a division by zero, or one that overflows",
    Fault.ROOM: "more than the runner has room for",
}


class _Wait(NamedTuple):
    """How a thread stops: columns of the table of barriers."""

    # 0 for a barrier of the block, 1 of the warp.
    WARP: int = 0
    # 0 without a vote, 1 for any, 2 for all; EXCHANGE and a distance for values that are exchanged.
    VOTE: int = 1
    LINE: int = 2
    WIDTH: int = 3


Wait = _Wait()

# Where shared memory begins among generic addresses, and that of a thread.
WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61
# The first vote that is an exchange of values, by the bit in which numbers of threads differ.
EXCHANGE = 4
# Bytes between shared arrays, which no address may lie in.
GUARD = 16

# A cell: who wrote, (block + 1) << 20 | thread; when, epoch << 24 | epoch of the warp << 4 | how;
# and who read, when, and whether others of the warp or of the block did.
CELL = 4
_CHANGED, _ATOMIC, _OUTSIDE = 1, 2, 8
_WARPS, _SEVERAL = 2, 4
_HOW = 15
HEADS = 1 << 12
# Blocks that one block may be ready to acquire, for each that there is.
PENDING_ROOM = 8


@intrinsic
def _at(typingctx: Any, address: Any) -> Any:
    """Return int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(int64)(int64), codegen


@intrinsic
def _at_int(typingctx: Any, address: Any) -> Any:
    """Return int32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(int64), codegen


@intrinsic
def _call(typingctx: Any, function: Any, frame: Any, machine: Any) -> Any:
    """Run a thread until it waits or ends."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return int64(int64, int64, int64), codegen


@njit
def _stop(m: Any, fault: int, site: int, address: int, other: int) -> int:
    if m[Slot.FAULT] == 0:
        m[Slot.FAULT], m[Slot.SITE] = fault, site
        m[Slot.ADDRESS], m[Slot.OTHER] = address, other
    return 0


@njit
def _find(m: Any, site: int, address: int, width: int) -> int:
    """Return the allocation that an access lies in, or -1."""
    latest = _at(m[Slot.LATEST])
    starts, stops = _at(m[Slot.STARTS]), _at(m[Slot.STOPS])
    k = latest[site]
    if k >= 0 and starts[k] <= address and address + width <= stops[k]:
        return k
    low, high = 0, m[Slot.ALLOCATIONS]
    while low < high:
        middle = (low + high) // 2
        if starts[middle] <= address:
            low = middle + 1
        else:
            high = middle
    k = low - 1
    if k < 0 or address + width > stops[k]:
        return -1
    latest[site] = k
    return k


@njit
def _in_block(m: Any, who: int, when: int) -> bool:
    """Return whether another thread of the block did this, and no barrier came after it."""
    thread, me = who & 0xFFFFF, m[Slot.THREAD]
    if thread == me or when >> 24 != m[Slot.EPOCH]:
        return False
    if thread // 32 != me // 32:
        return True
    return (when >> 4) & 0xFFFFF == _at(m[Slot.WARP_EPOCHS])[me // 32]


@njit
def _of_block(m: Any, who: int, when: int) -> bool:
    """Return whether another block did this, and is not known to have done it before."""
    block, thread = (who >> 20) - 1, who & 0xFFFFF
    acquired = _at(m[Slot.ACQUIRED] + block * 40)
    if acquired[0] != m[Slot.TURN]:
        return True
    since, by = acquired[4], acquired[3]
    if not (since < m[Slot.EPOCH] or (since == m[Slot.EPOCH] and by == m[Slot.THREAD])):
        return True
    epoch = when >> 24
    return not (epoch < acquired[1] or (epoch == acquired[1] and thread == acquired[2]))


@njit
def _conflict(m: Any, site: int, address: int, who: int, when: int) -> bool:
    """Return whether something done to a cell is not ordered with what is done now."""
    if who == 0:
        return False
    if who >> 20 == m[Slot.BLOCK] + 1:
        if _in_block(m, who, when):
            _stop(m, Fault.RACE, site, address, who)
            return True
    elif _of_block(m, who, when):
        _stop(m, Fault.RACE_OF_BLOCKS, site, address, who)
        return True
    return False


@njit
def _touch(m: Any, site: int, address: int, cell: int, kind: int) -> int:
    """Look for a race: a read (0), a write that changes (1) or does not (3), an atomic one (2)."""
    c = _at(cell)
    me = (m[Slot.BLOCK] + 1) << 20 | m[Slot.THREAD]
    now = m[Slot.EPOCH] << 24 | _at(m[Slot.WARP_EPOCHS])[m[Slot.THREAD] // 32] << 4
    how = c[1] & _HOW
    if kind == 0:
        if how & (_CHANGED | _ATOMIC) and _conflict(m, site, address, c[0], c[1]):
            return 0
        others = 0
        if c[2] >> 20 == m[Slot.BLOCK] + 1 and c[3] >> 24 == m[Slot.EPOCH]:
            others = c[3] & _WARPS
            if (c[2] & 0xFFFFF) // 32 != m[Slot.THREAD] // 32:
                others = _WARPS
            elif c[3] >> 4 == now >> 4:
                others |= c[3] & _SEVERAL
                others |= _SEVERAL if c[2] != me else 0
        c[2], c[3] = me, now | others
        return 1
    if kind == 3:
        if c[0] == 0 or not (how & _CHANGED and c[0] >> 20 == m[Slot.BLOCK] + 1):
            c[0], c[1] = me, now
        return 1
    if not (kind == 2 and how & _ATOMIC) and _conflict(m, site, address, c[0], c[1]):
        return 0
    if c[2] >> 20 == m[Slot.BLOCK] + 1 and (
        (c[3] & _WARPS and c[3] >> 24 == m[Slot.EPOCH])
        or (c[3] & _SEVERAL and c[3] >> 4 == now >> 4)
    ):
        return _stop(m, Fault.RACE, site, address, c[2])
    if _conflict(m, site, address, c[2], c[3]):
        return 0
    c[0], c[1] = me, now | (_CHANGED if kind == 1 else _ATOMIC)
    return 1


@njit
def _place(m: Any, site: int, space: int, address: int, width: int) -> tuple[int, int]:
    """Return where an access goes in host memory, 0 if nowhere; and its first cell, 0 if none."""
    if space == Space.GENERIC and address >= LOCAL_WINDOW:
        space, address = Space.LOCAL, address - LOCAL_WINDOW
    elif space == Space.GENERIC and address >= WINDOW:
        space, address = Space.SHARED, address - WINDOW
    if address & (width - 1):
        return _stop(m, Fault.MISALIGNED, site, address, 0), 0
    if space == Space.SHARED:
        if address < 0 or address + width > m[Slot.SHARED_SIZE]:
            return _stop(m, Fault.OUTSIDE, site, address, 0), 0
        place, cell = m[Slot.SHARED] + address, m[Slot.SHARED_CELLS] + (address >> 2) * 8 * CELL
        if _at(cell)[3] & _OUTSIDE:
            return _stop(m, Fault.OUTSIDE, site, address, 0), 0
    elif space == Space.LOCAL:
        if address < 0 or address + width > m[Slot.LOCAL_SIZE]:
            return _stop(m, Fault.OUTSIDE, site, address, 0), 0
        # Nobody else has it.
        return m[Slot.LOCAL] + m[Slot.THREAD] * m[Slot.LOCAL_SIZE] + address, 0
    else:
        k = _find(m, site, address, width)
        if k < 0:
            return _stop(m, Fault.OUTSIDE, site, address, 0), 0
        cell = 0
        if m[Slot.RACES]:
            first = _at(m[Slot.STARTS])[k] & ~3
            cell = _at(m[Slot.CELLS])[k] + ((address - first) >> 2) * 8 * CELL
        place = address
    if m[Slot.TRACE]:
        count = m[Slot.TRACED]
        if count == m[Slot.TRACE_ROOM]:
            return _stop(m, Fault.ROOM, site, address, 0), 0
        entry = _at(m[Slot.TRACE] + count * 32)
        entry[0], entry[1], entry[2], entry[3] = m[Slot.STEP], m[Slot.THREAD], site, address
        m[Slot.TRACED] = count + 1
    return place, cell


@njit
def _load(m: Any, site: int, space: int, address: int, width: int) -> int:
    place, cell = _place(m, site, space, address, width)
    if place and cell and m[Slot.RACES]:
        # Two bytes are a part of one cell.
        for k in range((width + 3) >> 2):
            if not _touch(m, site, address, cell + k * 8 * CELL, 0):
                return 0
    return place


@njit
def _store(m: Any, site: int, space: int, address: int, width: int, low: int, high: int) -> int:
    place, cell = _place(m, site, space, address, width)
    if place == 0:
        return 0
    target = _at_int(place)
    for k in range(width >> 2):
        word = low if k < 2 else high
        half = np.int32((word >> (32 * (k & 1))) & 0xFFFFFFFF)
        if cell and m[Slot.RACES]:
            kind = 3 if target[k] == half else 1
            if not _touch(m, site, address, cell + k * 8 * CELL, kind):
                return 0
        target[k] = half
    if place == address:
        _at(m[Slot.WROTE])[m[Slot.THREAD]] = 1
    return 1


@njit
def _combined(operation: int, old: int, value: int, compare: int) -> int:
    """Return what an atomic operation leaves, by its number in `translate.ATOMICS`."""
    if operation == 0:
        return old + value
    if operation == 1:
        return max(old, value)
    if operation == 2:
        return min(old, value)
    if operation == 3:
        return value
    if operation == 4:
        return value if old == compare else old
    if operation == 5:
        return old & value
    if operation == 6:
        return old | value
    return old ^ value


@njit
def _atomic(
    m: Any,
    site: int,
    space: int,
    address: int,
    width: int,
    operation: int,
    value: int,
    compare: int,
) -> int:
    """Change an integer, given and returned as the bits of an int64 of its sign."""
    place, cell = _place(m, site, space, address, width)
    if place == 0:
        return 0
    if cell and m[Slot.RACES]:
        for k in range(width >> 2):
            if not _touch(m, site, address, cell + k * 8 * CELL, 2):
                return 0
    if width == 4:
        old = int64(_at_int(place)[0])
        m[Slot.RESULT] = old
        _at_int(place)[0] = np.int32(_combined(operation, old, value, compare) & 0xFFFFFFFF)
    else:
        old = _at(place)[0]
        m[Slot.RESULT] = old
        _at(place)[0] = _combined(operation, old, value, compare)
    if place == address and m[Slot.RACES]:
        if not _synchronise(m, site, address):
            return 0
        _at(m[Slot.WROTE])[m[Slot.THREAD]] = 1
    return 1


@njit
def _synchronise(m: Any, site: int, address: int) -> int:
    """Acquire, but for a fence, what others released at an address; and release what is fenced."""
    heads = _at(m[Slot.HEADS])
    bucket = (address >> 2) % HEADS
    k, mine, me = heads[bucket], int64(0), m[Slot.THREAD]
    while k:
        entry = _at(m[Slot.RELEASES] + (k - 1) * 40)
        if entry[4] == address:
            if entry[0] == m[Slot.BLOCK]:
                mine = k
            else:
                acquired = _at(m[Slot.ACQUIRED] + entry[0] * 40)
                if acquired[0] != m[Slot.TURN] or acquired[1] < entry[1]:
                    acquired[0], acquired[1], acquired[2] = m[Slot.TURN], entry[1], entry[2]
                    acquired[3], acquired[4] = me, 1 << 60
                    if m[Slot.PENDING_COUNT] == PENDING_ROOM * m[Slot.BLOCKS]:
                        return _stop(m, Fault.ROOM, site, address, 0)
                    _at(m[Slot.PENDING])[m[Slot.PENDING_COUNT]] = entry[0]
                    m[Slot.PENDING_COUNT] += 1
        k = entry[3]
    fenced = _at(m[Slot.FENCED])[me]
    if fenced < 0:
        return 1
    clean = m[Slot.EPOCH]
    if m[Slot.DIRTY] and fenced != m[Slot.EPOCH]:
        clean = m[Slot.CLEAN]
    if mine == 0:
        if m[Slot.RELEASED] == m[Slot.RELEASE_ROOM]:
            return _stop(m, Fault.ROOM, site, address, 0)
        m[Slot.RELEASED] += 1
        mine = m[Slot.RELEASED]
        entry = _at(m[Slot.RELEASES] + (mine - 1) * 40)
        entry[0], entry[3], entry[4] = m[Slot.BLOCK], heads[bucket], address
        heads[bucket] = mine
    entry = _at(m[Slot.RELEASES] + (mine - 1) * 40)
    entry[1], entry[2] = clean, -1
    if clean == m[Slot.EPOCH] and _at(m[Slot.WROTE])[me] == 0:
        entry[2] = me
    return 1


@njit
def _fence(m: Any) -> None:
    me = m[Slot.THREAD]
    _at(m[Slot.FENCED])[me] = m[Slot.EPOCH]
    _at(m[Slot.WROTE])[me] = 0
    pending, left = _at(m[Slot.PENDING]), 0
    for k in range(m[Slot.PENDING_COUNT]):
        acquired = _at(m[Slot.ACQUIRED] + pending[k] * 40)
        if acquired[3] == me:
            acquired[4] = m[Slot.EPOCH]
        else:
            pending[left] = pending[k]
            left += 1
    m[Slot.PENDING_COUNT] = left


_pointer, _word = types.CPointer(int64), int64


@cfunc(_word(_pointer, *[_word] * 4), cache=True)
def _load_function(m, site, space, address, width):  # type: ignore[no-untyped-def]
    return _load(m, site, space, address, width)


@cfunc(_word(_pointer, *[_word] * 6), cache=True)
def _store_function(m, site, space, address, width, low, high):  # type: ignore[no-untyped-def]
    return _store(m, site, space, address, width, low, high)


@cfunc(_word(_pointer, *[_word] * 7), cache=True)
def _atomic_function(m, site, space, address, width, operation, value, compare):  # type: ignore[no-untyped-def]
    return _atomic(m, site, space, address, width, operation, value, compare)


@cfunc(_word(_pointer), cache=True)
def _fence_function(m):  # type: ignore[no-untyped-def]
    _fence(m)
    return 1


# In the order of their slots.
HELPERS = _load_function, _store_function, _atomic_function, _fence_function


# ---------------------------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------------------------

# The state of a thread; more is the number of the barrier that it waits at, plus 1.
_READY, _LEFT = -1, 0


@njit(cache=True)
def _random(m: Any) -> int:
    """Return 64 random bits (Marsaglia, 2003, xorshift)."""
    x = m[Slot.RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    m[Slot.RANDOM] = x
    return x


@njit(cache=True)
def _shuffle(m: Any, order: Any) -> None:
    for k in range(len(order) - 1, 0, -1):
        j = (_random(m) & 0xFFFFFFFF) % (k + 1)
        order[k], order[j] = order[j], order[k]


@njit(cache=True)
def _released(m: Any, states: Any, votes: Any, waits: Any, first: int, last: int, warp: int) -> int:
    """Let threads go on that all wait at one barrier of this kind.

    Return 1, or 2 if they voted; 0 if none waits at such a barrier, and -1 if not all do.
    """
    here = 0
    for t in range(first, last):
        if states[t] > 0 and waits[states[t] - 1, Wait.WARP] == warp:
            here = states[t]
    if here == 0:
        return 0
    for t in range(first, last):
        if states[t] == _LEFT:
            _stop(m, Fault.LEFT, here - 1, 0, t)
            return -1
        if states[t] != here:
            m[Slot.THREAD] = t
            _stop(m, Fault.DIVERGENT, here - 1, 0, t)
            return -1
    kind = waits[here - 1, Wait.VOTE]
    if kind >= EXCHANGE:
        given = votes[first:last].copy()
        for t in range(first, last):
            other = t - first ^ kind - EXCHANGE
            if other >= last - first:
                _stop(m, Fault.LEFT, here - 1, 0, t)
                return -1
            votes[t] = given[other]
    elif kind:
        result = kind == 2
        for t in range(first, last):
            result = result or votes[t] != 0 if kind == 1 else result and votes[t] != 0
        for t in range(first, last):
            votes[t] = result
    for t in range(first, last):
        states[t] = _READY
    return 2 if kind else 1


@njit(cache=True)
def _next_epoch(m: Any, threads: int) -> None:
    """Go on behind a barrier of the block."""
    epoch = m[Slot.EPOCH]
    wrote, fenced = _at(m[Slot.WROTE]), _at(m[Slot.FENCED])
    unfenced, anyone = False, m[Slot.DIRTY] == 0
    for t in range(threads):
        unfenced |= wrote[t] != 0
        anyone |= fenced[t] == epoch
        wrote[t] = 0
    if anyone:
        m[Slot.CLEAN] = epoch if unfenced else epoch + 1
    m[Slot.DIRTY] = unfenced or not anyone
    m[Slot.EPOCH] = epoch + 1


@njit(cache=True)
def _run_block(
    m: Any,
    function: int,
    frames: Any,
    waits: Any,
    shared: Any,
    local: Any,
    cells: Any,
    gaps: Any,
    garbage: int,
) -> None:
    threads = m[Slot.THREADS]
    for k in range(len(shared)):
        shared[k] = _random(m)
    for k in range(len(local)):
        local[k] = _random(m)
    if m[Slot.RACES]:
        cells[:] = 0
    for k in range(len(gaps)):
        cells[gaps[k], 3] = _OUTSIDE
    for t in range(threads):
        for k in range(1, 1 + garbage):
            frames[t, k] = _random(m)
        frames[t, 0] = 0
    states, votes = np.full(threads, _READY), np.zeros(threads, np.int64)
    order = np.arange(threads)
    warp_epochs = np.zeros((threads + 31) // 32, np.int64)
    m[Slot.WARP_EPOCHS] = warp_epochs.ctypes.data
    wrote, fenced = np.zeros(threads, np.int64), np.full(threads, -1)
    m[Slot.WROTE], m[Slot.FENCED] = wrote.ctypes.data, fenced.ctypes.data
    m[Slot.EPOCH] = m[Slot.DIRTY] = m[Slot.CLEAN] = m[Slot.PENDING_COUNT] = 0
    while True:
        _shuffle(m, order)
        m[Slot.STEP] += 1
        for n in range(threads):
            t = order[n]
            if states[t] == _READY:
                m[Slot.THREAD], m[Slot.VOTE] = t, votes[t]
                states[t] = _call(function, frames[t].ctypes.data, m.ctypes.data)
                votes[t] = m[Slot.VOTE]
                if m[Slot.FAULT]:
                    return
        released = 0
        for warp in range(len(warp_epochs)):
            last = min(warp * 32 + 32, threads)
            went = _released(m, states, votes, waits, warp * 32, last, 1)
            if went < 0:
                return
            released += went
            # A vote waits for the warp, but orders no memory.
            warp_epochs[warp] += went == 1
        if released == 0:
            went = _released(m, states, votes, waits, 0, threads, 0)
            if went <= 0:
                return
            _next_epoch(m, threads)
            warp_epochs[:] = 0


@njit(cache=True)
def run_blocks(
    m: Any,
    function: int,
    blocks: Any,
    frames: Any,
    waits: Any,
    shared: Any,
    local: Any,
    cells: Any,
    gaps: Any,
    garbage: int,
) -> None:
    """Run blocks one after the other, until one stops."""
    for n in range(len(blocks)):
        m[Slot.BLOCK], m[Slot.TURN] = blocks[n], n + 1
        _run_block(m, function, frames, waits, shared, local, cells, gaps, garbage)
        if m[Slot.FAULT]:
            return
