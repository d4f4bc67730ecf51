"""Programs run in a sandbox: to their end, as a stream of events, in the background, or on a terminal.

:class:`ProcessTable` is what callers use, from any event loop; everything else here runs on the link's thread.
:mod:`jupyter_agentbox.guest.jobs` is the other end and says what the messages are. It is not trusted: what it sends is
checked, what it can make this end hold is bounded, and a lie ends the process that it was told about.
"""

from .table import Events, ProcessTable
from .values import Chunk, Command, ExecResult, Exit, Output, ProcessInfo

__all__ = ["Chunk", "Command", "Events", "ExecResult", "Exit", "Output", "ProcessInfo", "ProcessTable"]
