"""Small agents for experiments, the demo and the tests."""
