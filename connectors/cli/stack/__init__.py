"""Commands about the stack: up, down, status, logs, topic, fold, demo, benchmarks."""
