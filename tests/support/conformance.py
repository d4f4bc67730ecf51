"""The public conformance suite of Jupyter kernels, for a machine that has other things to do.

The suite waits a tenth of a second for each message on iopub once the reply is there, and takes what does not come
within another tenth to be all that was on its way. Here it waits until a message comes, and knows by the kernel's own
word that nothing of earlier requests is to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jupyter_kernel_test
from jupyter_client.manager import start_new_kernel

#: Seconds that a kernel has to start, and that it has for each message, at least.
START_TIMEOUT, MESSAGE_TIMEOUT = 240.0, 60.0


class KernelTests(jupyter_kernel_test.KernelTests):  # type: ignore[misc]
    """The suite, with patience."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.km, cls.kc = start_new_kernel(kernel_name=cls.kernel_name, startup_timeout=START_TIMEOUT)
        for channel in (cls.kc.shell_channel, cls.kc.iopub_channel):
            channel.get_msg = _be_patient(channel.get_msg)

    def flush_channels(self) -> None:
        """Read all that earlier requests still have to say: it comes before what is said of a later one."""
        msg_id = self.kc.kernel_info()
        for channel, last in (
            (self.kc.shell_channel, lambda message: message["msg_type"] == "kernel_info_reply"),
            (self.kc.iopub_channel, lambda message: message["content"].get("execution_state") == "idle"),
        ):
            while True:
                message = channel.get_msg(timeout=MESSAGE_TIMEOUT)
                jupyter_kernel_test.validate_message(message)
                if message["parent_header"].get("msg_id") == msg_id and last(message):
                    break


def _be_patient(get_msg: Callable[..., Any]) -> Callable[..., Any]:
    def patient(timeout: float | None = None) -> Any:
        return get_msg(timeout=max(timeout or 0.0, MESSAGE_TIMEOUT))

    return patient
