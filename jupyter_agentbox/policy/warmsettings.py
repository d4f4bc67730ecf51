"""The settings of warm starts, part of :class:`~jupyter_agentbox.policy.policy.Policy`."""

from __future__ import annotations

from traitlets import Bool, Int
from traitlets.config import LoggingConfigurable

from jupyter_agentbox.spec import GIB

from .traits import ByteSize


class WarmSettings(LoggingConfigurable):
    """How kernels of Python are started ahead of anybody who asks for them."""

    templates = Bool(
        True,
        help="""Start Python kernels off templates where there are any: saved right after their start, one for each
        environment and profile, before any code ran in them. `jupyter agentbox warm` makes them, and so does a server
        in the background, after the first start that had none.""",
    ).tag(config=True)
    pool_size = Int(
        0,
        min=0,
        max=100,
        help="""Python kernels of each profile in use that a server has waiting, for the next starts to take; profiles
        may set their own number. Each takes the memory of an idle kernel, and no processor.""",
    ).tag(config=True)
    pool_max_memory = ByteSize(
        1 * GIB, help="Most memory of all that wait in one server's pool; none is added beyond it."
    ).tag(config=True)
