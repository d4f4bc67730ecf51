"""Run the guest as PID 1, started as ``python -I -S -B <this directory>``: import the directory as a package."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from guest.pid1 import main  # type: ignore[import-not-found]

    sys.exit(main())
