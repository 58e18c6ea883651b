"""The running console: one thread shows incoming messages, the other reads typed lines.

**Acknowledges when** a message was printed; messages that are leased when the console ends are printed, too.
**Loses when** never: the lease of a message that was not printed expires, and the message is handed out again.
"""

from __future__ import annotations

import io
import os
import secrets
import signal
import socket
import sys
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Final

from connectors.cli.organism.console_lines import Known, document_of, shown_xml
from connectors.cli.shared.text_output import aligned, print_json
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of, post_xml, reachable
from connectors.plumbing.xml_payloads.huh import HUH_TAG, huh
from connectors.plumbing.xml_wire.envelope import TEXT_NAMESPACE
from schemas.settings.settings import Settings
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.terminal_text import escaped, is_coloured

_PROMPT: Final = "> "
_WAIT_MS: Final = 1000
_AT_ONCE: Final = 20
_RETRY_S: Final = 1.0
# The time that the main thread has to notice a Ctrl-C.
_NOTICED_S: Final = 0.2
# The pause after a request for redelivered messages alone found none.
_ALONE_REST_S: Final = 0.5
_CLOSE_S: Final = 5.0
_SHOWN: Final = 1000
_HUMAN: Final = "human"
_TEXT: Final = "text"
_HELP: Final = """\
  @calculator <calculate>…</calculate>   to that listener       <calculate>…</calculate>   to all that take it
  calculate expression=1+2 digits=3      made into XML          #3 answer text=yes         answers message 3
  /listeners   who is there              /quit or Ctrl-D        ends"""


