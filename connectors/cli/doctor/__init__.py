"""`trunkline doctor`: one module for each group of checks. Imports no other command."""
