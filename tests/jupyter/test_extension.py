"""What the extension does to the server that loads it."""

from __future__ import annotations

from typing import Any

import pytest
import zmq


@pytest.fixture
def jp_server_config(tmp_path: Any) -> dict[str, Any]:
    return {
        "ServerApp": {"jpserver_extensions": {"jupyter_agentbox": True}},
        "Policy": {"state_dir": str(tmp_path / "state")},
    }


def test_a_server_has_room_for_the_sockets_of_thousands_of_kernels(jp_serverapp: Any) -> None:
    context = jp_serverapp.kernel_manager.context
    sockets = [context.socket(zmq.DEALER) for _ in range(1500)]
    for socket in sockets:
        socket.close()
