"""The PyTorch interface: modules that replace PyTorch's own, scans, filters and simulations.

Importing it imports PyTorch. Replace ``from torch.nn import GRU`` by
``from sparsescan.torch import GRU``. Or call :func:`convert` on an existing model; :func:`revert`
undoes it. :func:`module` makes modules of any cell.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"sparsescan.torch needs PyTorch ({error}): pip install torch") from error

from ..checks import former_names
from .affine import affine_scan
from .attention import linear_attention
from .cells import module
from .conversion.conversion import convert, revert
from .conversion.explain import explain
from .filters import lfilter, sosfilt
from .loops.loop import loop
from .recurrent import GRU, LSTM, RNN
from .scan import scan
from .selective import selective_scan
from .simulation import simulate
from .streams import stream

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "affine_scan",
    "convert",
    "explain",
    "lfilter",
    "linear_attention",
    "loop",
    "module",
    "revert",
    "scan",
    "selective_scan",
    "simulate",
    "sosfilt",
    "stream",
]

__getattr__ = former_names(
    __name__,
    {
        "Conversion": ("torch.conversion.conversion:Conversion", ""),
        "Explanation": ("torch.conversion.explain:Explanation", ""),
        "Sequential": (
            "torch.sequential:Sequential",
            "convert(torch.nn.Sequential(…)), after it was pruned",
        ),
    },
)
