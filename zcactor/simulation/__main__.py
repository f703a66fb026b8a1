"""``python -m zcactor.simulation``; see `zcactor.simulation.command`."""

from __future__ import annotations

import sys

from zcactor.simulation.command import main

if __name__ == "__main__":
    sys.exit(main())
