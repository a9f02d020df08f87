"""`python -m posbench` is the same as `posbench`."""

from __future__ import annotations

import sys

from posbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
