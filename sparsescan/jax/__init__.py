"""Front door for JAX: linear recurrences and recurrent networks under ``jit``, ``grad``, ``vmap``.

JAX is imported when this is. Its compiled programs call compiled kernels on their own buffers, on
the CPU, with its threads and without Python.
"""

from .affine import affine_scan
from .filters import lfilter, sosfilt
from .recurrent import recurrent
from .selective import selective_scan

__all__ = ["affine_scan", "lfilter", "recurrent", "selective_scan", "sosfilt"]
