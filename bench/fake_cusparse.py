"""cuSPARSE's SpGEMMreuse on the host, for tests: the prototypes are NVIDIA's, transcribed anew."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

_OUT, _SIZE, _LONG, _SCALAR = (POINTER(t) for t in (c_void_p, c_size_t, c_int64, c_float))
_COMMON = c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p
_NEEDED = 64  # bytes of every buffer


class FakeCusparse:
    """A library whose functions insist on their prototypes; status 7 if one fails.

    Attributes
    ----------
    alive : dict
        Objects that have been created and not destroyed.
    """

    def __init__(self) -> None:
        self.alive: dict[int, dict[str, Any]] = {}
        self._created = 1 << 40  # no int32
        compute = (*_COMMON[:3], _SCALAR, *_COMMON[3:5], _SCALAR, c_void_p, c_int, c_int, c_void_p)
        for name, function, arguments in [
            ("Create", self._create, [_OUT]),
            ("SpGEMM_createDescr", self._create, [_OUT]),
            ("CreateCsr", self._create, [_OUT, *[c_int64] * 3, *[c_void_p] * 3, *[c_int] * 4]),
            ("Destroy", self._destroy, [c_void_p]),
            ("SpGEMM_destroyDescr", self._destroy, [c_void_p]),
            ("DestroySpMat", self._destroy, [c_void_p]),
            ("SetStream", lambda handle, stream: self.alive[handle], [c_void_p] * 2),
            ("CsrSetPointers", self._set_pointers, [c_void_p] * 4),
            ("SpMatGetSize", self._get_size, [c_void_p, *[_LONG] * 3]),
            ("SpGEMMreuse_workEstimation", self._estimate, [*_COMMON, _SIZE, c_void_p]),
            ("SpGEMMreuse_nnz", self._count, [*_COMMON, *[_SIZE, c_void_p] * 3]),
            ("SpGEMMreuse_copy", self._copy, [*_COMMON, _SIZE, c_void_p]),
            ("SpGEMMreuse_compute", self._compute, compute),
        ]:
            prototype = ctypes.CFUNCTYPE(c_int, *arguments)
            setattr(self, f"cusparse{name}", prototype(_with_status(function)))

    def _create(self, out: Any, *csr: Any) -> None:
        self._created += 1
        out[0], self.alive[self._created] = self._created, {}
        if csr:
            assert csr[6:] == (2, 2, 0, 0)  # int32, int32, zero-based, float32
            self.alive[self._created] = {"shape": csr[:2], "nnz": csr[2], "at": csr[3:6]}

    def _destroy(self, handle: int) -> None:
        del self.alive[handle]

    def _set_pointers(self, matrix: int, *at: int) -> None:
        self.alive[matrix]["at"] = at

    def _get_size(self, matrix: int, rows: Any, cols: Any, nnz: Any) -> None:
        rows[0], cols[0] = self.alive[matrix]["shape"]
        nnz[0] = self.alive[matrix]["nnz"]

    def _estimate(self, *arguments: Any) -> None:
        *_, plan = self._common(*arguments[:8])
        plan["estimated"] = _filled(arguments[8:])

    def _count(self, *arguments: Any) -> None:
        a, b, c, plan = self._common(*arguments[:8])
        assert plan["estimated"]
        plan["counted"] = _filled(arguments[8:])
        c["nnz"] = _product(a, b).nnz

    def _copy(self, *arguments: Any) -> None:
        a, b, c, plan = self._common(*arguments[:8])
        assert plan["counted"]
        plan["copied"] = _filled(arguments[8:])
        if plan["copied"]:
            product, (indptr, indices, _) = _product(a, b), _arrays(c)
            indptr[:], indices[:] = product.indptr, product.indices

    def _compute(self, *arguments: Any) -> None:
        handle, op_a, op_b, one, a, b, zero, c, kind, algorithm, plan = arguments
        assert (one[0], zero[0], kind) == (1, 0, 0)
        a, b, c, known = self._common(handle, op_a, op_b, a, b, c, algorithm, plan)
        assert known["copied"]
        _arrays(c)[2][:] = _product(a, b).data

    def _common(self, handle: int, op_a: int, op_b: int, *rest: int) -> list[dict[str, Any]]:
        *matrices, algorithm, plan = rest
        assert handle in self.alive
        assert (op_a, op_b, algorithm) == (0, 0, 0)
        return [self.alive[each] for each in (*matrices, plan)]


def _with_status(function: Callable[..., Any]) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        try:
            function(*arguments)
        except Exception as error:
            print(f"{function}: {error!r}", file=sys.stderr)
            return 7
        return 0

    return call


def _filled(buffers: tuple[Any, ...]) -> bool:
    """Say how large the buffers must be; or, if they are there, write all over them."""
    for size, at in zip(buffers[::2], buffers[1::2], strict=True):
        if at:
            assert size[0] == _NEEDED
            ctypes.memset(at, 255, _NEEDED)
        size[0] = _NEEDED
    return all(buffers[1::2])


def _arrays(csr: dict[str, Any]) -> list[NDArray[Any]]:
    """Row pointers, indices and values, at the addresses that were given."""
    lengths = csr["shape"][0] + 1, csr["nnz"], csr["nnz"]
    return [
        np.frombuffer((kind * length).from_address(at), np.dtype(kind))
        for kind, length, at in zip((c_int, c_int, c_float), lengths, csr["at"], strict=True)
    ]


def _product(a: dict[str, Any], b: dict[str, Any]) -> sp.csr_array:
    factors = [
        sp.csr_array((data, indices, indptr), shape=csr["shape"])
        for csr in (a, b)
        for indptr, indices, data in [_arrays(csr)]
    ]
    product = factors[0] @ factors[1]
    product.sort_indices()
    return product
