"""Presets: machines from public figures, by name, with two levels of network."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["PRESETS", "Preset"]

# Latencies of a round: NCCL 2.10, src/graph/tuning.cc, trees by "LL" over NVLink and a network.
_NVLINK, _NETWORK = 520.0, 5000.0


class Preset(NamedTuple):
    """A machine, and where its figures are from.

    Attributes
    ----------
    machine : dict
        As in a JSON file of :func:`~sparsescan.strategies.load_machine`.
    source : str
        Where the figures can be looked up.
    """

    machine: dict[str, Any]
    source: str


def _preset(
    peak: float, memory: tuple[float, int], node: int, near: float, far: float, source: str
) -> Preset:
    """Return a preset of TFLOP/s, GB/s and GB of memory, and GB/s of a worker on both levels."""
    links = {"within": (_NVLINK, near), "network": (_NETWORK, far)}
    machine: dict[str, Any] = {
        "multiply_adds": peak * 500,
        "bandwidth": memory[0],
        "memory": memory[1] << 30,
        "node": node,
    }
    for level, (latency, rate) in links.items():
        machine[level] = {"latency": latency, "inverse_bandwidth": 1 / rate, "exchange": 1 / rate}
    return Preset(machine, source)


#: Workers at their peak in float32, without tensor cores: what steps take at least. NVLink is
#: counted in one direction, and the network cards of a node are shared by its workers.
PRESETS = {
    "p100": _preset(
        *(10.6, (732.0, 16), 4, 80.0, 12.5 / 4),
        "Tesla P100 SXM2 (NVIDIA's data sheet); nodes of four with one EDR InfiniBand card of 100 "
        "Gb/s, as in DeePa (section 7.3)",
    ),
    "v100": _preset(
        *(15.7, (900.0, 16), 8, 150.0, 50.0 / 8),
        "Tesla V100 SXM2 (NVIDIA's data sheet), as in BPPSA (appendix G); DGX-1: eight with four "
        "EDR InfiniBand cards of 100 Gb/s",
    ),
    "a100": _preset(
        *(19.5, (1555.0, 40), 8, 300.0, 25.0),
        "A100 SXM4 of 40 GB (NVIDIA's data sheet); DGX A100: eight with eight HDR InfiniBand cards "
        "of 200 Gb/s",
    ),
    "h100": _preset(
        *(66.9, (3350.0, 80), 8, 450.0, 50.0),
        "H100 SXM5 (NVIDIA's data sheet); DGX H100: eight with eight NDR InfiniBand cards of 400 "
        "Gb/s",
    ),
}
