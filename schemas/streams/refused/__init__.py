"""The refused stream: requests that a door refused, and records whose stream the door could not determine."""
