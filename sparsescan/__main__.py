"""Run the command line: ``python -m sparsescan``."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
