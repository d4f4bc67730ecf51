"""``python -m jupyter_agentbox.cli``."""

from . import main

main()
