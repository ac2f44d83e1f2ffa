"""cuSPARSE's SpGEMMreuse by its C interface, as CuPy has no binding: a product's numeric stage.

The structure of the product is found once; after that ``cusparseSpGEMMreuse_compute`` makes its
values alone. That is what a plan's level does, so this is its nearest peer.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_void_p
from ctypes.util import find_library
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from .peers import MissingPeerError

# Values of the enumerations in cusparse.h and library_types.h.
_NO_TRANSPOSE = _BASE_ZERO = _DEFAULT = _REAL_32 = 0
_INDEX_32 = 2

_OUT, _SIZE, _LONG, _SCALAR = (POINTER(kind) for kind in (c_void_p, c_size_t, c_int64, c_float))
_PRODUCT = [c_void_p, c_int, c_int]  # handle and operations
_PLAN = [c_int, c_void_p]  # algorithm and description
_STAGE = [*_PRODUCT, *[c_void_p] * 3, *_PLAN]
_BUFFER = [_SIZE, c_void_p]
_COMPUTE = [*_PRODUCT, _SCALAR, *[c_void_p] * 2, _SCALAR, c_void_p, c_int, *_PLAN]
_PROTOTYPES: dict[str, list[Any]] = {
    "cusparseCreate": [_OUT],
    "cusparseDestroy": [c_void_p],
    "cusparseSetStream": [c_void_p, c_void_p],
    "cusparseCreateCsr": [_OUT, *[c_int64] * 3, *[c_void_p] * 3, *[c_int] * 4],
    "cusparseCsrSetPointers": [c_void_p] * 4,
    "cusparseDestroySpMat": [c_void_p],
    "cusparseSpMatGetSize": [c_void_p, *[_LONG] * 3],
    "cusparseSpGEMM_createDescr": [_OUT],
    "cusparseSpGEMM_destroyDescr": [c_void_p],
    "cusparseSpGEMMreuse_workEstimation": [*_STAGE, *_BUFFER],
    "cusparseSpGEMMreuse_nnz": [*_STAGE, *_BUFFER * 3],
    "cusparseSpGEMMreuse_copy": [*_STAGE, *_BUFFER],
    "cusparseSpGEMMreuse_compute": _COMPUTE,
}


def load() -> Any:
    """Load the library: the one that CuPy has loaded, or else the linker's."""
    maps = Path("/proc/self/maps")
    words = maps.read_text().split() if maps.exists() else []
    loaded = [word for word in words if Path(word).name.startswith("libcusparse.so")]
    for path in filter(None, [*loaded, find_library("cusparse")]):
        try:
            return typed(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
    raise MissingPeerError("no libcusparse with SpGEMMreuse is loaded or on the linker's path")


def typed(library: Any) -> Any:
    """Tell a library the types of its arguments."""
    for name, arguments in _PROTOTYPES.items():
        getattr(library, name).argtypes = arguments
    return library


class NumericSpGEMM:
    """``A @ B``, whose structure is known, for CuPy's float32 CSR matrices with int32 indices.

    The library is what :func:`load` returns.
    """

    def __init__(self, gpu: Any, library: Any, a: Any, b: Any) -> None:
        if any(array.dtype != np.int32 for m in (a, b) for array in (m.indices, m.indptr)):
            raise TypeError("expected int32 indices")
        self._library = library
        self._address, self._xp = gpu.address, gpu.xp
        self._shape = a.shape[0], b.shape[1]
        self._one, self._zero = c_float(1), c_float(0)
        self._handle, self._plan = c_void_p(), c_void_p()
        self._call("cusparseCreate", byref(self._handle))
        self._call("cusparseSetStream", self._handle, gpu.stream())
        self._call("cusparseSpGEMM_createDescr", byref(self._plan))
        self._kept = [a, b]  # what the descriptions point into
        self._indptr = gpu.xp.zeros(self._shape[0] + 1, np.int32)
        self._matrices = [
            self._describe(a.shape, a.data, a.indices, a.indptr),
            self._describe(b.shape, b.data, b.indices, b.indptr),
            self._describe(self._shape, None, None, self._indptr),
        ]
        self._find_structure()

    def __call__(self) -> NumericSpGEMM:
        """Make the values."""
        a, b, c = self._matrices
        one, zero = byref(self._one), byref(self._zero)
        work = *self._product, one, a, b, zero, c, _REAL_32, _DEFAULT, self._plan
        self._call("cusparseSpGEMMreuse_compute", *work)
        return self

    def get(self) -> sp.csr_array:
        """Return the product on the host."""
        host = [
            array.get() if hasattr(array, "get") else array
            for array in (self._data, self._indices, self._indptr)
        ]
        return sp.csr_array(tuple(host), shape=self._shape)

    def __del__(self) -> None:
        for matrix in getattr(self, "_matrices", []):
            self._library.cusparseDestroySpMat(matrix)
        if getattr(self, "_plan", None):
            self._library.cusparseSpGEMM_destroyDescr(self._plan)
        if getattr(self, "_handle", None):
            self._library.cusparseDestroy(self._handle)

    @property
    def _product(self) -> tuple[Any, ...]:
        return self._handle, _NO_TRANSPOSE, _NO_TRANSPOSE

    def _find_structure(self) -> None:
        common = *self._product, *self._matrices, _DEFAULT, self._plan
        self._with_buffers("cusparseSpGEMMreuse_workEstimation", common, 1)
        self._with_buffers("cusparseSpGEMMreuse_nnz", common, 3)
        rows, cols, nnz = c_int64(), c_int64(), c_int64()
        self._call("cusparseSpMatGetSize", self._matrices[2], byref(rows), byref(cols), byref(nnz))
        self._indices = self._xp.empty(nnz.value, np.int32)
        self._data = self._xp.full(nnz.value, np.nan, np.float32)
        arrays = self._indptr, self._indices, self._data
        self._call("cusparseCsrSetPointers", self._matrices[2], *map(self._address, arrays))
        self._with_buffers("cusparseSpGEMMreuse_copy", common, 1)

    def _with_buffers(self, name: str, common: tuple[Any, ...], count: int) -> None:
        """Ask how large the buffers must be, then call with buffers."""
        sizes = [c_size_t() for _ in range(count)]
        self._call(name, *common, *chain(*((byref(size), None) for size in sizes)))
        buffers = [self._xp.empty(max(size.value, 1), np.int8) for size in sizes]
        # The library goes on using some of them.
        self._kept += buffers
        pairs = zip(map(byref, sizes), map(self._address, buffers), strict=True)
        self._call(name, *common, *chain(*pairs))

    def _describe(self, shape: tuple[int, int], data: Any, indices: Any, indptr: Any) -> c_void_p:
        description = c_void_p()
        arrays = [None if x is None else self._address(x) for x in (indptr, indices, data)]
        nnz = 0 if data is None else len(data)
        types = _INDEX_32, _INDEX_32, _BASE_ZERO, _REAL_32
        self._call("cusparseCreateCsr", byref(description), *shape, nnz, *arrays, *types)
        return description

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned status {status}")
