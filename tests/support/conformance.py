"""Adapt the public conformance suite of Jupyter kernels to a busy machine.

The suite waits a tenth of a second for each iopub message after the reply, and considers the output complete if no
message arrives within another tenth. This version waits until a message arrives, and uses the kernel's idle status to
know that no messages of earlier requests are pending.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jupyter_kernel_test
from jupyter_client.manager import start_new_kernel

#: Timeout for a kernel to start, and minimum timeout for each message, in seconds.
START_TIMEOUT, MESSAGE_TIMEOUT = 240.0, 60.0


class KernelTests(jupyter_kernel_test.KernelTests):  # type: ignore[misc]
    """The suite with longer timeouts."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.km, cls.kc = start_new_kernel(kernel_name=cls.kernel_name, startup_timeout=START_TIMEOUT)
        for channel in (cls.kc.shell_channel, cls.kc.iopub_channel):
            channel.get_msg = _be_patient(channel.get_msg)

    def flush_channels(self) -> None:
        """Read all remaining messages of earlier requests. They arrive before those of a later request."""
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
