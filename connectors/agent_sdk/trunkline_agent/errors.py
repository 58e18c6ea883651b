"""The errors that end a command of `./trunkline`, each with its exit code. Messages say what to do next."""


class TrunklineError(Exception):
    """The base class of errors that end a command.

    Raised itself, it means that something outside the program failed and retrying did not help.
    """

    exit_code = 1


class UsageError(TrunklineError):
    """The command was called with arguments that cannot work."""

    exit_code = 2


class NotFound(TrunklineError):
    """The requested thing does not exist."""

    exit_code = 3


class Refused(TrunklineError):
    """The request was refused by a verdict, by a policy or for lack of a right."""

    exit_code = 4


class BackboneUnreachable(TrunklineError):
    """Kafka, MQTT or the gateway did not answer in time."""

    exit_code = 5
