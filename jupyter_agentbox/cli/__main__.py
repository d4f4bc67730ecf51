"""Run the command line as ``python -m jupyter_agentbox.cli``."""

from . import main

main()
