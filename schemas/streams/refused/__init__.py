"""The refused stream: requests that a door refused on its own decision, and what it could not key."""
