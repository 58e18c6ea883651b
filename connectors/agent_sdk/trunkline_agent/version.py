"""The version of the distribution `trunkline-agent`, from which the build reads it."""

__version__ = "0.1.0"
