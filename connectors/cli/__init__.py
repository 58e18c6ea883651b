"""The command line `trunkline`: one module per command, imported when it is called. It may import all."""
