"""Lists of rows of the live view, in order and in pages, and the stream of their changes."""
