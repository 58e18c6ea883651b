"""Agent sessions as processes: starting, watching and ending them, in tmux or process groups."""
