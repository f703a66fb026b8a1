"""``python -m simulation``; see `simulation.command`."""

from __future__ import annotations

import sys

from simulation.command import main

if __name__ == "__main__":
    sys.exit(main())
