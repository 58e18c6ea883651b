"""The out-of-band door (XP-11): signed commands that change which listeners there are, over a Unix socket."""
