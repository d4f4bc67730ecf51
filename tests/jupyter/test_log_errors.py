"""Errors of a start in the server's log: one line each, however often Jupyter reports them."""

from __future__ import annotations

import json
import logging

import pytest
from support.harness import Env

from jupyter_agentbox.errors import NotFound
from jupyter_agentbox.jupyter.log_errors import shorten


def test_an_image_that_does_not_exist_is_one_line_in_the_log(agentbox_env: Env) -> None:
    folder = agentbox_env.data / "kernels" / "gone"
    folder.mkdir(parents=True)
    stanza = {"provisioner_name": "agentbox-provisioner", "config": {"image": "nothing"}}
    spec = {
        "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "gone",
        "language": "python",
        "metadata": {"kernel_provisioner": stanza},
    }
    (folder / "kernel.json").write_text(json.dumps(spec))
    body = {"path": "a.ipynb", "type": "notebook", "name": "a", "kernel": {"name": "gone"}}
    sentence = "image 'nothing' does not exist; images are: none"
    with agentbox_env.server("server", "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}") as server:
        for path, request, status in (
            ("api/sessions", body, 500),
            ("api/kernels", {"name": "gone"}, 500),
            ("api/agentbox/sandboxes", {"image": "nothing"}, 404),
        ):
            before = len(server.log.read_text())
            answer = server.http.post(server.url(path), json=request, timeout=100)
            assert answer.status_code == status, answer.text
            log = server.log.read_text()[before:]
            assert "Traceback" not in log
            assert sum(line.endswith(f"] {sentence}. Build one with `jupyter agentbox image build`")
                       for line in log.splitlines()) == (status == 500), log  # fmt: skip
            assert "background task" not in log


def test_other_errors_and_debugging_keep_their_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("test_log_errors")
    shorten(log)
    shorten(log)
    assert len(log.filters) == 1

    def report(error: Exception) -> list[logging.LogRecord]:
        caplog.clear()
        try:
            raise error
        except Exception as caught:
            log.exception(caught)
            log.exception("again: %s", caught)
        return list(caplog.records)

    (one,) = report(NotFound("no %s here"))
    assert (one.getMessage(), one.exc_info) == ("no %s here", None)
    assert all(record.exc_info for record in report(ValueError("x")))
    handler = logging.NullHandler(logging.DEBUG)
    log.addHandler(handler)
    assert [bool(record.exc_info) for record in report(NotFound("x"))] == [True, True]
