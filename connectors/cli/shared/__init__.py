"""Options, tables and checks that several commands share. Imports no command."""
