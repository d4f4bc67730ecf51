"""How kernels are started inside."""

from __future__ import annotations

from jupyter_agentbox.driver import prepare_argv


def test_ipykernel_is_started_by_our_launcher_and_keeps_its_arguments() -> None:
    argv = prepare_argv(["/env/bin/python", "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "x", "--debug"])
    assert argv[:3] == ["/env/bin/python", "-Xfrozen_modules=off", "-c"]
    assert "launch_new_instance" in argv[3]
    assert argv[4:] == ["-f", "x", "--debug"]


def test_other_kernels_are_started_as_their_kernelspecs_say() -> None:
    for argv in (["R", "--slave", "-e", "IRkernel::main()"], ["python", "-m", "bash_kernel", "-f", "x"]):
        assert prepare_argv(argv) == argv
