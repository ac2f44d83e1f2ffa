"""The command line: ``sparsescan``, or ``python -m sparsescan``."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from . import __version__, demo, exclusive_scan, inclusive_scan, load_chain, plan
from .costs import machine_file
from .errors import InputError, SparseScanError
from .kernels._memory import address_of
from .kernels._threads import thread_count
from .plot import plot_plan
from .schedule import Schedule

__all__ = ["main"]

# A schedule needs the number of Jacobians, which is not known before the file is read.
ScheduleOption = Callable[[int], "Schedule | str"]

_SCHEDULES = "auto, linear, blelloch, truncated:K (K up-sweep levels) or chunked:C (C chunks)"
_SCAN = """\
Compute the gradients of a chain that sparsescan.save_chain has written, and write
them to another .npz file. If the chain is stacked (a CSRChain or one dense array),
they are one array, under the key "gradients"; if it is a list, they are arrays under
the keys "gradient_0", "gradient_1", and so on. The last layer's come first.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; by default those of the process.

    Returns
    -------
    int
        The exit code: 0; 2, with one line on stderr, if a file or an option is wrong; 130 if
        interrupted.

    Examples
    --------
    >>> from sparsescan.__main__ import main
    >>> main(["scan", "no-such-file.npz", "-o", "gradients.npz"])  # and a line on stderr
    2
    """
    try:
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)
    except (SparseScanError, ImportError, MemoryError) as error:
        return _complain(str(error))
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        return _complain(f"{name}{error.strerror or error}; give a path that works")
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(message: str) -> int:
    print("sparsescan:", " ".join(message.split()), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sparsescan",
        description="Gradients of long chains as a parallel scan over sparse transposed Jacobians.",
    )
    parser.add_argument("--version", action="version", version=f"sparsescan {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    training = commands.add_parser(
        "demo",
        help="train a network with the scan, side by side with back-propagation",
        description="Train a tanh RNN on scikit-learn's handwritten digits, read pixel by pixel, "
        "with the scan and with sequential back-propagation through time, and compare the two.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    training.add_argument("--hidden", type=int, default=20, help="size of the hidden state")
    training.add_argument("--epochs", type=int, default=100, help="passes over the images")
    training.add_argument("--batch", type=int, default=16, help="images of a batch")
    _add_schedule(training)
    _add_device(training)
    training.add_argument("--output", default="demo.png", help="PNG file for the loss curves")
    training.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    training.set_defaults(command=_demo)

    info = commands.add_parser("info", help="print versions, devices, threads and cache folder")
    info.set_defaults(command=_info)

    calibration = commands.add_parser(
        "calibrate",
        help="measure what operations take on this machine, for predicted times",
        description="Scan chains of all kinds for some fifteen seconds, or on a GPU for some "
        "minutes, and keep what operations take on this machine in the cache folder. Best when "
        "nothing else runs.",
    )
    calibration.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what is measured"
    )
    calibration.add_argument(
        "--mpi", action="store_true", help="the network between the ranks of mpiexec instead"
    )
    calibration.set_defaults(command=_calibrate)

    show = commands.add_parser("plan", help="print the plan for a chain, or draw it")
    show.add_argument("file", metavar="FILE.npz", help="written by sparsescan.save_chain")
    _add_schedule(show)
    _add_device(show)
    show.add_argument("--plot", metavar="OUT.png", help="PNG file for the FLOP of every step")
    show.set_defaults(command=_plan)

    scan = commands.add_parser(
        "scan",
        help="compute the gradients of a chain",
        description=_SCAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scan.add_argument("file", metavar="FILE.npz", help="written by sparsescan.save_chain")
    scan.add_argument("-o", "--output", metavar="OUT.npz", required=True, help="file to write")
    scan.add_argument(
        "--inclusive", action="store_true", help="the gradient of the first layer's input, too"
    )
    _add_schedule(scan)
    _add_device(scan)
    scan.set_defaults(command=_scan)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where the scan runs: cpu or cuda")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", type=_schedule, default="auto", help=_SCHEDULES)


def _schedule(text: str) -> ScheduleOption:
    """Read the option, such as ``chunked:32``."""
    name, colon, number = text.partition(":")
    if name in ("auto", "linear", "blelloch") and not colon:
        return lambda n: name
    if name in ("truncated", "chunked") and number.isdecimal():
        return lambda n: getattr(Schedule, name)(n, int(number))
    raise argparse.ArgumentTypeError(f"{text!r} is no schedule; expected {_SCHEDULES}")


def _demo(arguments: argparse.Namespace) -> None:
    demo.run(
        hidden=arguments.hidden,
        epochs=arguments.epochs,
        batch=arguments.batch,
        schedule=arguments.schedule(demo.STEPS),
        device=arguments.device,
        output=arguments.output,
        seed=arguments.seed,
    )


def _info(arguments: argparse.Namespace) -> None:
    rows = [("sparsescan", __version__), ("python", platform.python_version())]
    rows += [(name, _version(name)) for name in ("numba", "numpy", "scipy")]
    rows += [("cupy", _version("cupy", "cupy-cuda12x", "cupy-cuda13x"))]
    rows += [("numba-cuda", _version("numba-cuda"))]
    rows += [("CPU", f"{_cpu_name()}, {_cpu_count()} usable")]
    rows += [("CUDA GPUs", ", ".join(_gpu_names()) or "none")]
    rows += [("threads", f"{thread_count()} (NUMBA_NUM_THREADS)")]
    rows += [("Numba cache", f"{address_of.stats.cache_path} (NUMBA_CACHE_DIR)")]
    rows += [("calibration", str(machine_file()) if machine_file().exists() else "none")]
    for name, value in rows:
        print(f"{name:<12}{value}")


def _calibrate(arguments: argparse.Namespace) -> None:
    if arguments.mpi:
        _calibrate_network()
        return
    if arguments.device == "cuda":
        from .calibrate_device import calibrate_device
        from .device_costs import save_gpu

        gpu = calibrate_device()
        _print_families(gpu.families)
        print(f"a run {gpu.run:.0f} ns, a launch {gpu.launch:.0f} ns")
        blocks = f"{gpu.blocks:.0f} blocks at once"
        print(f"{blocks}, memory {gpu.bandwidth:.0f} GB/s; kept in {save_gpu(gpu)}")
        return
    from .calibrate import calibrate
    from .costs import save_machine

    machine = calibrate()
    _print_families(machine.families)
    print(f"a run {machine.run:.0f} ns, a meeting of threads {machine.meet:.0f} ns")
    print(f"memory {machine.bandwidth:.0f} GB/s, one thread; kept in {save_machine(machine)}")


def _calibrate_network() -> None:
    from mpi4py import MPI

    from .parallel import Communicator, measure, save_network

    communicator = Communicator.of(MPI.COMM_WORLD)
    if communicator.size == 1:
        raise InputError("there is one rank; expected several: run it by mpiexec -n 4")
    network = measure(communicator)
    if communicator.rank == 0:
        print(f"a message {network.latency:.0f} ns and {network.inverse_bandwidth:.3g} ns a byte")
        print(f"kept in {save_network(network)}")


def _print_families(families: dict[str, list[list[float]]]) -> None:
    from .costs import FAMILIES

    print(f"{'nanoseconds of':<16}{'multiply-add':>14}{'entry':>10}{'operation':>12}")
    for name, constants in families.items():
        for family, (multiply_add, entry, operation) in zip(FAMILIES, constants, strict=True):
            print(f"{family:<16}{multiply_add:>14.3f}{entry:>10.3f}{operation:>12.0f}  {name}")


def _plan(arguments: argparse.Namespace) -> None:
    grad, jacobians = load_chain(arguments.file)
    parts = jacobians if isinstance(jacobians, list) else [jacobians]
    made = plan(
        jacobians,
        schedule=arguments.schedule(len(jacobians)),
        batch=(len(grad) or None) if grad.ndim == 2 else None,
        dtype=np.result_type(grad, *{part.dtype for part in parts}),
        device=arguments.device,
    )
    print(made)
    if arguments.plot is not None:
        plot_plan(made, arguments.plot)
        print(f"FLOP of every step: {arguments.plot}")


def _scan(arguments: argparse.Namespace) -> None:
    grad, jacobians = load_chain(arguments.file)
    scan = inclusive_scan if arguments.inclusive else exclusive_scan
    start = time.perf_counter()
    schedule = arguments.schedule(len(jacobians))
    gradients = scan(grad, jacobians, schedule=schedule, device=arguments.device)
    seconds = time.perf_counter() - start
    arrays: dict[str, Any]
    if isinstance(gradients, np.ndarray):
        arrays = {"gradients": gradients}
    else:
        arrays = {f"gradient_{k}": gradient for k, gradient in enumerate(gradients)}
    # np.savez would append .npz to a name without it.
    with open(arguments.output, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    dtype = gradients[0].dtype if len(gradients) else grad.dtype
    print(f"{arguments.output}: {len(gradients)} gradients of {dtype}, in {seconds:.3g} s")


def _version(*names: str) -> str:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu_names() -> list[str]:
    """What the driver says, so that none of the optional packages is needed."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()


if __name__ == "__main__":
    sys.exit(main())
