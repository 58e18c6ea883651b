"""The container stream: the processes that a launcher started for tasks."""
