"""Code in persistent kernels over REST, in one sandbox."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import pytest
import requests
from support.api import Api, Make
from support.harness import wait_until


def test_variables_stay_and_outputs_come_apart(api: Api, box: str) -> None:
    assert api.ok("POST", box + "/code", {"code": "x = 20"})["status"] == "ok"
    ran = api.ok("POST", box + "/code", {"code": "import sys\nprint('o'); print('e', file=sys.stderr)\nx + 1"})
    assert (ran["stdout"], ran["stderr"], ran["result"]["data"]["text/plain"]) == ("o\n", "e\n", "21")
    error = api.ok("POST", box + "/code", {"code": "1/0"})
    assert (error["status"], error["error"]["ename"]) == ("error", "ZeroDivisionError")
    cut = api.ok("POST", box + "/code", {"code": "print('x' * 5000)", "stream_bytes": 100})
    assert cut["truncated"] is True
    assert cut["total_bytes"]["stdout"] == 5001
    late = api.ok("POST", box + "/code", {"code": "import time\ntime.sleep(60)", "timeout": 1})
    assert late["status"] == "timed_out"
    assert api.ok("POST", box + "/code", {"code": "x"})["result"]["data"]["text/plain"] == "20"


def test_a_flood_of_output_keeps_its_end_and_progress_its_last_state(api: Api, box: str) -> None:
    code = (
        "import sys\nfor i in range(60000): print('step', i, 'x' * 20)\n"
        "for i in range(3000): print(f'\\r{i:4} of 3000', end='', file=sys.stderr)\nprint('RESULT 42')"
    )
    ran = api.ok("POST", box + "/code", {"code": code})
    assert ran["stdout"].startswith("step 0 xxx")
    assert ran["stdout"].endswith("\nRESULT 42\n")
    assert "bytes of output left out]\n" in ran["stdout"]
    assert len(ran["stdout"]) < 1024 * 1024 + 100
    assert ran["stderr"] == "2999 of 3000"
    assert (ran["truncated"], ran["total_bytes"]) == (True, {"stdout": 1_908_900, "stderr": 39_000, "displays": 0})
    events = list(api.events("POST", box + "/code/stream", {"code": code, "stream_bytes": 1000}))
    printed = "".join(event["text"] for name, event in events if name == "stream" and event["name"] == "stdout")
    assert printed.endswith("\nRESULT 42\n")
    assert len(events[-1][1]["result"]["stdout"]) < 1100


def test_events(api: Api, box: str) -> None:
    events = list(api.events("POST", box + "/code/stream", {"code": "print(1)\n5"}))
    assert [name for name, _ in events] == ["stream", "result", "done"]
    assert events[-1][1]["result"]["status"] == "ok"


def test_sound_comes_as_it_is(api: Api, box: str) -> None:
    code = (
        "import io, wave\nfrom IPython.display import Audio, display\nfile = io.BytesIO()\n"
        "with wave.open(file, 'wb') as sound:\n"
        "    sound.setparams((1, 2, 8000, 0, 'NONE', ''))\n    sound.writeframes(bytes(1600))\n"
        "display({'audio/wav': file.getvalue()}, raw=True)\ndisplay(Audio(data=file.getvalue()))"
    )
    raw, player = api.ok("POST", box + "/code", {"code": code})["displays"]
    with wave.open(io.BytesIO(base64.b64decode(raw["data"]["audio/wav"]))) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (8000, 800)
    assert f"data:audio/wav;base64,{raw['data']['audio/wav']}" in player["data"]["text/html"].replace("\n", "")


@pytest.mark.network
def test_a_plot_of_plotly_comes_as_its_own_type(api: Api, box: str) -> None:
    api.ok("POST", box + "/packages", {"packages": ["plotly"]}, timeout=300)
    code = (
        "import plotly.io, plotly.graph_objects as go\nplotly.io.renderers.default = 'plotly_mimetype'\n"
        "go.Figure(go.Bar(y=[3, 1, 2], name='bars')).show()"
    )
    ran = api.ok("POST", box + "/code", {"code": code, "timeout": 120}, timeout=150)
    assert ran["status"] == "ok", ran
    (plot,) = ran["displays"]
    (bars,) = plot["data"]["application/vnd.plotly.v1+json"]["data"]
    assert (bars["type"], bars["name"], bars["y"]) == ("bar", "bars", [3, 1, 2])


def test_a_caller_who_goes_away_interrupts_its_run(api: Api, box: str) -> None:
    with pytest.raises(requests.Timeout):
        api("POST", box + "/code", {"code": "import time\ntime.sleep(300)"}, timeout=1.5)
    assert api.ok("POST", box + "/code", {"code": "'free'", "timeout": 60})["status"] == "ok", "not at the sleep's end"


def test_contexts(api: Api, box: str) -> None:
    made = api("POST", box + "/contexts", {"name": "second"})
    assert made.status_code == 201
    assert api.ok("POST", box + "/code", {"code": "x", "context": "second"})["error"]["ename"] == "NameError"
    names = [item["name"] for item in api.ok("GET", box + "/contexts")["contexts"]]
    assert names == ["default", "second"]
    assert api("POST", box + "/contexts/second/interrupt").status_code == 204
    api.ok("POST", box + "/exec", {"command": "true"})  # the guest does one thing after the other: it was sent
    died = api.ok("POST", box + "/code", {"code": "import os\nos._exit(3)", "context": "second"})
    assert died["status"] == "kernel_died"
    assert api("DELETE", box + "/contexts/second").status_code == 204
    api.fails(404, "DELETE", box + "/contexts/second")
    assert api.fails(400, "POST", box + "/contexts", {"name": "a b"})["field"] == "name"
    assert api.fails(400, "POST", box + "/code", {"code": "1", "language": "cobol"})["field"] == "language"
    assert api.fails(400, "POST", box + "/code", {})["field"] == "code"


#: Starts what usually escapes a kill of a process group. Each is a `sleep` of a number of its own.
CHILDREN = """
import os, signal, subprocess
START = {start}
subprocess.Popen(["sleep", str(START)])
subprocess.Popen(["sleep", str(START + 1)], start_new_session=True, env={{}})
subprocess.Popen(f"nohup sleep {{START + 2}} >/dev/null 2>&1 &", shell=True)
ignoring = "trap '' TERM HUP INT; exec sleep"
subprocess.Popen(["sh", "-c", f"{{ignoring}} {{START + 3}}"])
def daemon(line):
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.closerange(0, 64)
        os.execvpe("sh", ["sh", "-c", line], {{"PATH": os.environ["PATH"]}})
    os.wait()
