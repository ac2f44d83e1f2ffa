"""Front door for JAX: recurrences, networks and simulations under ``jit``, ``grad``, ``vmap``.

JAX is imported when this is. Its compiled programs call compiled kernels on their own buffers, on
the CPU, with its threads; and without Python, but for a simulation, whose function is the user's.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(f"sparsescan.jax needs JAX ({error}): pip install jax") from error

from .affine import affine_scan
from .attention import linear_attention
from .filters import lfilter, sosfilt
from .recurrent import recurrent
from .scan import explain, scan
from .selective import selective_scan
from .simulation import simulate

__all__ = [
    "affine_scan",
    "explain",
    "lfilter",
    "linear_attention",
    "recurrent",
    "scan",
    "selective_scan",
    "simulate",
    "sosfilt",
]
