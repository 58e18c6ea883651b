"""Parts that several commands share: actions, arguments, tables, calls to the gateway. Imports no command."""
