"""Run code in persistent kernels: a sandbox's own contexts, or the kernel of an open notebook.

A *context* is a named kernel in a sandbox. It is started at first use and has its own front, so any Jupyter client can
attach to it as well. In the sandbox of a notebook's kernel, that kernel is the context ``default``, so a person and an
agent share its variables. The caller of this module decides which sandboxes a user may use.

``kernels.kernelclient`` runs the code, and ``models.outputs`` describes the results. (The module is not called
``code``, because that is the usual name of an argument here, and of a standard library module.)
"""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar, Literal

import msgspec

from jupyter_agentbox.errors import Conflict, InvalidRequest, LinkClosed, NotFound, SandboxEnded, TooLarge
from jupyter_agentbox.models.outputs import CodeResult, ContextInfo, DoneEvent, Event, OutputLimits
from jupyter_agentbox.policy.languages import PYTHON, find_language, list_languages, suggest_image
from jupyter_agentbox.sandbox.link.thread import LinkThread, on_link_thread
from jupyter_agentbox.sandbox.record import KernelRecord
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import KIB, MIB, WORKSPACE, End, format_size

from .front.front import Front
from .kernelclient import END_GRACE, Feed, KernelClient
from .sandboxed_kernel import SandboxedKernel
from .warm.starts import DEFAULT_CONTEXT as DEFAULT
from .warm.starts import context_argv
from .warm.templates import context_env

#: Maximum number of contexts in one sandbox, not counting a notebook's kernel.
MAX_CONTEXTS = 16
#: Maximum size of the code in one run, in bytes.
MAX_CODE = 4 * MIB
#: Seconds that a signal may wait for a guest that does not read, and that a killed kernel may take to end.
SIGNAL_TIMEOUT = 5.0
#: Bytes of text that may wait for the reader of a stream, if the limits allow less.
MIN_QUEUE = 64 * KIB
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

#: Where code runs: a sandbox, or an open notebook's kernel (:meth:`Runner.notebook`), which outlives its sandboxes.
Target = Sandbox | SandboxedKernel


class _Context:
    """A kernel of our own in a sandbox, and its front, which stays when the kernel is replaced."""

    def __init__(self, sandbox: Sandbox, name: str, language: str, known: KernelRecord | None = None) -> None:
        self.name = name
        self.language = language
        self.front: Front | None = None
        self._sandbox = sandbox
        # A kernel that already runs was started by an earlier owner, or comes from a snapshot.
        self._key = known.key if known is not None else secrets.token_hex(16)
        self._kernel = sandbox.kernels.get(known.name) if known is not None else None
        self._lock = asyncio.Lock()

    async def ready(self) -> KernelClient:
        """Return the client of the context's kernel. Starts a kernel if there is none."""
        async with self._lock:
            if self._sandbox.end is not None:
                raise SandboxEnded(self._sandbox.end)
            if self.front is None and self._kernel is not None and self._kernel.end is None:
                self.front = await Front.open(key=self._key.encode())
                self.front.attach(self._kernel)
            elif self.front is None or self.front.end is not None or self._kernel is None:
                await self._start()
            assert self.front is not None
            return KernelClient.of(self.front, self.signal, self.name)

    async def _start(self) -> None:
        self._forget_kernel()
        front = self.front = self.front or await Front.open(key=self._key.encode())
        front.restarting()
        spec = self._sandbox.spec
        other = find_language(spec.kernels, self.language) if self.language != PYTHON else None
        kernel = self._kernel = await self._sandbox.start_kernel(
            other.argv if other else context_argv(spec),
            context_env(spec),
            WORKSPACE,
            key=self._key,
            signature_scheme="hmac-sha256",
            context=self.name,
            language=self.language,
        )
        front.attach(kernel)

    def _forget_kernel(self) -> None:
        if self._kernel is not None:
            self._sandbox.forget_kernel(self._kernel)
            self._kernel = None

    async def signal(self, number: int) -> None:
        """Send a signal to the kernel and its children, if there is a kernel."""
        other = find_language(self._sandbox.spec.kernels, self.language) if self.language != PYTHON else None
        if number == signal.SIGINT and other is not None and other.interrupt_mode == "message":
            if self.front is not None:
                KernelClient.of(self.front, self.signal, self.name).request_interrupt()
        elif self._kernel is not None:
            with suppress(LinkClosed, asyncio.TimeoutError):
                await asyncio.wait_for(self._kernel.signal(number), SIGNAL_TIMEOUT)

    async def kill(self) -> None:
        """Kill the kernel. The context is dead afterwards."""
        async with self._lock:
            kernel = self._kernel
            if kernel is not None and kernel.end is None:
                gone = asyncio.Event()
                kernel.add_end_callback(gone.set)
                if self.front is not None:
                    self.front.is_end_expected = True
                await self.signal(signal.SIGKILL)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(gone.wait(), SIGNAL_TIMEOUT)

    def ended(self, end: End) -> None:
        """Record that the sandbox has ended, before the kernel's own watcher notices it."""
        if self._kernel is not None:
            self._kernel.ended(end)

    def close(self) -> None:
        """Release the context's resources in this process. A running kernel is left to the sandbox's next owner."""
        if self._kernel is not None and self._kernel.end is not None:
            self._forget_kernel()
        if self.front is not None:
            self.front.close()

    def connection_info(self) -> dict[str, Any]:
        """Return the connection information for a Jupyter client, including the key."""
        assert self.front is not None
        return {**self.front.connection_info, "key": self._key, "signature_scheme": "hmac-sha256"}

    def info(self) -> ContextInfo:
        # A prestarted or taken-over kernel has no front before its first use.
        is_idle = self.front is None and self._kernel is not None and not self._kernel.is_busy()
        return _describe(self.name, self.language, self.front, is_idle=is_idle)


