"""Run programs in a sandbox: to completion, as a stream of events, in the background, or on a terminal.

Callers use :class:`ProcessTable`, from any event loop. Everything else here runs on the link thread.
:mod:`jupyter_agentbox.guest.jobs` is the other end and documents the messages. It is not trusted: its messages are
checked, the data that it can make this end buffer is bounded, and a protocol violation ends the process concerned.
"""

from .table import Events, ProcessTable
from .values import Chunk, Command, ExecResult, Exit, Output, ProcessInfo

__all__ = ["Chunk", "Command", "Events", "ExecResult", "Exit", "Output", "ProcessInfo", "ProcessTable"]
