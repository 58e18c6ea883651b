"""The file queue: a mailbox on one machine without any server.

    from trunkline_agent.queue import Queue

    queue = Queue()
    queue.send("ask", "Is the build green?", to="builder", sender="ann")
    for message in queue.poll("builder"):
        print(message["from"], message["body"])

Its guarantees and their limits are in docs/how-to/use_the_file_queue.md. It must import only the standard
library and itself: it runs with `python -I -S`, and a send must start quickly.
"""

from trunkline_agent.queue.message_queue import Queue
from trunkline_agent.queue.message_record import TOPICS
from trunkline_agent.queue.queue_errors import QueueDisabledError, QueueError, TopicError
from trunkline_agent.queue.queue_settings import DEFAULT_BODY_THRESHOLD

__all__ = ["DEFAULT_BODY_THRESHOLD", "TOPICS", "Queue", "QueueDisabledError", "QueueError", "TopicError"]
