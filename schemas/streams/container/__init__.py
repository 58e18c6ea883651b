"""The container stream: the processes that launchers start for tasks."""
