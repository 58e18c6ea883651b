"""The outbox on disk of a job or an agent: messages that are numbered, signed and not confirmed yet."""
