"""The one Kafka and the one Mosquitto of all seeds, each behind a proxy, whose port is all that clients see."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from pathlib import Path
from typing import Final

from connectors.programs.local_stack import free_port
from schemas.log_access.event_topic import admin_client
from tests.broker_processes import LOOPBACK, BrokerProcess, accepts, kafka_at, make_kafka, make_mosquitto
from tests.tcp_proxy import PASS, TcpProxy

_END_S: Final = 10.0
_FULL_QUEUES: Final = "max_queued_messages 1\n"


class Brokers:
    """`kafka_port` and `mosquitto_port` are the proxies'. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.kafka_port, self.mosquitto_port = free_port(), free_port()
        kafka = make_kafka(folder / "kafka")
        properties = folder / "kafka" / "server.properties"
        own, seen = (f"SASL_PLAINTEXT://127.0.0.1:{port}" for port in (kafka.port, self.kafka_port))
        # Clients go on at the address that Kafka tells them.
        text = properties.read_text().replace(f"advertised.listeners={own}", f"advertised.listeners={seen}")
        properties.write_text(text)
        self._mosquitto_data = folder / "mosquitto"
        mosquitto = make_mosquitto(self._mosquitto_data)
        # A limit for files is an error of the write then, as a full disk is, and does not end the program.
        mosquitto.command = ["sh", "-c", "trap '' XFSZ; exec \"$@\"", "sh", *mosquitto.command]
        self.processes = {"kafka": kafka, "mosquitto": mosquitto}
        self.proxies: dict[str, TcpProxy] = {}
        self._full: set[str] = set()
        self._starting: list[threading.Thread] = []

    def __enter__(self) -> Brokers:
        for broker in self.processes.values():
            broker.start()
        self.proxies = {
            name: TcpProxy(socket.create_server((LOOPBACK, port)), self.processes[name].port)
            for name, port in (("kafka", self.kafka_port), ("mosquitto", self.mosquitto_port))
        }
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self.proxies.values():
            proxy.close()
        for thread in self._starting:
            thread.join(_END_S)
        for broker in self.processes.values():
            broker.kill()

    def kill(self, name: str) -> None:
        """kill -9, and a new one on the same port and data, for which nobody waits here."""
        broker = self.processes[name]
        broker.kill()
        self._full.discard(name)
        self._start(name)

    def _start(self, name: str) -> None:
        thread = threading.Thread(target=self.processes[name].start, name=f"start-{name}", daemon=True)
        self._starting.append(thread)
        thread.start()

    def wipe_mosquitto(self) -> None:
        """Kill it, and let a new one begin with an empty store, for which nobody waits here."""
        self.processes["mosquitto"].kill()
        for store in self._mosquitto_data.glob("mosquitto.db*"):
            store.unlink()
        self._start("mosquitto")

    def fill_disk(self, name: str) -> None:
        """Let no file of the broker grow: Kafka ends, and Mosquitto cannot save. `kill` gives room again."""
        process = self.processes[name].process
        if process is None or process.poll() is not None:
            return
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
        self._full.add(name)
        if name == "mosquitto":
            self.save_mosquitto()

    def save_mosquitto(self) -> None:
        """Let Mosquitto save its sessions and messages, or try to."""
        if _listens(self.processes["mosquitto"]):  # before, the signal would end it
            self.signal("mosquitto", signal.SIGUSR1)

    def limit_queues(self, *, is_full: bool) -> None:
        """Let Mosquitto keep one message for each client that is away, and drop others; or keep all again.

        It saves its sessions, and begins again with other limits. Nobody waits for that here.
        """
        conf, mosquitto = self._mosquitto_data / "mosquitto.conf", self.processes["mosquitto"]
        text = conf.read_text()
        if text.endswith(_FULL_QUEUES) == is_full:
            return
        conf.write_text(text + _FULL_QUEUES if is_full else text.removesuffix(_FULL_QUEUES))
        self.signal("mosquitto", signal.SIGCONT)  # otherwise it could not end
        mosquitto.stop()
        self._start("mosquitto")

    @property
    def dropped(self) -> int:
        """How often Mosquitto began to drop messages for a client."""
        return self.processes["mosquitto"].log_path.read_text(errors="replace").count("are being dropped")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Stop it, or let it go on."""
        process = self.processes[name].process
        if process is not None and process.poll() is None:
            os.kill(process.pid, number)

    def heal(self) -> None:
        """Everything is let through again."""
        for proxy in self.proxies.values():
            proxy.mode = PASS
        for name in self.processes:
            self.signal(name, signal.SIGCONT)
        for name in list(self._full):
            self.kill(name)
        self.limit_queues(is_full=False)

    def forget_seeds(self) -> None:
        """Delete the topics of seeds that are over, and what Mosquitto has kept for their clients."""
        forget_sessions(self.processes["mosquitto"], self._mosquitto_data)
        with admin_client(kafka_at(self.kafka_port)) as admin:
            own = [name for name in admin.list_topics() if not name.startswith("__")]
            if own:
                admin.delete_topics(own)

    def are_up(self) -> bool:
        """True if both listen."""
        return all(broker.process is not None and _listens(broker) for broker in self.processes.values())


def forget_sessions(mosquitto: BrokerProcess, folder: Path) -> None:
    """Start Mosquitto anew without the sessions and messages that it has stored in `folder`.

    It saves them every five minutes. A kill in a later seed would bring messages of an earlier one back, for
    clients that have the same names.
    """
    mosquitto.kill()
    (folder / "mosquitto.db").unlink(missing_ok=True)
    mosquitto.start()


def _listens(broker: BrokerProcess) -> bool:
    return accepts(broker.port)