class Runner:
    """A runner of code in the kernels of this process's sandboxes. The coroutines may be awaited on any event loop.

    Parameters
    ----------
    max_contexts : int
        Maximum number of contexts in one sandbox.
    """

    _shared: ClassVar[Runner | None] = None

    def __init__(self, max_contexts: int = MAX_CONTEXTS) -> None:
        self.max_contexts = max_contexts
        self._contexts: dict[Sandbox, dict[str, _Context]] = {}
        self._thread = LinkThread.instance()

    @classmethod
    def shared(cls) -> Runner:
        """Return the runner of this process, which REST and MCP share so that both see the same contexts."""
        if cls._shared is None or cls._shared._thread is not LinkThread.instance():
            cls._shared = cls()
        return cls._shared

    def notebook(self, kernel_id: str) -> SandboxedKernel:
        """Return an open notebook's kernel.

        Raises
        ------
        NotFound
            This server runs no sandboxed kernel with that id.
        """
        notebook = SandboxedKernel.find(kernel_id=kernel_id)
        if notebook is None:
            raise NotFound(f"this server has no sandboxed kernel {kernel_id!r}", field="kernel_id")
        return notebook

    # -- running -----------------------------------------------------------------------------

    async def run(
        self,
        target: Target,
        code: str,
        *,
        context: str = DEFAULT,
        language: str | None = None,
        timeout: float | None = 60.0,
        limits: OutputLimits | None = None,
        keep_running: bool = False,
        is_silent: bool = False,
    ) -> CodeResult:
        """Run code and return its result.

        Parameters
        ----------
        target : Sandbox or SandboxedKernel
        code : str
        context : str
            Context to run in. It is created if it does not exist.
        language : str, optional
            If given, it must be the context's language; see :class:`~jupyter_agentbox.models.CodeRequest`.
        timeout : float or None
            Seconds after which the code is interrupted. Waiting for other code in the same kernel counts, starting the
            kernel does not.
        limits : OutputLimits, optional
            How much output is kept.
        keep_running : bool
            If the caller is cancelled, let the code run on instead of interrupting it.
        is_silent : bool
            Keep the code out of the history.

        Raises
        ------
        InvalidRequest, TooLarge
            A value is invalid.
        SandboxEnded, LinkClosed, RuntimeFailed
            No kernel is available. If a kernel ends while it runs the code, the result reports that.
        """
        self._check(code, timeout, limits)
        limits = limits or OutputLimits()
        return await self._run(target, code, context, language, timeout, limits, keep_running, None, is_silent)

    async def stream(
        self,
        target: Target,
        code: str,
        *,
        context: str = DEFAULT,
        language: str | None = None,
        timeout: float | None = 60.0,
        limits: OutputLimits | None = None,
        keep_running: bool = False,
    ) -> AsyncIterator[Event]:
        """Run code and yield its events, with a :class:`~jupyter_agentbox.models.outputs.DoneEvent` last.

        Parameters and errors are those of :meth:`run`. Closing the iterator early counts as cancelling the call.
        """
        self._check(code, timeout, limits)
        limits = limits or OutputLimits()
        feed = Feed(max(limits.stream_bytes, MIN_QUEUE))
        task = asyncio.ensure_future(self._run(target, code, context, language, timeout, limits, keep_running, feed))
        try:
            while events := await self._thread.run(feed.read()):
                for event in events:
                    yield event
            yield DoneEvent(await task)
        finally:
            task.cancel()

    @on_link_thread
    async def _run(
        self,
        target: Target,
        code: str,
        context: str,
        language: str | None,
        timeout: float | None,
        limits: OutputLimits,
        keep_running: bool,
        feed: Feed | None = None,
        is_silent: bool = False,
    ) -> CodeResult:
        try:
            client = await self._client(target, self._name(target, context, language), language)
            return await client.run(
                code,
                timeout=timeout,
                limits=limits,
                emit=feed.put if feed is not None else None,
                keep_running=keep_running,
                is_silent=is_silent,
            )
        finally:
            if feed is not None:
                feed.close()

    def _check(self, code: str, timeout: float | None, limits: OutputLimits | None) -> None:
        size = len(code.encode("utf-8", "replace"))
        if size > MAX_CODE:
            raise TooLarge(f"code of {format_size(size)} exceeds the maximum of {format_size(MAX_CODE)}", field="code")
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InvalidRequest("timeout must be a positive number of seconds, or null for none", field="timeout")
        try:
            msgspec.convert(limits and msgspec.to_builtins(limits), OutputLimits | None)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"limits: {error}", field="limits") from None

    @on_link_thread
    async def interrupt(self, target: Target, context: str = DEFAULT) -> None:
        """Interrupt the code that the context runs, regardless of who sent it. Raises NotFound."""
        notebook = _notebook_of(target)
        if notebook is not None and context == DEFAULT:
            await notebook.signal(signal.SIGINT)
        else:
            found = self._find(target, context)
            if found.front is not None and found.front.has_output:  # before that, the signal would kill the kernel
                await found.signal(signal.SIGINT)

    # -- contexts ----------------------------------------------------------------------------

    @on_link_thread
    async def contexts(self, target: Target) -> list[ContextInfo]:
        """Return the contexts, with the notebook's kernel first."""
        notebook = _notebook_of(target)
        found = [] if notebook is None else [_describe(DEFAULT, notebook.language, notebook.front, is_notebook=True)]
        return found + [context.info() for context in self._of(_sandbox_of(target)).values()]

    @on_link_thread
    async def create_context(self, target: Target, name: str = DEFAULT, language: str | None = None) -> ContextInfo:
        """Start a context's kernel, so that the first run need not wait for it.

        An existing context is left as it is.

        Raises
        ------
        InvalidRequest, TooLarge
            The name is invalid, the language is unknown, or there are too many contexts.
        SandboxEnded, LinkClosed
        """
        name = self._name(target, name, language)
        await self._client(target, name, language)
        return next(info for info in await self.contexts(target) if info.name == name)

    @on_link_thread
    async def delete_context(self, target: Target, name: str) -> None:
        """Kill a context's kernel and forget the context. Raises NotFound, Conflict."""
        context = self._find(target, name)
        await context.kill()
        self._contexts.get(_sandbox_of(target), {}).pop(name, None)
        context.close()

    @on_link_thread
    async def restart_context(self, target: Target, name: str = DEFAULT) -> ContextInfo:
        """Give a context a new kernel. The addresses stay, the variables are lost. Raises NotFound, Conflict."""
        context = self._find(target, name)
        await context.kill()
        await context.ready()
        return context.info()

    @on_link_thread
    async def connection_info(self, target: Target, context: str = DEFAULT) -> dict[str, Any]:
        """Return the connection information for a Jupyter client on this machine, including the key.

        Raises NotFound.
        """
        return self._find(target, context).connection_info()

    def _find(self, target: Target, name: str) -> _Context:
        context = self._of(_sandbox_of(target)).get(name)
        if context is None and name == DEFAULT and _notebook_of(target) is not None:
            raise Conflict("this context is a notebook's kernel; restart or end it in Jupyter", field="context")
        if context is None:
            raise NotFound(f"context {name!r} does not exist", field="context")
        return context

    async def _client(self, target: Target, name: str, language: str | None) -> KernelClient:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "a context's name must have 1 to 64 letters, digits or any of '_.-', and begin with a letter or digit",
                field="context",
            )
        language = self._language(target, language)
        notebook = _notebook_of(target)
        if notebook is not None and name == DEFAULT:
            if notebook.front is None:
                raise NotFound("the notebook's kernel was shut down", field="kernel_id")
            return KernelClient.of(notebook.front, notebook.signal, name)
        sandbox = _sandbox_of(target)
        if sandbox.end is not None:
            raise SandboxEnded(sandbox.end)
        contexts = self._of(sandbox)
        context = contexts.get(name)
        if context is not None and language not in (None, context.language):
            raise InvalidRequest(
                f"context {name!r} runs {context.language}; use another one for {language}", field="language"
            )
        if context is None:
            if len(contexts) >= self.max_contexts:
                raise TooLarge(f"a sandbox has at most {self.max_contexts} contexts; delete one", field="context")
            context = contexts[name] = _Context(sandbox, name, language or PYTHON)
        # Several callers may wait for the same start, so the cancellation of one of them does not end it.
        return await asyncio.shield(self._ready(contexts, context))

    def _language(self, target: Target, language: str | None) -> str | None:
        """Return the kernel's name for a language, or ``python``. Raises InvalidRequest."""
        if language is None or language.lower() == PYTHON:
            return language and PYTHON
        kernels = _sandbox_of(target).spec.kernels
        found = find_language(kernels, language)
        if found is None:
            message = (
                f"no kernel for language {language!r:.60}; available languages: {', '.join(list_languages(kernels))}"
            )
            remedy = suggest_image(language)
            raise InvalidRequest(f"{message}. {remedy}" if remedy else message, field="language")
        return found.languages[0].lower()

    def _name(self, target: Target, name: str, language: str | None) -> str:
        """Return the context to use: for a language other than Python its own one, unless a context was named."""
        wanted = self._language(target, language)
        if name != DEFAULT or wanted in (None, PYTHON):
            return name
        found = find_language(_sandbox_of(target).spec.kernels, str(wanted))
        return found.name if found is not None else name

    async def _ready(self, contexts: dict[str, _Context], context: _Context) -> KernelClient:
        try:
            return await context.ready()
        except BaseException:
            if context.front is None or not context.front.is_attached:
                if contexts.get(context.name) is context:
                    del contexts[context.name]
                context.close()
            raise

    def _of(self, sandbox: Sandbox) -> dict[str, _Context]:
        """Return the contexts of a sandbox, which live as long as it does."""
        contexts = self._contexts.get(sandbox)
        if contexts is None:
            contexts = self._contexts[sandbox] = {
                known.context: _Context(sandbox, known.context, known.language, known)
                for known in sandbox.record.kernels
                if known.context
            }
            earlier = sandbox.gate.on_refusal

            def on_refusal(host: str, port: int, sentence: str) -> None:
                if earlier is not None:
                    earlier(host, port, sentence)
                # The kernel that made the request is unknown. Kernels in which nothing runs do not show it.
                for context in contexts.values():
                    if context.front is not None:
                        context.front.refusal(host, port, sentence)

            sandbox.gate.on_refusal = on_refusal
            self._thread.spawn(self._clean_up(sandbox))
        return contexts

    @on_link_thread
    async def aclose(self) -> None:
        """Release all contexts, because the process is about to exit. Their kernels end with their sandboxes."""
        found, self._contexts = self._contexts, {}
        for contexts in found.values():
            for context in contexts.values():
                context.close()

    async def _clean_up(self, sandbox: Sandbox) -> None:
        end = await sandbox.wait_ended()
        # Callers that wait for an answer learn about the end and its reason before the contexts are closed.
        for context in self._contexts.get(sandbox, {}).values():
            context.ended(end)
        await asyncio.sleep(END_GRACE)
        for context in self._contexts.pop(sandbox, {}).values():
            context.close()


def _notebook_of(target: Target) -> SandboxedKernel | None:
    return target if isinstance(target, SandboxedKernel) else SandboxedKernel.find(sandbox_id=target.id)


def _sandbox_of(target: Target) -> Sandbox:
    if isinstance(target, Sandbox):
        return target
    if target.sandbox is None:
        raise NotFound("the notebook's kernel was shut down", field="kernel_id")
    return target.sandbox


def _describe(
    name: str, language: str, front: Front | None, is_notebook: bool = False, is_idle: bool = False
) -> ContextInfo:
    end = front.end if front is not None else None
    state: Literal["starting", "idle", "busy", "dead"]
    if end is not None:
        state = "dead"
    elif is_idle:
        state = "idle"
    elif front is None or not front.is_attached or not front.has_output:
        state = "starting"
    else:
        state = "busy" if front.cell.is_busy else "idle"
    return ContextInfo(name, language, state, front.epoch if front is not None else 0, is_notebook, end)
