"""Registering and starting a job from its owner's side: secrets, brokers and submission."""
