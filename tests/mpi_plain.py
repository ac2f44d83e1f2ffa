"""On some ranks: Python with these arguments, without ``-m mpi4py``, as a console script runs."""

import os
import sys

os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
