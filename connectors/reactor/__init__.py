"""The process manager: appends the records that follow from settled ones, such as a message at a job's end."""