daemon(f"{{ignoring}} {{START + 4}}")
daemon(f"sleep {{START + 5}} & sleep {{START + 6}} & wait")
"""


def _sleeping(api: Api, at: str) -> list[int]:
    line = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null | grep '^sleep ' || true"
    found = api.ok("POST", at + "/exec", {"command": line})["stdout"].splitlines()
    return sorted(int(text.split()[1]) for text in found)


def _wait_for(api: Api, at: str, *expected: range) -> None:
    wanted = sorted(number for numbers in expected for number in numbers)
    seen: list[Any] = []

    def is_so() -> bool:
        seen[:] = _sleeping(api, at)
        return seen == wanted

    try:
        wait_until(is_so, 60, "the processes")
    except AssertionError as error:
        raise AssertionError(f"{error}: running {seen}, expected {wanted}") from None


def test_the_processes_of_a_context_end_with_it_and_no_others(api: Api, make: Make) -> None:
    at = make()
    one, two, others = range(30000, 30007), range(31000, 31007), range(32000, 32003)
    for name, numbers in (("one", one), ("two", two)):
        ran = api.ok("POST", at + "/code", {"code": CHILDREN.format(start=numbers[0]), "context": name})
        assert ran["status"] == "ok", ran
    api.ok("POST", at + "/processes", {"command": f"sleep {others[0]} & sleep {others[1]}"})
    api.ok("POST", at + "/exec", {"command": f"setsid sleep {others[2]} </dev/null >/dev/null 2>&1 &"})
    _wait_for(api, at, one, two, others)

    api.ok("POST", at + "/contexts/one/restart")
    assert _sleeping(api, at) == [*two, *others], "a restart ends the processes of its context"
    api.ok("POST", at + "/code", {"code": CHILDREN.format(start=one[0]), "context": "one"})
    _wait_for(api, at, one, two, others)
    api.ok("DELETE", at + "/contexts/one")
    assert _sleeping(api, at) == [*two, *others], "a deletion ends the processes of its context"
    died = api.ok("POST", at + "/code", {"code": "os._exit(3)", "context": "two"})
    assert died["status"] == "kernel_died"
    _wait_for(api, at, others)
