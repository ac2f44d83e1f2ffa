"""Front door for JAX: linear recurrences and recurrent networks under ``jit``, ``grad``, ``vmap``.

JAX is imported when this is. Compiled programs call back to the kernels on the CPU.
"""

from .affine import affine_scan
from .recurrent import recurrent

__all__ = ["affine_scan", "recurrent"]
