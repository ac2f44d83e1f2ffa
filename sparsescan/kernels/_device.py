"""The one door to ``numba.cuda``, and memory by address on a device.

In Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) addresses are of the host, and kernels are Python.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import config, cuda, types

__all__ = ["cuda", "load"]

if config.ENABLE_CUDASIM:  # type: ignore[attr-defined]

    def load(address: int, index: int, like: Any) -> Any:
        """``address[index]``, of the dtype of the array `like`."""
        at = int(address) + int(index) * like.itemsize
        return np.frombuffer((ctypes.c_byte * like.itemsize).from_address(at), like.dtype)[0]

else:
    from numba.cuda.extending import intrinsic

    @intrinsic
    def load(typingctx, address, index, like):  # type: ignore[no-untyped-def]
        """``address[index]``, of the dtype of the array `like`."""
        dtype = like.dtype

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            address, index, _ = args
            pointer = builder.inttoptr(address, context.get_data_type(dtype).as_pointer())
            return builder.load(builder.gep(pointer, [index]))

        return dtype(types.int64, types.int64, like), codegen