class ConsoleSession:
    """The console of one person at one terminal, for one human listener of the XML pump.

    Args:
        settings: The settings, which name the gateway.
        listener: The name of the human listener whose messages are shown.
        is_json: Whether to print messages as JSON.
    """

    def __init__(self, settings: Settings, listener: str, *, is_json: bool = False) -> None:
        self._settings = settings
        self._listener = listener
        self._is_json = is_json
        self._pump = f"console-{secrets.token_hex(6)}"
        self._closing = threading.Event()
        self._output = threading.Lock()
        self._is_typed = sys.stdin.isatty() and sys.stdout.isatty()
        self._listeners: list[dict[str, Any]] = []
        self._shown: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._printed: OrderedDict[str, None] = OrderedDict()
        self._count = 0
        self._version = -1
        self._failure: TrunklineError | None = None

    def run(self) -> int:
        """Show messages and send typed lines until the end of input or `/quit`, and return 0.

        Call this once, on the main thread. It blocks, and retries while the gateway does not answer. Ctrl-C
        raises KeyboardInterrupt. Raises BackboneUnreachable if the gateway does not answer at the start,
        NotFound if there is no such listener, and Refused if the gateway refuses the token.
        """
        try:
            return self._run()
        except KeyboardInterrupt:
            # `_fail` interrupts as Ctrl-C does. The interrupt can come at any line, and even twice.
            if self._failure is None:
                raise
        raise self._failure

    def _run(self) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A character that the terminal cannot show must not end the console.
            sys.stdout.reconfigure(errors="backslashreplace")
        with reachable(self._settings) as gateway:
            self._look_up(gateway)
            if not any(row["listener"] == self._listener and row["type"] == _HUMAN for row in self._listeners):
                raise NotFound(
                    f"there is no human listener {self._listener!r}; "
                    f"'trunkline organism add-listener {self._listener} --type human' makes one"
                )
            if not self._is_json:
                print(f"You are {self._listener}. /help shows what to type, Ctrl-D ends.", flush=True)
            follower = threading.Thread(target=self._follow, name="console", daemon=True)
            # Only the thread that waits for a line may get Ctrl-C: another thread would not wake it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            follower.start()
            self._repeat_interrupts()
            try:
                # A Ctrl-C that is pending already is raised here.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                for line in self._lines():
                    if line.strip() in ("/quit", "/exit"):
                        break
                    self._do(gateway, line.strip())
            finally:
                self._closing.set()
                follower.join(_CLOSE_S)
        if self._failure is not None:
            raise self._failure
        return 0

    def _lines(self) -> Iterator[str]:
        if not self._is_typed:
            yield from sys.stdin
            return
        import readline  # noqa: F401  with it, input() knows the arrow keys

        while True:
            try:
                yield input(_PROMPT)
            except EOFError:
                print()
                return

    def _do(self, gateway: GatewayClient, line: str) -> None:
        if not line:
            return
        try:
            if line == "/listeners":
                self._look_up(gateway)
                self._say(_listener_table(self._listeners))
            elif line.startswith("/"):
                unknown = f"{escaped(line)}: there is /listeners, /help and /quit"
                self._say(_HELP if line == "/help" else unknown)
            else:
                self._send(gateway, line)
        except (UsageError, NotFound, Refused, BackboneUnreachable) as error:
            self._say(f"! {error}")

    def _send(self, gateway: GatewayClient, line: str) -> None:
        tags = {row["root_tag"]: row["namespace"] for row in reversed(self._listeners)}
        by_name = {row["listener"]: row["namespace"] for row in self._listeners}
        document = document_of(line, Known({_TEXT: TEXT_NAMESPACE, **tags}, by_name, dict(self._shown)))
        posted = post_xml(gateway, document, sender=self._listener, request_id=str(uuid.uuid4()))
        if posted.huh is not None:
            self._say(f"! it was not understood\n{shown_xml(posted.huh)}")
        elif not self._is_json:
            self._say(f"sent to {escaped(', '.join(posted.messages))}, thread {escaped(posted.thread[:8])}")

    def _follow(self) -> None:
        """Show incoming messages, on a thread of their own."""
        try:
            with GatewayClient(self._settings) as gateway:
                self._follow_with(gateway)
        except TrunklineError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  else the thread ends silently, and the person waits
            self._fail(TrunklineError(f"it cannot go on: {type(error).__name__}: {escaped(str(error))}"))

    def _follow_with(self, gateway: GatewayClient) -> None:
        is_away, alone = False, False
        done: list[dict[str, Any]] = []
        while not self._closing.is_set() or done:
            try:
                if done:
                    gateway.post(path_of("pump", "settle"), {"pump": self._pump, "done": done})
                    done = []
                    continue
                found = self._leased(gateway, alone=alone)
                if is_away:
                    is_away = False
                    self._say("! the gateway is back")
                if alone and not found["messages"]:
                    self._closing.wait(_ALONE_REST_S)
                    alone = False
                else:
                    alone = found["suspects"] > 0
                done = [self._handled(message) for message in found["messages"]]
                if found["version"] != self._version and not self._closing.is_set():
                    self._look_up(gateway)
                    self._version = found["version"]
            except BackboneUnreachable as error:
                if self._closing.is_set():
                    return
                if not is_away:
                    is_away = True
                    self._say(f"! {error}")
                self._closing.wait(_RETRY_S)

    def _leased(self, gateway: GatewayClient, *, alone: bool) -> dict[str, Any]:
        asked = {"pump": self._pump, "wants": {self._listener: _AT_ONCE}, "free": _AT_ONCE, "alone": alone}
        asked |= {"wait_ms": 0 if alone else _WAIT_MS, "version": self._version}
        return dict(gateway.post(path_of("pump", "lease"), asked))

    def _handled(self, message: dict[str, Any]) -> dict[str, Any]:
        """Print a message, and return its outcome for the gateway."""
        done: dict[str, Any] = {name: message[name] for name in ("listener", "message_id", "request_id")}
        if message.get("listener_gone"):
            body = huh("the listener was removed", about_tag=message["kind"], step="delivery").decode()
            return {**done, "outcome": "huh", "answers": [{"kind": HUH_TAG, "body": body}]}
        if message["message_id"] in self._printed:
            return {**done, "outcome": "handled"}  # it was printed, but the gateway got no answer
        self._show(message)
        self._printed[message["message_id"]] = None
        if len(self._printed) > _SHOWN:
            self._printed.popitem(last=False)
        return {**done, "outcome": "handled"}

    def _show(self, message: dict[str, Any]) -> None:
        self._count += 1
        self._shown[self._count] = (message["sender"], message["thread"])
        if len(self._shown) > _SHOWN:
            self._shown.popitem(last=False)
        if self._is_json:
            names = ("message_id", "sender", "from_verified", "kind", "content_type", "body", "thread")
            with self._output:
                print_json({"number": self._count, **{name: message[name] for name in names}})
                sys.stdout.flush()
            return
        sender = escaped(message["sender"]) + ("" if message["from_verified"] else " (not verified)")
        tag, thread = escaped(message["kind"]), escaped(message["thread"][:8])
        heading = f"#{self._count} {sender} <{tag}> thread {thread}"
        if is_coloured():
            heading = f"\033[1m{heading}\033[0m"
        self._say(f"{heading}\n{shown_xml(message['body'])}")

    def _look_up(self, gateway: GatewayClient) -> None:
        found = gateway.get_all(path_of("listeners"), "listeners", itemgetter("listener"))
        self._listeners = found["listeners"]

    def _repeat_interrupts(self) -> None:
        """Send the main thread a Ctrl-C again that it has not noticed.

        readline loses a Ctrl-C that comes while it starts, until the next key.
        """
        receiving, sending = socket.socketpair()
        sending.setblocking(False)
        signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
        self._wakeup = (receiving, sending)

        def watch() -> None:
            while receiving.recv(1):
                if not self._closing.wait(_NOTICED_S):
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=watch, name="console-interrupts", daemon=True).start()

    def _fail(self, error: TrunklineError) -> None:
        """Store the error and interrupt the thread that waits for a line."""
        self._failure = error
        if not self._closing.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    def _say(self, text: str) -> None:
        with self._output:
            if not self._is_typed:
                print(text, file=sys.stderr if self._is_json else sys.stdout, flush=True)
                return
            import readline

            typed = readline.get_line_buffer() if threading.current_thread().name == "console" else None
            # This overwrites the line that is being typed, which is then written again.
            sys.stdout.write(f"\r\033[K{text}\n" + ("" if typed is None else _PROMPT + typed))
            sys.stdout.flush()


def _listener_table(listeners: list[dict[str, Any]]) -> str:
    rows = [(row["listener"], f"<{row['root_tag']}>", row["namespace"], row["capability"]) for row in listeners]
    return aligned(("LISTENER", "TAKES", "NAMESPACE", "CAPABILITY"), rows)
