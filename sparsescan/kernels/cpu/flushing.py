"""Subnormal numbers count as 0 while kernels run, since processors are slow with them.

A vector of subnormal numbers takes an Intel core over a hundred cycles. Results that are subnormal
become zeros of their sign, and so do inputs. That is a mode of each thread: x86 has it in MXCSR, as
the flags FTZ and DAZ (Intel's manual, volume 1, 10.2.3), and AArch64 in FPCR, as the flag FZ (Arm's
manual, C5.2.8). On other processors nothing changes.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compile import njit

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_FLAGS = 0x8040 if _IS_X86 else 1 << 24 if _IS_ARM else 0

_WORD, _HALF, _NONE = ir.IntType(64), ir.IntType(32), ir.VoidType()


def _mxcsr(builder, name):
    """Return the function of LLVM that loads or stores MXCSR, and memory for it."""
    kind = ir.FunctionType(_NONE, [ir.IntType(8).as_pointer()])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}")
    return function, cgutils.alloca_once(builder, _HALF)


@intrinsic
def _read(typingctx):
    """Return the mode of this thread."""

    def codegen(context, builder, signature, args):
        if _IS_X86:
            function, place = _mxcsr(builder, "stmxcsr")
            builder.call(function, [builder.bitcast(place, ir.IntType(8).as_pointer())])
            return builder.zext(builder.load(place), _WORD)
        if _IS_ARM:
            kind = ir.FunctionType(_WORD, [])
            name = "llvm.aarch64.get.fpcr"
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return ir.Constant(_WORD, 0)

    return types.int64(), codegen


@intrinsic
def _write(typingctx, mode):
    """Set the mode of this thread."""

    def codegen(context, builder, signature, args):
        if _IS_X86:
            function, place = _mxcsr(builder, "ldmxcsr")
            builder.store(builder.trunc(args[0], _HALF), place)
            builder.call(function, [builder.bitcast(place, ir.IntType(8).as_pointer())])
        elif _IS_ARM:
            kind, name = ir.FunctionType(_NONE, [_WORD]), "llvm.aarch64.set.fpcr"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [args[0]])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


# The calls are separate functions, so that no arithmetic moves across them.
@njit(nogil=True, cache=True)
def mode():
    """Return the mode of this thread, to set it again."""
    return _read()


@njit(nogil=True, cache=True)
def set_mode(mode):
    """Set the mode of this thread to what :func:`mode` has returned."""
    _write(mode)


@njit(nogil=True, cache=True)
def flush():
    """Let subnormal numbers count as 0 on this thread."""
    _write(_read() | _FLAGS)
