"""HTTP routes for pumps and XML messages."""
