"""The operations of the hub by family: declaration, plan and answer. They import the hub and below."""
