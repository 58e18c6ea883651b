"""A program with an agent that kills itself: arguments are the credentials, the point, another agent's name.

It handles one message: it answers, and sends messages to the other agent and to a topic. `after_send` kills it
before it acknowledges the message, `before_send` before it sends; `never` lets it end. It prints the attempt.
killed.mjs is the same program in JavaScript.
`wait` waits for messages without an end, and prints them.
"""

from __future__ import annotations

import os
import signal
import sys

from trunkline_agent import Agent


def main() -> None:
    path, point, other = sys.argv[1:]
    with Agent(None, path) as agent:
        if point == "wait":
            print("waits", flush=True)
            for message in agent.messages():
                print(message.payload, flush=True)
        message = agent.receive(lease_s=2, wait_s=20)
        assert message is not None
        print(message.attempt, flush=True)
        with message:
            if point == "before_send":
                os.kill(os.getpid(), signal.SIGKILL)
            message.reply({"done": message.payload})
            agent.send(other, "note", {"about": message.payload})
            agent.publish("killed-agents", "note", {"of": message.payload, "half": 0.5})
            agent.send(other, "note", {"n": 1}, key="mine")
            if point == "after_send":
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
