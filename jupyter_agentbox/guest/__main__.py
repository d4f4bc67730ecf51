"""Started as ``python -I -S -B <this directory>`` as PID 1: makes the directory a package and runs it."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from guest.pid1 import main  # type: ignore[import-not-found]

    sys.exit(main())
