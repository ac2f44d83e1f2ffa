"""The JAX interface: recurrences, networks and simulations under ``jit``, ``grad``, ``vmap``.

Importing it imports JAX. JAX's compiled programs call our kernels on the CPU, on JAX's buffers and
threads. They do not call Python, except in simulations, whose function is the user's.
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
