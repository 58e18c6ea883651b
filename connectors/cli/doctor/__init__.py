"""`trunkline doctor`: one module per group of checks."""
