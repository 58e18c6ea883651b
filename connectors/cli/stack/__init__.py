"""Commands about the stack: up, down, status, logs, log, fold, demo, benchmarks."""
