"""The errors that end a command, each with its exit code. Their messages say what to do."""


class TrunklineError(Exception):
    """Something outside went wrong and was not mended by retrying."""

    exit_code = 1


class UsageError(TrunklineError):
    """The command was called in a way that cannot work."""

    exit_code = 2


class NotFound(TrunklineError):
    """What was asked for does not exist."""

    exit_code = 3


class Refused(TrunklineError):
    """Somebody decided against it: a verdict, a policy, a right that is missing."""

    exit_code = 4


class BackboneUnreachable(TrunklineError):
    """Kafka, MQTT or the gateway did not answer in time."""

    exit_code = 5
