"""The thread stream: the conversations between listeners, and the calls that opened them."""
