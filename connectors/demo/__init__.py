"""The demo: a scripted scene on a stack of its own."""
